"""Adapters in requests: the field ``loras``, tags in prompts, and the errors of both.

The names are those of AImages, or of files in the worker's directory of adapters; no other file can
be named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import ConfigDict, Field

from clowder_aimage.api.parameter_field import ParameterBody, with_parameters
from clowder_aimage.api.request_body import build_field_error
from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.executor import run_generation
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    ModelError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from clowder_aimage.generation.request import MAX_LORAS, MAX_PATH, GenerateRequest, LoraUse
from clowder_aimage.http.api_error import ApiError, convert_error
from clowder_aimage.model.adapter_source import OWN
from clowder_aimage.model.lora_text import take_tags
from clowder_aimage.oci import Reference


@with_parameters(LoraUse, without=("loras: model", "loras: digest"))
class LoraField(ParameterBody):
    """An adapter of a request; its own strength is used if it has none here."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=MAX_PATH)


LoraFields = Annotated[list[LoraField], Field(max_length=MAX_LORAS)]


@dataclass(frozen=True, slots=True)
class PromptedLoras:
    """A prompt without tags, and the adapters of a request: ``count`` of its field, then of tags.

    ``has_words``: the trigger words of the adapters are added to the prompt.
    """

    prompt: str
    uses: tuple[LoraUse, ...] = ()
    count: int = 0
    has_words: bool = False

    @classmethod
    def of(cls, prompt: str, fields: Sequence[LoraField], *, has_words: bool) -> PromptedLoras:
        """Return the adapters of a request. Raises ApiError."""
        try:
            text, tagged = take_tags(prompt)
        except UsageError as error:
            raise build_field_error("prompt", f"has an invalid tag: {error.message}") from None
        stated = tuple(LoraUse(field.model, **field.build_arguments(LoraUse)) for field in fields)
        uses = (*stated, *tagged)
        return cls(text, _check_count(uses), len(stated), has_words)

    def prepend(self, adapter: Reference) -> Self:
        """Return the adapters after another. Raises ApiError: too many."""
        uses = _check_count((LoraUse(str(adapter)), *self.uses))
        return replace(self, uses=uses, count=self.count + 1)

    def format_param(self, index: int) -> str:
        """Return the field of an adapter."""
        return f"loras[{index}].model" if index < self.count else "prompt"

    def resolve(self, service: Service, request: GenerateRequest, base: AImage) -> GenerateRequest:
        """Return a request with the digests and strengths of its adapters. The store has them.

        Raises as ``AdapterFinder.resolve``.
        """
        if not (self.uses or self.has_words):
            return request
        request = request.change(loras=tuple(_resolve_name(service, use) for use in self.uses))
        words = self.has_words
        return service.adapters.resolve(request, base, service.store, adds_words=words)[0]

    async def resolve_references(self, service: Service) -> Mapping[int, Reference]:
        """Return the names of AImages by the index of the adapter. Raises ApiError."""
        return await run_generation(self._resolve_references, service) if self.uses else {}

    def _resolve_references(self, service: Service) -> dict[int, Reference]:
        references = {}
        for index, use in enumerate(self.uses):
            if use.model.startswith(OWN) or service.adapters.is_file(use.model):
                continue
            try:
                references[index] = service.resolve_reference(use.model)
            except NotFoundError:
                message = f"adapter {use.model[:200]!a} not found"
                raise self.convert_error(NotFoundError(message), index) from None
        return references

    def convert_error(self, error: AImageError, index: int | None = None) -> AImageError:
        """Return the response to an error of an adapter, with its field; other errors unchanged."""
        number = error.facts.get("adapter", "") if index is None else str(index)
        if not number.isdecimal() or isinstance(error, ApiError):
            return error
        api_failure, param = convert_error(error), self.format_param(int(number))
        status, code = api_failure.status, api_failure.code
        if isinstance(error, NotFoundError):
            code = "adapter_not_found"
        elif isinstance(error, FormatError | ModelError | VerificationError):
            status, code = 422, "invalid_adapter"
        message = f"{param}: {api_failure.message}"
        return ApiError(status, message, code=code, param=param, headers=api_failure.headers)


def _check_count(uses: tuple[LoraUse, ...]) -> tuple[LoraUse, ...]:
    if len(uses) > MAX_LORAS:
        raise build_field_error(
            "loras", f"and the tags of the prompt must be at most {MAX_LORAS} adapters"
        )
    return uses


def _resolve_name(service: Service, use: LoraUse) -> LoraUse:
    """Return the use of an AImage by its name; other names remain."""
    if use.model.startswith(OWN) or service.adapters.is_file(use.model):
        return use
    return replace(use, model=str(service.resolve_reference(use.model)))
