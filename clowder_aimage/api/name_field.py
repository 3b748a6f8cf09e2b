"""Fields that are names of AImages and are not aliases, with the grammar of references."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic.config import JsonDict

from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import MAX_REPOSITORY, build_pattern

_LENGTH = f"([^/]*[.:][^/]*/|localhost/)?[^:@]{{0,{MAX_REPOSITORY}}}([:@][^/]*)?"


def _check(text: str) -> str:
    """Return a valid or empty name. Raises ValueError."""
    try:
        if text:
            Reference.parse(text)
    except UsageError as error:
        raise ValueError(f"is not a name: {error.message[:300]}") from None
    return text


def _check_remote(text: str) -> str:
    if text and Reference.parse(_check(text)).registry is None:
        hint = f"use a name with one, such as registry.example.com/team/{text[:60]}"
        raise ValueError(f"has no registry: {hint}")
    return text


def _check_tag(text: str) -> str:
    if text and Reference.parse(_check(text)).digest is not None:
        raise ValueError("must be a name without a digest")
    return text


def _make_field(**allowed: bool) -> Any:
    return Field(json_schema_extra=name_schema(f"({build_pattern(**allowed)})?"))


def name_schema(names: str, prefix: str = "") -> JsonDict:
    """Return the JSON Schema of ``names``, and of the length of their repository."""
    return {"pattern": f"^{prefix}{names}$", "allOf": [{"pattern": f"^{prefix}{_LENGTH}$"}]}


Name = Annotated[str, AfterValidator(_check), _make_field()]
RemoteName = Annotated[str, AfterValidator(_check_remote), _make_field(is_remote=True)]
TagName = Annotated[str, AfterValidator(_check_tag), _make_field(has_digest=False)]
