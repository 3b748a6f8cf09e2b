"""The operations of a gateway: a worker's, with the errors and the headers of jobs, and its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from clowder_aimage.api.health_operation import EVENTS
from clowder_aimage.api.ollama import generate as ollama_generate
from clowder_aimage.api.ollama import operation as ollama_operation
from clowder_aimage.api.ollama import text_operation as ollama_text
from clowder_aimage.api.openai import operation as openai_operation
from clowder_aimage.api.openai import text_operation as text
from clowder_aimage.api.request_body import Parameters
from clowder_aimage.api.store import job_operation
from clowder_aimage.api.store import operation as store_operation
from clowder_aimage.api.store import storage_operation as storage
from clowder_aimage.fleet.gateway.status import FleetFacts
from clowder_aimage.http.operation import HEALTH, Answer, Operation
from clowder_aimage.http.route import INFER

# Characters of an idempotency key.
MAX_KEY = 255
# No worker, or none that responds.
_LOST = (503, 504)


def _check_key(key: str) -> str:
    if not key.isascii():
        raise ValueError("must be ASCII")
    return key


class JobHeaders(Parameters):
    """The headers of a request that becomes a job."""

    priority: Literal["interactive", "batch"] = Field(
        default="interactive",
        alias="Aimage-Priority",
        description="Jobs of batches wait for interactive ones.",
    )
    key: Annotated[str, Field(max_length=MAX_KEY), AfterValidator(_check_key)] = Field(
        default="",
        alias="Idempotency-Key",
        description="A request with the key of an earlier one gets its response.",
    )


def _convert_to_job(operation: Operation) -> Operation:
    return replace(operation.with_refusals(400, 422, *_LOST), headers=JobHeaders)


JOBS = tuple(
    map(
        _convert_to_job,
        (
            openai_operation.GENERATE,
            openai_operation.EDIT,
            openai_operation.VARY,
            text.CHAT,
            text.COMPLETE,
            text.EMBED,
            ollama_generate.GENERATE,
            ollama_text.OLLAMA_CHAT,
            ollama_text.OLLAMA_EMBED,
            ollama_text.OLLAMA_EMBEDDINGS,
        ),
    )
)
# An operation, the field of its list, and the key of an entry.
LISTS = (
    (openai_operation.LIST_MODELS.with_refusals(*_LOST), "data", "id"),
    (store_operation.ADAPTERS.with_refusals(*_LOST), "data", "id"),
    (ollama_operation.TAGS.with_refusals(*_LOST), "models", "name"),
    (ollama_operation.PS.with_refusals(*_LOST), "models", "digest"),
    (storage.LIST.with_refusals(*_LOST), "content", "url"),
)
QUESTIONS = (
    openai_operation.GET_MODEL.with_refusals(*_LOST),
    openai_operation.FETCH_PICTURE.with_refusals(*_LOST),
    store_operation.REFERRERS.with_refusals(*_LOST),
    ollama_operation.SHOW.with_refusals(*_LOST),
    ollama_operation.PUSH.with_refusals(*_LOST),
    storage.GET.with_refusals(*_LOST),
)
# Data of a single worker: a gateway refuses these routes.
LOCAL = (
    store_operation.DESCRIBE,
    EVENTS,
    job_operation.LIST_JOBS,
    job_operation.ADD_JOB,
    job_operation.SHOW_JOB,
    job_operation.CANCEL_JOB,
)
PULL = ollama_operation.PULL.with_refusals(*_LOST)
ADD_CONTENT = storage.ADD.with_refusals(*_LOST)
COPY = ollama_operation.COPY.with_refusals(*_LOST)
DELETE = ollama_operation.DELETE.with_refusals(*_LOST)
DELETE_CONTENT = storage.DELETE.with_refusals(*_LOST)
FLEET = Operation(
    "GET",
    "/v1/fleet",
    INFER,
    HEALTH,
    "fleet",
    "Describe the fleet.",
    (Answer("The workers, and the queue.", FleetFacts),),
    refusals=_LOST,
)
