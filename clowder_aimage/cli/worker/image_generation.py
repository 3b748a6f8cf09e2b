"""Requests for pictures in OpenAI's API, with the fields of a worker, and their replies."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.lora_option import to_worker
from clowder_aimage.cli.console.picture_option import to_request
from clowder_aimage.errors import FormatError
from clowder_aimage.generation.request import map_parameter_locations
from clowder_aimage.model.picture_metadata import detect_kind, read_metadata
from clowder_aimage.pictures.generated_picture import GeneratedPicture

if TYPE_CHECKING:
    from clowder_aimage.cli.text.enhance_option import Enhancement
    from clowder_aimage.cli.worker.worker import PictureTask
    from clowder_aimage.engine.worker_client import WorkerClient

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


def build_generation_fields(client: WorkerClient, task: PictureTask) -> dict[str, Any]:
    """Return the fields of the requests for a task, of a picture each, without the seeds.

    Raises as ``to_worker``.
    """
    draft = task.drafts[0]
    stated = draft.collect_stated_values().items()
    fields: dict[str, Any] = {"prompt": draft.prompt} | {
        map_parameter_locations()[name].parameter.field: value
        for name, value in stated
        if value is not None and name not in _OTHERS
    }
    if "width" in fields and "height" in fields:
        fields["size"] = f"{fields.pop('width')}x{fields.pop('height')}"
    prompt = None if task.adds_words else draft.prompt
    if loras := to_worker(client, draft.adapters.loras, prompt):
        fields["loras"] = loras
    if task.adds_words:
        fields["trigger"] = True
    fields |= {**to_request(draft), "output_format": task.kind, **_FIXED}
    return fields | _build_enhancement_fields(task.enhancement)


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


def _build_enhancement_fields(enhancement: Enhancement | None) -> dict[str, Any]:
    if enhancement is None:
        return {}
    fields: dict[str, Any] = {"enhance": str(enhancement.model) if enhancement.model else True}
    if enhancement.instruction is not None:
        fields["enhance_instruction"] = enhancement.instruction
    return fields
