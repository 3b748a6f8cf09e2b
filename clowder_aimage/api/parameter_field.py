"""The fields of request bodies that are parameters of pictures, as ``generation`` defines them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, create_model
from pydantic_core import PydanticCustomError

from clowder_aimage.api.request_body import RequestBody, build_field_error, is_form
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.generation.check import check, parse
from clowder_aimage.generation.parameter import Parameter, list_parameters
from clowder_aimage.generation.request import MAX_TEXT, map_parameter_locations
from clowder_aimage.generation.seed import MAX_SEED, MIN_SEED, read_seed
from clowder_aimage.http.api_error import ApiError

PROMPT, SEED = (map_parameter_locations()[name].parameter for name in ("prompt", "seed"))
# Up to 18 digits: of numbers with 19 or 20 some are too large
_SEED_TEXT = Annotated[str, Field(pattern=r"^-?[0-9]{1,18}(\.0*)?$")]
_SEED_INPUT: Any = Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | _SEED_TEXT


class ParameterBody(RequestBody):
    """A body with parameters; those that it does not state are None."""

    PARAMETERS: ClassVar[tuple[Parameter, ...]] = ()

    @classmethod
    def list_unset(cls, name: str) -> list[Any]:
        default = next(
            (parameter.default for parameter in cls.PARAMETERS if parameter.field == name), None
        )
        is_neutral = isinstance(default, str) or (type(default) is int and default == 0)
        return [*super().list_unset(name), *([default] if is_neutral else [])]

    @property
    def stated(self) -> Mapping[str, Any]:
        """The parameters in the body by their names. Raises ApiError: a synonym differs."""
        values: dict[str, Any] = {}
        for parameter in self.PARAMETERS:
            for name in (parameter.field, *parameter.words.synonyms):
                if (value := getattr(self, name)) is None:
                    continue
                if values.setdefault(parameter.name, value) != value:
                    raise build_field_error(
                        parameter.field, f"and {name} must be equal if both are set"
                    )
        return values

    def build_arguments(self, owner: type) -> dict[str, Any]:
        """Return the stated parameters of a dataclass as its arguments."""
        stated, owned = self.stated, list_parameters(owner)
        return {
            parameter.attribute: stated[parameter.name]
            for parameter in owned
            if parameter.name in stated
        }


_BodyT = TypeVar("_BodyT", bound=ParameterBody)


def with_parameters(
    *owners: type, without: Collection[str] = ()
) -> Callable[[type[_BodyT]], type[_BodyT]]:
    """Return a decorator that adds parameters of dataclasses to a body, ``without`` some."""

    def add(body: type[_BodyT]) -> type[_BodyT]:
        added = [
            candidate
            for owner in owners
            for candidate in list_parameters(owner)
            if candidate.name not in without
        ]
        fields: dict[str, Any] = {
            name: (_build_type(parameter), None)
            for parameter in added
            for name in (parameter.field, *parameter.words.synonyms)
        }
        model = create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
        )
        bases = [base.PARAMETERS for base in body.__bases__ if issubclass(base, ParameterBody)]
        model.PARAMETERS = (*chain.from_iterable(bases), *added)
        return model

    return add


def _build_type(parameter: Parameter) -> Any:
    kind = parameter.type.kind
    limits = getattr(parameter.annotation, "__metadata__", ())
    default = f" Default: {parameter.words.default}." if parameter.words.default else ""
    constant = parameter.default if kind in (bool, int, float) and not default else None
    shown = {} if constant is None else {"default": constant}
    described = Field(description=parameter.words.help + default, json_schema_extra=shown)
    limited: Any = Annotated[kind, *limits]
    read = BeforeValidator(
        build_reader(parameter), json_schema_input_type=_make_input_type(parameter, limited)
    )
    return Annotated[limited | None, read, described]


def _make_input_type(parameter: Parameter, limited: Any) -> Any:
    """Return the type of a field's value before it is read: numbers in a row may be one text."""
    if parameter is SEED:
        return _SEED_INPUT
    if parameter.type.is_scalar:
        return limited
    count = len(get_args(parameter.type.kind))
    return limited | Annotated[str, Field(pattern=f"^[0-9]+(,[0-9]+){{{count - 1}}}$")]


def build_reader(parameter: Parameter) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator of a parameter; the values of a form are texts."""

    def read(value: Any, info: ValidationInfo) -> Any:
        # Numbers in a row are also accepted as one text
        if isinstance(value, str) and (is_form(info) or not parameter.type.is_scalar):
            value = parse(value, parameter.type)
        if parameter is SEED and (value := read_seed(value)) is None:
            return None
        try:
            return check(parameter.name, value, parameter.type)
        except UsageError as error:
            reason = error.message.removeprefix(f"{parameter.name} ")
            raise PydanticCustomError(f"parameter_{error.facts['mistake']}", reason) from None

    return read


def convert_parameter_error(
    error: AImageError, names: Mapping[str, str] | None = None
) -> AImageError:
    """Return the response to the error of a parameter, with its field; other errors unchanged.

    ``names`` are fields that state other parameters than their own.
    """
    name = error.facts.get("parameter")
    if name is None or isinstance(error, ApiError):
        return error
    location = map_parameter_locations().get(name)
    field = location.parameter.field if location else name
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    if field != name and message.startswith(name):
        message = field + message.removeprefix(name)
    return ApiError(400, message, code="invalid_value", param=(names or {}).get(field, field))


Prompt = Annotated[
    str,
    Field(max_length=MAX_TEXT, description=PROMPT.words.help),
    BeforeValidator(build_reader(PROMPT)),
]
Seed = Annotated[
    int | None, BeforeValidator(build_reader(SEED), json_schema_input_type=_SEED_INPUT)
]
