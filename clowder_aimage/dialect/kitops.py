"""KitOps ModelKits: read only.

The format: github.com/kitops-ml/kitops, pkg/lib/constants/mediatype/kitops.go (68df2461a941) and
artifacttype.go (289350c80025), pkg/artifact/kitfile.go (ec7d6049ba06): the config is the Kitfile as
JSON, whose entries have the digest of their layer. In older ones the n-th entry of a kind is the
n-th layer of that kind (pkg/lib/filesystem/unpack/core.go, ec7d6049ba06). Prompts are layers of
code with an annotation.

A layer is a tar of a file or a directory, and remains one: its name is the path in the Kitfile with
``.tar``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.dialect.dialect import Dialect
from clowder_aimage.dialect.layer_name import clean_path, name_layers
from clowder_aimage.dialect.vendor import (
    build_vendor_config,
    get_nested,
    guess_media_type,
    read_object,
)
from clowder_aimage.oci import Descriptor, Manifest

_MANIFEST = "application/vnd.kitops.modelkit.manifest.v1+json"
_CONFIG = "application/vnd.kitops.modelkit.config.v1+json"
# pkg/lib/constants/consts.go
_SUBTYPE = "ml.kitops.modelkit.layer-subtype"
_LAYER = re.compile(
    r"application/vnd\.kitops\.modelkit\.(model|modelpart|dataset|code|docs|prompt)\.v1\."
    r"(tar|raw)(?:\+(?:gzip|zstd))?"
)
_LISTS = {"dataset": "datasets", "code": "code", "docs": "docs", "prompt": "prompts"}


class _Element(NamedTuple):
    """An entry of a Kitfile: its kind, its path, and the digest of its layer if it has one."""

    kind: str
    path: str
    digest: str


class _Elements:
    """The entries of a Kitfile that no layer has taken, by kind and digest, in its order."""

    def __init__(self, elements: Iterable[_Element]) -> None:
        self._unclaimed: dict[tuple[str, str], deque[_Element]] = {}
        for element in elements:
            self._unclaimed.setdefault((element.kind, element.digest), deque()).append(element)

    def take(self, kind: str, digest: str) -> _Element | None:
        """Remove and return the next entry with the digest, or without one."""
        for key in ((kind, digest), (kind, "")):
            if queue := self._unclaimed.get(key):
                return queue.popleft()
        return None


class KitOpsDialect(Dialect):
    """A model with its data, code and documentation."""

    name = "kitops"
    product = "KitOps"

    def matches(self, manifest: Manifest) -> bool:
        return manifest.artifact_type == _MANIFEST or manifest.config.media_type == _CONFIG

    def read(self, manifest: Manifest, config: bytes) -> AImage:
        kitfile = read_object(config)
        elements = _Elements(_iter_elements(kitfile))
        names = [_name(layer, elements) for layer in manifest.layers]
        layers = name_layers(manifest.layers, names, _read)
        return AImage(_build_config(layers, kitfile), layers, manifest.subject)


def _iter_elements(kitfile: Mapping[str, Any]) -> Iterator[_Element]:
    """Yield the entries with a layer, in the Kitfile's order; remote data sets have none."""
    model = get_nested(kitfile, "model")
    entries = [
        ("model", model),
        *(("modelpart", model_part) for model_part in _list(get_nested(model, "parts"))),
    ]
    for kind, key in _LISTS.items():
        entries += [(kind, element) for element in _list(get_nested(kitfile, key))]
    for kind, element in entries:
        path, digest = get_nested(element, "path"), get_nested(element, "digest")
        if isinstance(element, dict) and "://" not in str(path):
            yield _Element(
                kind,
                path if isinstance(path, str) else "",
                digest if isinstance(digest, str) else "",
            )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _name(layer: Descriptor, elements: _Elements) -> str | None:
    """Take the layer's entry and return its path. Raises FormatError."""
    match = _LAYER.fullmatch(layer.media_type)
    if match is None:
        return None
    kind = "prompt" if layer.annotations.get(_SUBTYPE) == "prompt" else match[1]
    element = elements.take(kind, str(layer.digest))
    if element is None:
        return None
    path = clean_path(element.path) or kind
    return f"{path}.tar" if match[2] == "tar" else path


def _read(layer: Descriptor, name: str) -> Layer:
    media_type = layer.media_type
    if media_type.endswith(".raw"):
        media_type = guess_media_type(name) or media_type
    return Layer(Descriptor(media_type, layer.digest, layer.size), name)


def _build_config(layers: tuple[Layer, ...], kitfile: Mapping[str, Any]) -> bytes:
    model, package = get_nested(kitfile, "model"), get_nested(kitfile, "package")
    return build_vendor_config(
        layers,
        {
            "name": (get_nested(model, "name"), get_nested(package, "name")),
            "format": (get_nested(model, "format"),),
            "license": (get_nested(model, "license"), get_nested(package, "license")),
        },
    )
