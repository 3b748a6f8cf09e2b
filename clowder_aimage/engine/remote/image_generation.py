"""Requests for pictures in OpenAI's API, with the fields of a worker, and their replies."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.generation.request import (
    ALPHA,
    GenerateRequest,
    LoraUse,
    map_parameter_locations,
)
from clowder_aimage.model.picture_metadata import detect_kind, read_metadata
from clowder_aimage.pictures.generated_picture import GeneratedPicture

# Parameters with other fields in a request.
_OTHERS = ("image", "mask", "control", "references", "loras", "n", "original_prompt", "enhancer")
_FIXED = {
    "n": 1,
    "response_format": "b64_json",
    "stream": True,
    "stream_format": "ollama",
    # The worker refuses unknown fields.
    "strict": True,
    # The metadata in the file is required by 'aimage replay'.
    "png_facts": True,
}


def build_draft_fields(
    draft: GenerateRequest, kind: str, pictures: Mapping[str, bytes]
) -> dict[str, Any]:
    """Return the fields of requests for a draft, of a picture each, without seed and adapters.

    kind: of the file, such as png. pictures: the files of the draft by their digests.
    """
    stated = draft.collect_stated_values().items()
    fields: dict[str, Any] = {"prompt": draft.prompt} | {
        map_parameter_locations()[name].parameter.field: value
        for name, value in stated
        if value is not None and name not in _OTHERS
    }
    if "width" in fields and "height" in fields:
        fields["size"] = f"{fields.pop('width')}x{fields.pop('height')}"
    return fields | _build_picture_fields(draft, pictures) | {"output_format": kind, **_FIXED}


def _build_picture_fields(draft: GenerateRequest, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the fields for pictures: data URLs in place of digests."""
    image_input = draft.input
    digests = {"image": image_input.image, "mask": image_input.mask, "control": draft.control.image}
    fields: dict[str, Any] = {
        name: _encode_data_url(pictures[digest])
        for name, digest in digests.items()
        if digest is not None and digest != ALPHA
    }
    if image_input.references:
        fields["images"] = [_encode_data_url(pictures[name]) for name in image_input.references]
    return fields | ({"painted": "white"} if "mask" in fields else {})


def _encode_data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def build_lora_fields(uses: Sequence[LoraUse], hint: str) -> dict[str, Any]:
    """Return the fields for adapters that a worker has.

    Raises UsageError: one is a file here. ``hint`` is that of the error.
    """
    from clowder_aimage.model.adapter_source import is_path

    for use in uses:
        if is_path(use.model):
            raise UsageError(f"{use.model} is a file, which a worker does not read", hint=hint)
    loras = [
        {"model": use.model, **({} if use.strength is None else {"strength": use.strength})}
        for use in uses
    ]
    return {"loras": loras} if loras else {}


def parse_picture(reply: Mapping[str, Any], seed: int, kind: str) -> GeneratedPicture:
    """Return the picture in a reply, with its metadata if they can be read. Raises FormatError."""
    try:
        data = base64.b64decode(reply["data"][0]["b64_json"], validate=True)
    except (LookupError, TypeError, binascii.Error):
        data = b""
    # Another server may ignore output_format.
    if detect_kind(data) != kind:
        raise FormatError(f"invalid response from the worker: expected a {kind.upper()} picture")
    try:
        metadata = read_metadata(data)
    except FormatError:
        metadata = {}
    return GeneratedPicture(data, seed, kind, metadata)
