"""Request bodies: strict JSON parsed into pydantic models; errors name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from clowder_aimage.errors import FormatError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.oci import read_json
from clowder_aimage.strict_json import MAX_DOCUMENT_SIZE

_BodyT = TypeVar("_BodyT", bound="RequestBody")


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


async def read_body(request: web.Request, kind: type[_BodyT]) -> _BodyT:
    """Parse the body of a request. Raises as ``parse_body``."""
    return parse_body(await request.read(), kind)


def parse_body(
    raw: bytes, kind: type[_BodyT], defaults: Mapping[str, object] | None = None
) -> _BodyT:
    """Parse the body ``raw``, with ``defaults`` for absent fields.

    Raises ApiError (400) if it is not a JSON object or a field is malformed.
    """
    return check_fields(read_object(raw), kind, defaults)


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
    message = re.sub(r"^(Input|String) should ", "must ", first["msg"])
    is_literal = kind == "literal_error" and not isinstance(first["input"], str)
    is_type = kind.endswith("_type") or is_literal
    return wrong(param, message.removeprefix("Value error, "), "invalid_type" if is_type else "")


def _path(place: tuple[int | str, ...]) -> str:
    """Return the name of a field, with the list that it is in: ``loras[0].model``."""
    start = next((at - 1 for at, part in enumerate(place) if isinstance(part, int)), len(place) - 1)
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[start:])
    return "".join(parts).removeprefix(".")


def wrong(param: str, message: str, code: str = "") -> ApiError:
    """Return the response to a malformed field."""
    return ApiError(400, f"{param} {message}", code=code or "invalid_value", param=param)
