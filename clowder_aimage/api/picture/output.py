"""The field ``output`` of a request: its pictures are pushed to a registry too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from clowder_aimage.api.request_body import RequestBody, build_field_error
from clowder_aimage.api.service import Service
from clowder_aimage.engine.event import ImageEvent
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.http.api_error import ApiError, convert_registry_error
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.artifact import (
    check_replaceable,
    check_target,
    push_pictures,
)
from clowder_aimage.pictures.generated_picture import GeneratedPicture


class OutputField(RequestBody):
    """The place of the pictures of a request."""

    push: Annotated[str, Field(max_length=1024)] = Field(
        description="HOST/REPO:TAG.", examples=["registry.example.com/team/pictures:v1"]
    )


async def resolve_target(
    output: OutputField | None, service: Service, *, may_push: bool, is_streamed: bool
) -> Reference | None:
    """Return the name to push pictures to, checked before they are made; None without one.

    Raises ApiError: 403 without the scope, 400 for a name that cannot be pushed to, or a stream;
    502 if the registry is at fault.
    """
    if output is None:
        return None
    if not may_push:
        raise ApiError(
            403, "output requires the scope admin", code="insufficient_scope", param="output"
        )
    if is_streamed:
        raise build_field_error("output", "cannot be combined with stream")
    try:
        target = Reference.parse(output.push)
        check_target(target, service.connection)
        await run_io(partial(check_replaceable, target, service.connection))
    except UsageError as error:
        raise ApiError(400, error.message, code="invalid_value", param="output") from None
    except AImageError as error:
        raise convert_registry_error(error) from None
    return target


async def push_events(
    service: Service, target: Reference, pictures: Sequence[ImageEvent], kind: str
) -> dict[str, Any]:
    """Push pictures in a format; return the field ``output`` of the answer.

    Raises ApiError: 502 if the registry is at fault.
    """
    generated = [GeneratedPicture(event.data, event.seed, kind, event.facts) for event in pictures]
    outcome = "failed"
    try:
        push = partial(push_pictures, generated, target, service.store, service.connection)
        sent = await run_io(push)
        outcome = "done"
    except AImageError as error:
        raise convert_registry_error(error) from None
    finally:
        service.events.record("push", reference=str(target), outcome=outcome)
    return {"push": str(target), "digest": str(sent.digest)}
