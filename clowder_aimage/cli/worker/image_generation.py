"""Requests for the pictures of a task to a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.lora_option import to_worker
from clowder_aimage.cli.console.named_picture import get_named_pictures
from clowder_aimage.engine.remote.image_generation import build_draft_fields

if TYPE_CHECKING:
    from clowder_aimage.cli.text.enhance_option import Enhancement
    from clowder_aimage.cli.worker.worker import PictureTask
    from clowder_aimage.engine.worker_client import WorkerClient


def build_generation_fields(client: WorkerClient, task: PictureTask) -> dict[str, Any]:
    """Return the fields of the requests for a task, of a picture each, without the seeds.

    Raises as ``to_worker``.
    """
    draft = task.drafts[0]
    prompt = None if task.adds_words else draft.prompt
    fields = build_draft_fields(draft, task.kind, get_named_pictures().data)
    fields |= to_worker(client, draft.adapters.loras, prompt)
    if task.adds_words:
        fields["trigger"] = True
    return fields | _build_enhancement_fields(task.enhancement)


def _build_enhancement_fields(enhancement: Enhancement | None) -> dict[str, Any]:
    if enhancement is None:
        return {}
    fields: dict[str, Any] = {"enhance": str(enhancement.model) if enhancement.model else True}
    if enhancement.instruction is not None:
        fields["enhance_instruction"] = enhancement.instruction
    return fields
