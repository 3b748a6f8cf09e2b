"""show: describe an AImage, or an index of AImages, by its manifest and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.content.decompress import open_decompressed
from clowder_aimage.content.platform import Candidate, list_candidates
from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.formats.model_tree import CARD, MAX_CARD
from clowder_aimage.formats.onnx_signature import OnnxSignature, OnnxValue, read_signature
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, check_stored
from clowder_aimage.layout.stored_aimage import StoredAImage, interpret, read_manifest
from clowder_aimage.model.ability import Ability
from clowder_aimage.model.stored_ability import find_ability
from clowder_aimage.oci import Descriptor, Index, Reference, mediatype, parse_document
from clowder_aimage.oci.descriptor import to_plain

# ONNX models that are read.
_MAX_MODELS = 20


@dataclass(frozen=True, slots=True)
class ShownAImage:
    """An AImage: its missing parts, and for one in a store its ability here."""

    reference: Reference
    stored: StoredAImage
    completeness: Completeness
    ability: Ability | None = None
    signatures: Mapping[str, OnnxSignature] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the description for programs."""
        value = _encode_aimage(self.reference, self.stored, self.completeness, self.ability)
        if self.signatures:
            value["onnx"] = [_encode_signature(*item) for item in self.signatures.items()]
        return value


@dataclass(frozen=True, slots=True)
class ShownIndex:
    """An index: the description of its manifests for programs."""

    value: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the description for programs."""
        return self.value


def show(source: Source, reference: Reference) -> ShownAImage | ShownIndex:
    """Describe an artifact of a layout or a registry; no layer is fetched from a registry.

    Raises:
        NotFoundError: It is not there.
        UnauthorizedError, NetworkError, RegistryError, StoreError: It cannot be read.
        FormatError, VerificationError: It is not an AImage, or damaged.
    """
    descriptor = source.resolve(reference)
    if descriptor.media_type in mediatype.INDEXES:
        return ShownIndex(_encode_index(source, reference, descriptor))
    stored = interpret(source, descriptor, read_manifest(source, descriptor))
    if not isinstance(source, ImageLayout):
        return ShownAImage(reference, stored, Completeness(stored.descriptor))
    ability = find_ability(source, stored.descriptor.digest, stored.aimage)
    completeness, signatures = check_stored(source, stored), _read_signatures(source, stored.aimage)
    return ShownAImage(reference, stored, completeness, ability, signatures)


def read_card(source: Source, reference: Reference) -> bytes:
    """Return the model card of an AImage in a layout or a registry.

    Raises:
        NotFoundError: It is not there, or has no card.
        FormatError, VerificationError: It is an index, or the card is too large or damaged.
        UnauthorizedError, NetworkError, RegistryError, StoreError: It cannot be read.
    """
    descriptor = source.resolve(reference)
    if descriptor.media_type in mediatype.INDEXES:
        hint = "choose one of its manifests by its digest"
        raise FormatError(f"{reference} is an index, which has no card", hint=hint)
    stored = interpret(source, descriptor, read_manifest(source, descriptor))
    layer = stored.aimage.find(CARD)
    if layer is None:
        raise NotFoundError(
            f"{reference} has no model card", hint=f"a card is the file {CARD} of a model directory"
        )
    if layer.descriptor.size > MAX_CARD:
        raise FormatError(f"the card of {reference} is larger than 1 MiB")
    with open_decompressed(source, layer.descriptor, layer.content, limit=MAX_CARD) as file:
        return b"".join(iter(lambda: file.read(1 << 20), b""))


def _encode_aimage(
    reference: Reference,
    stored: StoredAImage,
    completeness: Completeness,
    ability: Ability | None,
) -> dict[str, Any]:
    layers = stored.aimage.layers
    sums = {"blobs": len(completeness.missing), "size": completeness.missing_size}
    missing = {"partial": True, "missing": sums}
    return {
        "reference": str(reference),
        "digest": str(stored.descriptor.digest),
        "mediaType": stored.descriptor.media_type,
        "dialect": stored.dialect.name,
        "size": sum(layer.descriptor.size for layer in layers),
        **(missing if completeness.missing else {}),
        **({"subject": to_plain(subject)} if (subject := stored.aimage.subject) else {}),
        **({} if ability is None else _encode_ability(ability)),
        "config": stored.aimage.properties,
        "layers": [_encode_layer(layer) for layer in layers],
    }


def _encode_ability(ability: Ability) -> dict[str, Any]:
    obstacle = ability.find_obstacle()
    reason = {"obstacle": obstacle.message} if obstacle else {}
    return {"capabilities": [*ability.list_capabilities()], **reason}


def _encode_layer(layer: Layer) -> dict[str, Any]:
    value: dict[str, Any] = {"name": layer.name, **layer.descriptor.to_json()}
    if layer.dtype is not None:
        value["dtype"] = layer.dtype
    if layer.shape is not None:
        value["shape"] = list(layer.shape)
    if layer.content is not None:
        value["content"] = to_plain(layer.content)
    return value


def _encode_index(source: Source, reference: Reference, descriptor: Descriptor) -> dict[str, Any]:
    index = parse_document(read_all(source.open(descriptor), descriptor), descriptor.media_type)
    candidates = list_candidates(source, index) if isinstance(index, Index) else []
    return {
        "reference": str(reference),
        **to_plain(descriptor),
        "manifests": [_encode_candidate(source, candidate) for candidate in candidates],
    }


def _encode_candidate(source: Source, candidate: Candidate) -> dict[str, Any]:
    """Return a manifest; ``blobs``, their size, is left out if it is not in the store."""
    value = to_plain(candidate.descriptor)
    if candidate.variant:
        value["variant"] = candidate.variant
    if candidate.platform is not None:
        value["platform"] = str(candidate.platform)
    try:
        manifest = read_manifest(source, candidate.descriptor)
    except NotFoundError:
        return value
    return value | {"blobs": sum(blob.size for blob in manifest.children)}


def _read_signatures(layout: ImageLayout, aimage: AImage) -> dict[str, OnnxSignature]:
    """Return the signatures of the ONNX models in the store, by their names."""
    signatures = {}
    for layer in aimage.layers:
        is_onnx = layer.descriptor.media_type == mediatype.AIMAGE_ONNX
        if not is_onnx or not layer.name.lower().endswith(".onnx"):
            continue
        try:
            with layout.find_path(layer.descriptor).open("rb") as file:
                signatures[layer.name] = read_signature(file, layer.descriptor.size)
        except (FormatError, NotFoundError, OSError):
            # Its readers report damage, and a missing blob is listed.
            continue
        if len(signatures) == _MAX_MODELS:
            break
    return signatures


def _encode_signature(name: str, signature: OnnxSignature) -> dict[str, Any]:
    """Return a signature for programs."""
    return {
        "name": name,
        "irVersion": signature.model.ir_version,
        "opset": signature.model.opset,
        "parameters": signature.model.parameters,
        "inputs": [_encode_value(value) for value in signature.inputs],
        "outputs": [_encode_value(value) for value in signature.outputs],
    }


def _encode_value(value: OnnxValue) -> dict[str, Any]:
    shape = None if value.shape is None else [*value.shape]
    return {"name": value.name, "type": value.type, "shape": shape}
