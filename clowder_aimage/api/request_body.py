"""Request bodies: strict JSON parsed into pydantic models; errors name the field.

Requests for a generation have the name of a model, and fields that this worker does not know, which
are ignored unless the request is strict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import quote

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from clowder_aimage.engine.executor import run_generation
from clowder_aimage.errors import FormatError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import LocalRequest, Request
from clowder_aimage.oci import read_json
from clowder_aimage.strict_json import MAX_DOCUMENT_SIZE

_MAX_IGNORED = 20  # names in a header
_SHORT = 1 << 16  # bytes of a body that is parsed at once, in the event loop
_T = TypeVar("_T")
_BodyT = TypeVar("_BodyT", bound="RequestBody")
_OpenT = TypeVar("_OpenT", bound="OpenBody")


class RequestBody(BaseModel):
    """The fields of a body. Null counts as absent; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset()  # accepted and discarded


class ModelBody(RequestBody):
    """The name of a model, in its new or old field, and the form of the response."""

    model: str = ""
    name: str = ""
    stream: bool = True
    insecure: bool = False

    @property
    def reference(self) -> str:
        """The name, or "" if it is absent."""
        return self.model or self.name


def _integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_integer)]


def _flag(value: object) -> object:
    return bool(value) if type(value) is int and value in (0, 1) else value


class OpenBody(RequestBody):
    """A body of OpenAI's API: unknown fields are ignored, or refused if it is strict."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    strict: Annotated[bool, BeforeValidator(_flag)] = False

    @property
    def ignored(self) -> tuple[str, ...]:
        """The unknown fields."""
        return tuple(sorted(self.model_extra or ()))

    @property
    def headers(self) -> dict[str, str]:
        """The header of the response that names the ignored fields, if there are any."""
        names = [name[:60].encode("utf-8", "replace") for name in self.ignored[:_MAX_IGNORED]]
        listed = ", ".join(quote(name, safe="") for name in names)
        return {"X-Aimage-Ignored": listed} if listed else {}


class GenerationBody(OpenBody):
    """The model of a request of OpenAI's API, and what the worker does with the request."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    pull: Literal["never", "if-missing", "always"] = "if-missing"


def is_strict(request: Request) -> bool:
    """Return whether the query of a request asks for the refusal of unknown fields."""
    return request.query.get("strict", "") in ("1", "true")


def check_ignored(body: _OpenT, *, strict: bool) -> _OpenT:
    """Return the body. Raises ApiError for an unknown field if ``strict`` is set, or in it."""
    if body.ignored and (strict or body.strict):
        name = body.ignored[0][:60]
        message = f"unknown parameter {name!a}; it is ignored unless strict is set"
        raise ApiError(400, message, code="unknown_parameter", param=name)
    return body


async def read_body(request: Request, kind: type[_BodyT]) -> _BodyT:
    """Parse the body of a request. Raises as ``read_checked``."""
    return await read_checked(request, lambda fields: check_fields(fields, kind))


async def read_checked(request: Request, check: Callable[[dict[str, Any]], _T]) -> _T:
    """Return what ``check`` makes of the fields of a body; a large body is read in a thread.

    Raises ApiError (400) if it is not a JSON object, and the errors of ``check``.
    """
    if isinstance(request, web.Request):
        raw = await request.read()
        size, fields = len(raw), partial(read_object, raw)
    else:
        size, fields = request.size, partial(local_fields, request)
    if size <= _SHORT:
        return check(fields())
    return await run_generation(lambda: check(fields()))


def local_fields(request: LocalRequest) -> dict[str, Any]:
    """Return the fields of a request of this process, as those of an HTTP request are read."""
    return read_object(b"") if request.fields is None else dict(request.fields)


def read_object(raw: bytes, limit: int = MAX_DOCUMENT_SIZE) -> dict[str, Any]:
    """Return the JSON object in a body of up to ``limit`` bytes. Raises ApiError (400)."""
    try:
        if not raw.strip():
            raise FormatError("the request body is empty; expected a JSON object")
        value = read_json(raw, "the request body", limit)
        if not isinstance(value, dict):
            raise FormatError("the request body must be a JSON object")
    except FormatError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    return value


def check_fields(
    value: Mapping[str, Any],
    kind: type[_BodyT],
    defaults: Mapping[str, object] | None = None,
    *,
    is_form: bool = False,
) -> _BodyT:
    """Return the fields of a body, with ``defaults`` for absent ones.

    The values of a form are texts. Raises ApiError (400) if a field is malformed.
    """
    given = {name: each for name, each in value.items() if each is not None}
    for name in kind.NO_EFFECT:
        given.pop(name, None)
    try:
        return kind.model_validate({**(defaults or {}), **given}, strict=not is_form)
    except ValidationError as error:
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> ApiError:
    """Return the response to the first malformed field. Its value is not repeated."""
    first: Any = error.errors(include_url=False)[0]
    param, kind = _path(first["loc"])[:60], first["type"]
    if kind == "missing":
        message = f"missing required field: {param}"
        return ApiError(400, message, code="missing_required_parameter", param=param)
    if kind == "extra_forbidden":
        return wrong(param, "is not supported", "unknown_parameter")
    message = re.sub(r"^(Input|String|List) should ", "must ", first["msg"])
    message = message.replace(" after validation", "")
    is_literal = kind == "literal_error" and not isinstance(first["input"], str)
    is_type = kind.endswith("_type") or is_literal
    return wrong(param, message.removeprefix("Value error, "), "invalid_type" if is_type else "")


def _path(place: tuple[int | str, ...]) -> str:
    """Return the name of a field and of what it is in: ``loras[0].model``.

    ollama's ``options`` are named alone, since they may be in the body too.
    """
    named = place[1:] if place[:1] == ("options",) and len(place) > 1 else place
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in named)
    return "".join(parts).removeprefix(".")


def wrong(param: str, message: str, code: str = "") -> ApiError:
    """Return the response to a malformed field."""
    return ApiError(400, f"{param} {message}", code=code or "invalid_value", param=param)
