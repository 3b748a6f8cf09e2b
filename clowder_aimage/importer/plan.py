"""Every decision of a create, made before a byte of weights is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from clowder_aimage.dialect import AImage, Dialect, Layer
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.importer.inventory import Component, Inventory, SourceFile
from clowder_aimage.importer.shards import SourceTensor
from clowder_aimage.oci import MAX_MANIFEST_SIZE, Descriptor, Digest, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.tensor import encode_header

_UNKNOWN = {"sha256": Digest("sha256", "0" * 64), "sha512": Digest("sha512", "0" * 128)}


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a directory cannot tell: given on the command line, or left out."""

    license: str | None = None
    source: str | None = None
    created: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A blob to be: ``prefix`` (a safetensors header, or nothing), then a span of a file that
    was last written at ``modified``, in nanoseconds."""

    name: str
    media_type: str
    prefix: bytes
    path: Path
    offset: int
    nbytes: int
    modified: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.prefix) + self.nbytes

    def layer(self, digest: Digest) -> Layer:
        """The layer, now that its digest is known."""
        return Layer(
            Descriptor(self.media_type, digest, self.size), self.name, self.dtype, self.shape
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The layers in the order they will have, the bytes of the AImage config, and what is to
    hash them all."""

    layers: tuple[PlannedLayer, ...]
    config: bytes
    algorithm: str

    @property
    def size(self) -> int:
        """The bytes of all layers."""
        return sum(layer.size for layer in self.layers)


def make_plan(
    inventory: Inventory, dialect: Dialect, provenance: Provenance, algorithm: str = "sha256"
) -> Plan:
    """Decide everything.

    Raises:
        ModelError: a name cannot be a layer's, or the manifest would be larger than registries
            take.
    """
    layers = [_file(file) for file in inventory.files]
    for component in inventory.components:
        layers += [_file(file) for file in component.files]
        layers += [_tensor(component.name, tensor) for tensor in component.tensors]
    layers.sort(key=lambda layer: layer.name)
    _check_names(layers)
    plan = Plan(tuple(layers), encode(_config(inventory, layers, provenance)), algorithm)
    _check_manifest(plan, dialect)
    return plan


def _check_names(layers: list[PlannedLayer]) -> None:
    for layer in layers:
        try:
            check_name(layer.name)
        except FormatError as error:
            raise ModelError(f"{layer.path}: {error}") from None
    for layer, following in pairwise(layers):
        if layer.name == following.name:
            raise ModelError(
                f"{layer.path} and {following.path} both have something called {layer.name[:200]}"
            )


def _check_manifest(plan: Plan, dialect: Dialect) -> None:
    """Write the manifest with digests of the right length to see how large it gets."""
    try:
        digest = _UNKNOWN[plan.algorithm]
        dialect.write(AImage(plan.config, tuple(layer.layer(digest) for layer in plan.layers)))
    except FormatError:
        raise ModelError(
            f"{len(plan.layers)} layers make a manifest of over {MAX_MANIFEST_SIZE} bytes, "
            "which no registry takes",
            hint="models of many small tensors need them packed into fewer layers",
        ) from None


def _file(file: SourceFile) -> PlannedLayer:
    return PlannedLayer(
        file.name, mediatype.AIMAGE_FILE, b"", file.path, 0, file.size, file.modified
    )


def _tensor(component: str, tensor: SourceTensor) -> PlannedLayer:
    return PlannedLayer(
        f"{component}/{tensor.name}",
        mediatype.AIMAGE_SAFETENSORS,
        encode_header([(tensor.name, tensor.dtype, tensor.shape)]),
        tensor.path,
        tensor.offset,
        tensor.nbytes,
        tensor.modified,
        tensor.dtype,
        tensor.shape,
    )


def _config(
    inventory: Inventory, layers: list[PlannedLayer], provenance: Provenance
) -> dict[str, Any]:
    """The AImage config (schemas/aimage-config.schema.json): what it is, not who packed it."""
    tensors = [tensor for component in inventory.components for tensor in component.tensors]
    config: dict[str, Any] = {
        "schemaVersion": 1,
        "family": inventory.family,
        "pipeline": inventory.pipeline,
        **_totals(tensors),
        "size": sum(layer.size for layer in layers),
        "components": {c.name: _component(c, layers) for c in inventory.components},
    }
    size = _default_size(inventory)
    if size:
        config["defaults"] = {"width": size, "height": size}
    optional = {
        "license": provenance.license or inventory.license,
        "source": provenance.source,
        "created": provenance.created,
    }
    return config | {key: value for key, value in optional.items() if value}


def _component(component: Component, layers: list[PlannedLayer]) -> Mapping[str, Any]:
    size = sum(layer.size for layer in layers if layer.name.startswith(f"{component.name}/"))
    described: dict[str, Any] = {"library": component.library, "class": component.class_name}
    if component.tensors:
        described |= {"tensors": len(component.tensors), **_totals(component.tensors)}
    return described | {"size": size}


def _totals(tensors: Iterable[SourceTensor]) -> dict[str, Any]:
    """The number of parameters, and the dtype that most bytes have."""
    parameters, count = 0, Counter[str]()
    for tensor in tensors:
        parameters += math.prod(tensor.shape)
        count[tensor.dtype] += tensor.nbytes
    dtype = max(sorted(count), key=lambda name: count[name], default=None)
    return {"parameters": parameters} | ({"dtype": dtype} if dtype else {})


def _default_size(inventory: Inventory) -> int | None:
    """The side of the square pictures that the VAE was trained on, in pixels, if it says so."""
    for component in inventory.components:
        size = component.config.get("sample_size")
        if component.name == "vae" and isinstance(size, int) and size > 0 and size % 16 == 0:
            return size
    return None
