"""The requests of OpenAI's images API, ``POST /v1/images/...``: parsing and validation.

The fields are those of OpenAI's images API for its ``gpt-image`` models, and extensions of other
servers: ``num_inference_steps`` and ``guidance_scale`` are vllm-omni's.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from clowder_aimage.api.field_rule import FieldRule, needs
from clowder_aimage.api.parameter_field import Prompt, convert_parameter_error, with_parameters
from clowder_aimage.api.picture.field import MASKED, PictureFields
from clowder_aimage.api.picture.lora_field import LoraFields, PromptedLoras
from clowder_aimage.api.picture.output import OutputField
from clowder_aimage.api.picture.source import IMAGE, IMAGES
from clowder_aimage.api.picture.upload import StoredPictures
from clowder_aimage.api.request_body import (
    ABSENT_IN_FORMS,
    GenerationBody,
    build_field_error,
    check_fields,
)
from clowder_aimage.api.text.enhance_field import EnhanceFields
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.parameter import list_parameters
from clowder_aimage.generation.request import (
    MAX_NAME,
    MAX_STEPS,
    GenerateRequest,
    Guidance,
    Output,
    Sampling,
)
from clowder_aimage.generation.size import SIZE, parse_size
from clowder_aimage.oci import read_json

# Links by default, as at OpenAI
LINKED = frozenset({"dall-e-2", "dall-e-3"})

AUTO, OPENAI, WITH_PROGRESS, OLLAMA = "auto", "openai", "openai+progress", "ollama"
# Presets that change the model's default number of steps, with their factors
PRESETS = {"low": 0.5, "high": 2.0, "hd": 2.0, "xhigh": 3.0, "max": 4.0}
_PLAIN = frozenset(
    parameter.name for owner in (Sampling, Guidance, Output) for parameter in list_parameters(owner)
)


Size = Annotated[
    str,
    Field(
        max_length=MAX_NAME,
        description="`auto`, or WIDTHxHEIGHT such as `1024x1024`.",
        examples=["32x32"],
        json_schema_extra={"pattern": f"^(auto|{SIZE.pattern})?$"},
    ),
    AfterValidator(lambda text: text or "auto"),
]
# Fields that are JSON in a form
_OBJECTS = ("loras", "output")


def _refuse_prompt(text: str) -> str:
    if text:
        raise ValueError("is not accepted by variations: send it to edits")
    return text


@with_parameters(Sampling, Guidance, Output, PictureEncoding)
class ImageRequest(EnhanceFields, PictureFields, GenerationBody):
    """A validated request; the AImage provides the defaults of parameters that are not stated."""

    # The first part of the types of events
    EVENTS: ClassVar[str] = "image_generation"
    RULES: ClassVar[tuple[FieldRule, ...]] = (needs("prompt", "enhance"),)
    # Accepted from clients, who ask for nothing by them; ``user`` is neither kept nor logged
    NO_EFFECT = frozenset({"user", "safety_identifier", "moderation"})

    prompt: Prompt
    size: Size = "auto"
    loras: LoraFields = Field(
        default_factory=list,
        description="Adapters, whose changes are added; so are those of tags <lora:NAME:STRENGTH> "
        "in the prompt, which are removed from it.",
    )
    trigger: bool = Field(
        default=False,
        description="Add the trigger words of the adapters that the prompt lacks.",
    )
    quality: Literal["auto", "low", "medium", "standard", "high", "hd", "xhigh", "max"] = Field(
        default="auto",
        description="Multiplies the model's default number of steps, unless `steps` is set.",
    )
    response_format: Literal["b64_json", "url"] = Field(
        default="b64_json",
        description="The picture as base64, or a link that is valid for an hour. Default: "
        "b64_json; url for dall-e-2 and dall-e-3 without stream.",
    )
    background: Literal["auto", "opaque", "transparent"] = Field(
        default="auto",
        description="Only opaque pictures are supported.",
        json_schema_extra={"enum": ["auto", "opaque"]},
    )
    stream: bool = Field(default=False, description="Respond with events while the work goes on.")
    stream_format: Literal["auto", "openai", "openai+progress", "ollama"] = Field(
        default="auto", description="The format of the events."
    )
    output: OutputField | None = Field(
        default=None,
        description="The pictures are also pushed, as one artifact whose subject is the model. "
        "Requires the scope admin; cannot be combined with `stream`.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for incompatible fields."""
        if self.background == "transparent":
            raise build_field_error(
                "background", "transparent is not supported", "unsupported_value"
            )
        size = _parse_sides(self.size)
        for name, side in size.items():
            if self.stated.get(name, side) != side:
                raise build_field_error(name, f"is {self.stated[name]}, but size is {self.size}")
        plain = {name: value for name, value in self.stated.items() if name in _PLAIN}
        try:
            GenerateRequest.draft(**plain | size)
        except UsageError as error:
            raise convert_parameter_error(error, dict.fromkeys(size, "size")) from None
        return self

    @cached_property
    def first_seed(self) -> int:
        """The seed of the first picture, drawn if the body has none."""
        return int(self.stated.get("seed", secrets.randbits(32)))

    @property
    def count(self) -> int:
        """The number of pictures."""
        return int(self.stated.get("n", 1))

    @cached_property
    def adapters(self) -> PromptedLoras:
        """The prompt without tags, and the adapters. Raises ApiError."""
        return PromptedLoras.of(self.prompt, self.loras, has_words=self.trigger)

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that are stated other than by ``size``."""
        return tuple(name for name in ("width", "height") if name in self.stated)

    @property
    def has_size(self) -> bool:
        """Return True if a side is stated."""
        return self.size != "auto" or bool(self.sides)

    @property
    def dimensions(self) -> str:
        """The size of the pictures, or "auto" if a side is left to the AImage."""
        if len(self.sides) < 2:
            return self.size
        return f"{self.stated['width']}x{self.stated['height']}"

    @property
    def encoding(self) -> PictureEncoding:
        """The file format of the pictures. PNG is lossless and has no quality."""
        encoding = PictureEncoding(**self.build_arguments(PictureEncoding))
        return replace(encoding, quality=None) if encoding.kind == "png" else encoding

    def build_request(
        self, aimage: AImage | None, previews: int = 0, pictures: StoredPictures | None = None
    ) -> GenerateRequest:
        """Return the request with the defaults of the AImage, or a draft. Raises UsageError."""
        extra = {**_parse_sides(self.size), "seed": self.first_seed, "previews": previews}
        request = self.request(self.adapters.prompt, pictures, aimage, **extra)
        if aimage is not None and "steps" not in self.stated and self.quality in PRESETS:
            steps = math.ceil(request.sampling.steps * PRESETS[self.quality])
            request = request.change(steps=min(MAX_STEPS, steps))
        return request


_NEEDS_IMAGE = needs(IMAGE, IMAGES)
# Parameters of an edit that apply to all of its image, so that its transparency is no mask
REPAINTS = frozenset({"strength", "fine", "expand", "upscale"})


class EditRequest(ImageRequest):
    """A request of ``/v1/images/edits``."""

    EVENTS = "image_edit"
    RULES: ClassVar[tuple[FieldRule, ...]] = (_NEEDS_IMAGE,)

    @classmethod
    def list_rules(cls) -> list[FieldRule]:
        return [rule for rule in super().list_rules() if rule is not MASKED]


class VariationRequest(ImageRequest):
    """A request of ``/v1/images/variations``, without a prompt."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (_NEEDS_IMAGE,)

    prompt: Annotated[str, AfterValidator(_refuse_prompt)] = Field(
        default="", json_schema_extra={"maxLength": 0}
    )

    @classmethod
    def list_rules(cls) -> list[FieldRule]:
        return [rule for rule in super().list_rules() if "prompt" not in rule.others]


def read_request(
    fields: Mapping[str, Any],
    kind: type[ImageRequest] = ImageRequest,
    *,
    is_form: bool = False,
    **defaults: object,
) -> ImageRequest:
    """Return the request with these fields, and the worker's ``defaults`` of others.

    Raises ApiError.
    """
    if is_form:
        stated = [key for key in _OBJECTS if fields.get(key) not in (None, *ABSENT_IN_FORMS)]
        fields = {**fields, **{key: _parse_json(key, fields[key]) for key in stated}}
    body = check_fields(fields, kind, defaults, is_form=is_form)
    is_url = not body.stream and (body.model or "").removesuffix(":latest") in LINKED
    if is_url and "response_format" not in body.model_fields_set:
        return body.model_copy(update={"response_format": "url"})
    return body


def _parse_json(name: str, text: str) -> Any:
    """Return the JSON in a field of a form. Raises ApiError."""
    try:
        return read_json(text.encode(), name)
    except FormatError as error:
        raise build_field_error(name, error.message.removeprefix(f"{name} ")) from None


def _parse_sides(text: str) -> dict[str, int]:
    """Return the sides of a size. Raises ApiError."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise build_field_error("size", error.message.removeprefix("size ")) from None
