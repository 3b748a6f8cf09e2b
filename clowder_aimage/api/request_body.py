"""Request bodies: strict JSON parsed into pydantic models; errors name the field.

Requests for a generation have the name of a model. Unknown fields, also those of nested objects,
are ignored and listed in a header of the response, or refused if the request is strict.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin
from urllib.parse import quote

from aiohttp import web
from multidict import MultiMapping
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo

from clowder_aimage.api.field_rule import FieldRule, needs
from clowder_aimage.api.name_field import Name, RemoteName
from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.document.unicode_text import INVALID, encode_text, find_invalid_text
from clowder_aimage.engine.executor import run_generation
from clowder_aimage.errors import FormatError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.local_request import RESPONSE_HEADERS, LocalRequest, Request
from clowder_aimage.oci import read_json

_NAMED = needs("model", "name")
# Texts of a form for an absent field: those of an empty input, and of null in
# JavaScript and Python
ABSENT_IN_FORMS: tuple[Any, ...] = ("", "null", "undefined", "None")
# Values of fields
_UNSET: tuple[Any, ...] = (None, False, "", [])
# Limits of the names in a header, and of their characters
_MAX_IGNORED, _MAX_PATH = 20, 100
IGNORED = {"X-Aimage-Ignored": "The ignored fields, such as `cfg, messages[0].mood`."}
# The beginning of a form, of either type
_FORM = re.compile(rb"--[\w'-]|[\w.%\[\]-]+=")
# Bytes of a body that is parsed at once, in the event loop
_SHORT = 1 << 16
_T = TypeVar("_T")
_BodyT = TypeVar("_BodyT", bound="RequestBody")
_ParametersT = TypeVar("_ParametersT", bound="Parameters")


def is_form(info: ValidationInfo) -> bool:
    """Return True if the fields are those of a form: texts."""
    return bool(info.context and info.context.get("is_form"))


class RequestBody(BaseModel):
    """The fields of a body, or of an object in it.

    Null counts as absent, and an integer may be written as 1.0, as in JSON Schema. Unknown fields
    are ignored; their names are kept.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    # Accepted and discarded
    NO_EFFECT: ClassVar[frozenset[str]] = frozenset()
    # Rules in addition to those of the base classes
    RULES: ClassVar[tuple[FieldRule, ...]] = ()
    _unknown: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _read(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Return the fields without absent ones and without integers that are written as floats."""
        if not isinstance(value, Mapping):
            return handler(value)
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        forbids = cls.model_config.get("extra") == "forbid"
        absent = {
            name
            for name, field in value.items()
            if name in cls.NO_EFFECT
            or (field is None and not (forbids and name not in known))
            or _is_absent(field, known.get(name), in_form=is_form(info))
        }
        fields = {
            name: field.strip()
            if is_form(info) and isinstance(field, str) and not _is_text(known.get(name))
            else _convert_integers(field)
            for name, field in value.items()
            if name not in absent
        }
        body = handler(fields)
        body._unknown = tuple(sorted(fields.keys() - known.keys()))  # noqa: SLF001
        return body

    def iter_ignored(self) -> Iterator[str]:
        """Yield the paths of the unknown fields, such as ``messages[0].mood``."""
        yield from self._unknown
        for name, field in type(self).model_fields.items():
            value, path = getattr(self, name), field.alias or name
            if isinstance(value, RequestBody):
                yield from (f"{path}.{nested}" for nested in value.iter_ignored())
            elif isinstance(value, list):
                yield from _iter_ignored_items(path, value)

    @classmethod
    def list_rules(cls) -> list[FieldRule]:
        """Return the rules between the fields."""
        return [rule for kind in reversed(cls.__mro__) for rule in vars(kind).get("RULES", ())]

    @classmethod
    def list_unset(cls, name: str) -> list[Any]:
        """Return the values of a field that count as absent in rules."""
        field = cls.model_fields.get(name)
        default = field.default if field and isinstance(field.default, int | float | str) else None
        is_listed = any(type(unset) is type(default) and unset == default for unset in _UNSET)
        return [*_UNSET, *([] if is_listed else [default])]

    def is_set(self, name: str) -> bool:
        """Return True if the body has a field with a value that does not count as absent."""
        if name not in type(self).model_fields:
            return False
        value = getattr(self, name)
        return not any(
            type(unset) is type(value) and unset == value for unset in self.list_unset(name)
        )

    def check_rules(
        self, other_fields: Collection[str] = (), rules: Sequence[FieldRule] | None = None
    ) -> None:
        """Check the rules between the fields and set ``other_fields``. Raises ApiError."""
        for rule in self.list_rules() if rules is None else rules:
            if fault := rule.find_fault(lambda name: name in other_fields or self.is_set(name)):
                raise build_field_error(*fault, "" if rule.fields else "missing_required_parameter")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        names = type(self).model_fields.keys()
        self.check_rules(rules=[rule for rule in self.list_rules() if names & {*rule.others}])
        return self


def _iter_ignored_items(path: str, items: Sequence[object]) -> Iterator[str]:
    """Yield the paths of the unknown fields of objects in a list."""
    for index, item in enumerate(items):
        if isinstance(item, RequestBody):
            yield from (f"{path}[{index}].{nested}" for nested in item.iter_ignored())


def is_optional_choice(field: FieldInfo | None) -> bool:
    """Return True for a field with several words as values, of which an empty text is none."""
    if field is None or field.is_required():
        return False
    kind: Any = field.annotation
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    # Of an annotated type, the type
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    return get_origin(kind) is Literal and len(get_args(kind)) > 1


def _is_absent(value: object, field: FieldInfo | None, *, in_form: bool) -> bool:
    """Return True if the value of a field counts as absent, though it is not null."""
    is_empty = value == "" and is_optional_choice(field)
    return is_empty or (in_form and value in ABSENT_IN_FORMS and not _is_required(field))


def _is_text(field: FieldInfo | None) -> bool:
    if field is None:
        return False
    kinds = (field.annotation, *get_args(field.annotation))
    return any(getattr(kind, "__origin__", kind) is str for kind in kinds)


def _is_required(field: FieldInfo | None) -> bool:
    return field is not None and field.is_required()


def _convert_integers(value: object) -> object:
    """Return a number, or a list of them, with 1.0 as 1."""
    if isinstance(value, list):
        return [_convert_integers(element) for element in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Parameters(BaseModel):
    """The parameters in a path, a query or headers: texts. Unknown ones are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StrictQuery(Parameters):
    """The query of a request whose unknown fields may be refused."""

    strict: Literal["1", "true", "0", "false"] = Field(
        default="0", description="1: refuse unknown fields."
    )


class ModelBody(RequestBody):
    """The name of a model, in its new or old field."""

    model: str = Field(default="", description="The name of the model.", examples=["tiny"])
    name: str = Field(default="", description="Older name of `model`.")

    @property
    def reference(self) -> str:
        """The name, or "" if it is absent."""
        return self.model or self.name


class StreamedBody(ModelBody):
    """The name of a model, and the form of the response."""

    stream: bool = Field(default=True, description="Respond in lines while the work goes on.")


class NamedBody(ModelBody):
    """The required name of a model."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (_NAMED,)

    model: Name = Field(default="", description="The name of the model.", examples=["tiny"])
    name: Name = Field(default="", description="Older name of `model`.")


class TransferBody(StreamedBody):
    """The name of a model that is pulled or pushed."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (_NAMED,)

    model: RemoteName = Field(
        default="",
        description="The name of the model, with a registry.",
        examples=["registry.example.com/team/tiny:v1"],
    )
    name: RemoteName = Field(default="", description="Older name of `model`.")
    insecure: bool = Field(
        default=False,
        description="Only for a loopback registry, or one that is configured as insecure here.",
    )


def _flag(value: object) -> object:
    return bool(value) if type(value) is int and value in (0, 1) else value


class OpenBody(RequestBody):
    """A body of OpenAI's API: unknown fields are ignored, or refused if it is strict."""

    model_config = ConfigDict(allow_inf_nan=False)

    strict: Annotated[bool, BeforeValidator(_flag, json_schema_input_type=bool | Literal[0, 1])] = (
        Field(default=False, description="Refuse unknown fields.")
    )


class GenerationBody(OpenBody):
    """The model of a request of OpenAI's API, and its pull policy."""

    model: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="The name of an AImage or an alias. If it is absent, or an unknown name "
        "without a registry or a digest, the worker's default model is used.",
    )
    pull: Literal["never", "if-missing", "always"] = Field(
        default="if-missing", description="When the model is pulled; requires the scope admin."
    )


def read_query(request: Request, kind: type[_ParametersT]) -> _ParametersT:
    """Return the parameters in the query of a request. Raises ApiError (400)."""
    return _read_parameters(request.query, kind)


def read_headers(request: Request, kind: type[_ParametersT]) -> _ParametersT:
    """Return the parameters in the headers of a request. Raises ApiError (400)."""
    return _read_parameters(request.headers, kind)


def _read_parameters(values: MultiMapping[str], kind: type[_ParametersT]) -> _ParametersT:
    names = [field.alias or name for name, field in kind.model_fields.items()]
    stated = {name: values.getall(name) for name in names if name in values}
    for name, texts in stated.items():
        if len(texts) > 1:
            raise build_field_error(name, "must be there once only")
        check_text(texts[0], name)
    try:
        return kind.model_validate({name: texts[0] for name, texts in stated.items()})
    except ValidationError as error:
        raise _convert_error(error) from None


def is_strict(request: Request) -> bool:
    """Return True if the query requests that unknown fields are refused. Raises ApiError."""
    return read_query(request, StrictQuery).strict in ("1", "true")


def record_ignored(request: Request, body: RequestBody, others: Iterable[str] = ()) -> None:
    """List the ignored fields of a body, and others, in a header of the response.

    Raises ApiError (400) if the request or the body is strict.
    """
    strict = isinstance(body, OpenBody) and (is_strict(request) or body.strict)
    paths = [path[:_MAX_PATH] for path in islice(chain(body.iter_ignored(), others), _MAX_IGNORED)]
    if not paths:
        return
    if strict:
        message = f"unknown parameter {paths[0]!a}; it is ignored unless strict is set"
        raise ApiError(400, message, code="unknown_parameter", param=paths[0])
    quoted = (quote(path.encode("utf-8", "replace"), safe="[]") for path in paths)
    request[RESPONSE_HEADERS] = dict.fromkeys(IGNORED, ", ".join(quoted))


async def read_body(
    request: Request, kind: type[_BodyT], defaults: Mapping[str, object] | None = None
) -> _BodyT:
    """Return the body of a request, and record its ignored fields. Raises as ``read_checked``."""
    body = await read_checked(request, lambda fields: check_fields(fields, kind, defaults))
    record_ignored(request, body)
    return body


async def read_checked(request: Request, check: Callable[[dict[str, Any]], _T]) -> _T:
    """Return the result of ``check`` with the fields of a body; read a large one in a thread.

    Raises ApiError (400) if it is not a JSON object, and the errors of ``check``.
    """
    if isinstance(request, web.Request):
        raw = await request.read()
        size, fields = len(raw), partial(read_object, raw)
    else:
        size, fields = request.size, partial(read_local_fields, request)
    if size <= _SHORT:
        return check(fields())
    return await run_generation(lambda: check(fields()))


def read_local_fields(request: LocalRequest) -> dict[str, Any]:
    """Return the fields of a request of this process, as those of an HTTP request are read."""
    return read_object(b"") if request.fields is None else dict(request.fields)


def read_object(raw: bytes, limit: int = MAX_DOCUMENT_SIZE) -> dict[str, Any]:
    """Return the JSON object in a body of up to ``limit`` bytes. Raises ApiError (400)."""
    try:
        if not raw.strip():
            raise FormatError("the request body is empty; expected a JSON object")
        if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise FormatError("the request body is in UTF-16; expected UTF-8")
        if _FORM.match(raw):
            raise FormatError("the request body is a form; expected a JSON object")
        raw = raw.removeprefix(BOM_UTF8)
        value = read_json(raw, "the request body", limit)
        if not isinstance(value, dict):
            raise FormatError("the request body must be a JSON object")
    except FormatError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    if (path := find_invalid_text(value, raw)) is not None:
        name = _format_path(path)[:60].encode("ascii", "backslashreplace").decode()
        raise build_field_error(name, INVALID)
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
    absent = {
        name: default
        for name, default in (defaults or {}).items()
        if (stated := value.get(name)) is None
        or _is_absent(stated, kind.model_fields.get(name), in_form=is_form)
    }
    try:
        fields, context = {**value, **absent}, {"is_form": is_form}
        return kind.model_validate(fields, strict=not is_form, context=context)
    except ValidationError as error:
        raise _convert_error(error) from None


# Words of pydantic, and those of this program.
_PLAIN = {
    " after validation": "",
    "be greater than or equal to": "be at least",
    "be less than or equal to": "be at most",
}


def _convert_error(error: ValidationError) -> ApiError:
    """Return the response to the first malformed field. Its value is not repeated."""
    details: Any = error.errors(include_url=False)[0]
    param, kind = _format_path(details["loc"])[:60], details["type"]
    if kind == "missing":
        message = f"missing required field: {param}"
        return ApiError(400, message, code="missing_required_parameter", param=param)
    if kind == "extra_forbidden":
        return build_field_error(param, "is not supported", "unknown_parameter")
    message = re.sub(r"^(Input|String|List) should ", "must ", details["msg"])
    for words, plain in _PLAIN.items():
        message = message.replace(words, plain)
    is_literal = kind == "literal_error" and not isinstance(details["input"], str)
    is_type = kind.endswith("_type") or is_literal
    return build_field_error(
        param, message.removeprefix("Value error, "), "invalid_type" if is_type else ""
    )


def check_text(text: str, param: str) -> str:
    """Return a text of a client that is not JSON. Raises ApiError if UTF-8 cannot encode it."""
    try:
        encode_text(text, param)
    except FormatError:
        raise build_field_error(param, INVALID) from None
    return text


def _format_path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field: ``loras[0].model``.

    ollama's ``options`` are named alone, since they may be in the body too.
    """
    shown = location[1:] if location[:1] == ("options",) and len(location) > 1 else location
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in shown)
    return "".join(parts).removeprefix(".")


def build_field_error(param: str, message: str, code: str = "") -> ApiError:
    """Return the response to a malformed field."""
    return ApiError(400, f"{param} {message}", code=code or "invalid_value", param=param)
