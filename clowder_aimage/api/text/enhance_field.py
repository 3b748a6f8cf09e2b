"""The field ``enhance`` of requests for pictures: a language model writes the prompt first."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, StringConstraints

from clowder_aimage.api.field_rule import FieldRule, excludes, requires
from clowder_aimage.api.model_kind import TEXT, check_kind
from clowder_aimage.api.parameter_field import ParameterBody, with_parameters
from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.event import Event, ImageEvent, PreviewEvent, PullingEvent
from clowder_aimage.engine.executor import run_generation
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.generation.check import parse_flag
from clowder_aimage.generation.request import MAX_NAME, GenerateRequest
from clowder_aimage.http.api_error import ApiError, convert_error
from clowder_aimage.model.pipeline import Step
from clowder_aimage.model.text.enhancement import (
    MAX_INSTRUCTION,
    build_enhancement_request,
    collect_prompt,
)
from clowder_aimage.model.text.language_model import TextDelta, TextEvent, TextRequest
from clowder_aimage.oci import Reference

_FIELD = "enhance"


def _check_value(value: object) -> object:
    # In a form all values are texts
    value = parse_flag(value) if isinstance(value, str) else value
    if isinstance(value, bool) or (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
        return value
    raise ValueError("must be true, false, or the name of a language model")


_ModelName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_Instruction = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_INSTRUCTION)
]


@with_parameters(GenerateRequest, without=("prompt",))
class EnhanceFields(ParameterBody):
    """The language model that writes the prompt: the worker's, or one that is named."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (
        requires("enhance_instruction", _FIELD),
        excludes("original_prompt", _FIELD),
        requires("enhancer", "original_prompt"),
    )

    enhance: Annotated[
        bool | str, BeforeValidator(_check_value, json_schema_input_type=bool | _ModelName)
    ] = Field(
        default=False,
        description="Let a language model write the prompt: the worker's, or the one of this name.",
    )
    enhance_instruction: _Instruction | None = Field(
        default=None,
        description="The instruction to the language model, in place of the worker's own; requires "
        "enhance.",
    )


@dataclass(slots=True)
class PromptEnhancer:
    """A language model of the worker that writes the prompts of a request, one for each picture.

    prompt, seed, instruction: those of the request. The new prompts are known once their events
    have passed.
    """

    service: Service
    reference: Reference
    prompt: str
    seed: int
    pull: str
    instruction: str | None = None
    texts: list[str] = field(default_factory=list)
    # The index of the picture being generated
    picture: int = 0
    name: str = ""

    @classmethod
    def of(
        cls, service: Service, fields: EnhanceFields, prompt: str, seed: int, pull: str
    ) -> Self | None:
        """Return the enhancer of a request; None without one. Raises ApiError."""
        if not (choice := fields.enhance):
            return None
        name = choice if isinstance(choice, str) else service.settings.enhancer
        if not name:
            message = f"{_FIELD} requires the name of a language model: this worker has none"
            raise ApiError(422, message, code="unsupported_value", param=_FIELD)
        try:
            reference = service.resolve_reference(name)
            return cls(service, reference, prompt, seed, pull, fields.enhance_instruction)
        except NotFoundError as error:
            raise _explain(error) from None

    async def enhance_then(
        self, generate: Callable[..., AsyncGenerator[Event, None]], count: int = 1
    ) -> AsyncGenerator[Event, None]:
        """Write the prompts, then yield the events of ``generate`` for each. Raises ApiError."""
        try:
            for number in range(count):
                async with contextlib.aclosing(self._write(number)) as coming:
                    async for event in coming:
                        yield event
            descriptor = await run_generation(self.service.store.resolve, self.reference)
            self.name = f"{self.reference.name}@{descriptor.digest}"
        except AImageError as error:
            raise _explain(error) from None
        for self.picture in range(count):
            async with contextlib.aclosing(generate(is_admitted=self.picture > 0)) as coming:
                async for event in coming:
                    if isinstance(event, Step):
                        # The steps of the pictures before it count, too
                        event = Step(event.index, event.total, self.picture)
                    elif isinstance(event, PreviewEvent | ImageEvent):
                        event = replace(event, picture=self.picture)
                    yield event

    async def _write(self, number: int) -> AsyncGenerator[Event, None]:
        """Write the prompt of a picture, and yield the events of a pull."""
        pieces: list[TextEvent] = []

        def make(aimage: AImage) -> TextRequest:
            check_kind(self.reference, aimage, TEXT)
            return self.request(number)

        events = self.service.engine.generate(
            self.reference, make, pull=self.pull, is_text=True, is_admitted=number > 0
        )
        async with contextlib.aclosing(events) as coming:
            async for event in coming:
                if isinstance(event, TextDelta):
                    pieces.append(event)
                elif isinstance(event, PullingEvent):
                    yield event
        self.texts.append(collect_prompt(pieces))

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request for one picture, with its new prompt and the original one."""
        return request.change(
            prompt=self.texts[self.picture],
            seed=request.sampling.seed + self.picture,
            n=1,
            original_prompt=self.prompt,
            enhancer=self.name,
        )

    def request(self, number: int = 0) -> TextRequest:
        """Return the request for the new prompt of a picture."""
        return build_enhancement_request(self.prompt, self.seed + number, self.instruction)


def _explain(error: AImageError) -> ApiError:
    api_failure = convert_error(error)
    message = f"{_FIELD}: {api_failure.message}"
    return ApiError(
        api_failure.status,
        message,
        code=api_failure.code,
        param=_FIELD,
        headers=api_failure.headers,
    )
