"""The requests of OpenAI's images API, ``POST /v1/images/...``: parsing and validation.

The fields are those of OpenAI's images API for its ``gpt-image`` models, and extensions of other
servers: ``num_inference_steps`` and ``guidance_scale`` are vllm-omni's.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from clowder_aimage.api.guidance_field import MAX_TEXT, Guidance, GuidanceFields
from clowder_aimage.api.lora_field import LoraFields, PromptedLoras
from clowder_aimage.api.picture.picture_field import MAX_PIXELS, PictureFields, check_pixels
from clowder_aimage.api.picture.picture_output import OutputField
from clowder_aimage.api.picture.picture_upload import KeptPictures
from clowder_aimage.api.request_body import GenerationBody, check_fields, check_ignored, wrong
from clowder_aimage.api.text.enhance_field import EnhanceFields
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import FormatError
from clowder_aimage.model.pipeline import (
    MAX_SEED,
    MAX_STEPS,
    GenerateRequest,
    PictureEncoding,
)
from clowder_aimage.oci import read_json
from clowder_aimage.pictures.input_file import MULTIPLE

LINKED = frozenset({"dall-e-2", "dall-e-3"})  # links by default, as at OpenAI
MAX_PICTURES = 10
MAX_PREVIEWS = 3

AUTO, OPENAI, WITH_PROGRESS, OLLAMA = "auto", "openai", "openai+progress", "ollama"
# Presets that change the model's default number of steps, with their factors
PRESETS = {"low": 0.5, "high": 2.0, "hd": 2.0, "xhigh": 3.0, "max": 4.0}
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
_Side = Annotated[int, Field(ge=MULTIPLE, le=MAX_PIXELS // MULTIPLE, multiple_of=MULTIPLE)]


_OBJECTS = ("loras", "output")  # fields that are JSON in a form


def _no_prompt(text: str) -> str:
    if text:
        raise ValueError("is not accepted by variations: send it to edits")
    return text


class ImageRequest(EnhanceFields, GuidanceFields, PictureFields, GenerationBody):
    """A validated request; the AImage provides the defaults of fields that are None."""

    EVENTS: ClassVar[str] = "image_generation"  # the first part of the types of events
    NEEDS_PROMPT: ClassVar[bool] = True
    # Accepted from clients and ignored; ``user`` is neither kept nor logged
    NO_EFFECT = frozenset({"user", "safety_identifier", "moderation", "style", "input_fidelity"})

    prompt: _Text
    size: _Text = "auto"
    width: _Side | None = None
    height: _Side | None = None
    n: int = Field(1, ge=1, le=MAX_PICTURES)
    seed: int = Field(default_factory=lambda: secrets.randbits(32), ge=0, le=MAX_SEED)
    steps: _Steps | None = None
    num_inference_steps: _Steps | None = None
    loras: LoraFields = Field(default_factory=list)
    trigger: bool = False
    guidance_scale: Guidance | None = None
    quality: Literal["auto", "low", "medium", "standard", "high", "hd", "xhigh", "max"] = "auto"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(None, ge=0, le=100)
    response_format: Literal["b64_json", "url"] = "b64_json"
    background: Literal["auto", "opaque", "transparent"] = "auto"
    stream: bool = False
    stream_format: Literal["auto", "openai", "openai+progress", "ollama"] = "auto"
    partial_images: int | None = Field(None, ge=0, le=MAX_PREVIEWS)
    png_facts: bool = True
    output: OutputField | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ApiError for incompatible fields."""
        if self.NEEDS_PROMPT and not self.enhance and not self.adapters.prompt.strip():
            raise wrong("prompt", "must not be empty")
        if self.background == "transparent":
            raise wrong("background", "transparent is not supported", "unsupported_value")
        if self.seed + self.n - 1 > MAX_SEED:
            raise wrong("seed", f"must be at most {MAX_SEED - self.n + 1} for {self.n} pictures")
        for name, other in ("steps", "num_inference_steps"), ("guidance", "guidance_scale"):
            if len({getattr(self, name), getattr(self, other)} - {None}) > 1:
                raise wrong(name, f"and {other} must be equal if both are set")
        whole = _whole_size(self.size)
        for name in ("width", "height"):
            side = getattr(self, name)
            if whole and side not in (None, whole[name]):
                raise wrong(name, f"is {side}, but size is {self.size}")
        if not whole and self.width and self.height:
            check_pixels("width", self.width, self.height)
        return self

    @property
    def adapters(self) -> PromptedLoras:
        """The prompt without tags, and the adapters. Raises ApiError."""
        return PromptedLoras.of(self.prompt, self.loras, has_words=self.trigger)

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that are given other than by ``size``."""
        if _whole_size(self.size):
            return ()
        return tuple(name for name in ("width", "height") if getattr(self, name) is not None)

    @property
    def has_size(self) -> bool:
        """Return whether a side is given."""
        return self.size != "auto" or bool(self.width or self.height)

    @property
    def dimensions(self) -> str:
        """The size of the pictures, or "auto" if a side is left to the AImage."""
        if self.size != "auto":
            return self.size
        return f"{self.width}x{self.height}" if self.width and self.height else "auto"

    @property
    def encoding(self) -> PictureEncoding:
        """The file format of the pictures. PNG is lossless and has no quality."""
        quality = None if self.output_format == "png" else self.output_compression
        return PictureEncoding(self.output_format, quality, self.png_facts)

    def for_model(
        self, aimage: AImage, previews: int = 0, pictures: KeptPictures | None = None
    ) -> GenerateRequest:
        """Return the parameters with the defaults of the AImage.

        Raises ApiError if a negative prompt has no effect or the default side makes it too large.
        """
        whole: dict[str, Any] = _whole_size(self.size) or {
            "width": self.width,
            "height": self.height,
        }
        whole |= self.of_pictures(pictures, aimage, has_size=self.has_size) | self.of_guidance()
        whole |= self.of_enhancement()
        if self.guidance is None:
            whole["guidance"] = self.guidance_scale
        steps = self.num_inference_steps if self.steps is None else self.steps
        parameters = GenerateRequest.for_model(
            aimage,
            self.adapters.prompt,
            **whole,
            steps=steps,
            seed=self.seed,
            n=self.n,
            previews=previews,
        )
        self.check_negative(parameters)
        if len(self.sides) == 1:
            check_pixels(self.sides[0], parameters.width, parameters.height)
        if steps is None and self.quality in PRESETS:
            steps = math.ceil(parameters.steps * PRESETS[self.quality])
            parameters = replace(parameters, steps=min(MAX_STEPS, steps))
        return parameters


class EditRequest(ImageRequest):
    """A request of ``/v1/images/edits``."""

    EVENTS = "image_edit"


class VariationRequest(ImageRequest):
    """A request of ``/v1/images/variations``, which has no prompt."""

    NEEDS_PROMPT = False

    prompt: Annotated[str, AfterValidator(_no_prompt)] = ""


def read_request(
    fields: Mapping[str, Any],
    kind: type[ImageRequest] = ImageRequest,
    *,
    strict: bool = False,
    is_form: bool = False,
    **defaults: object,
) -> ImageRequest:
    """Return the request with these fields, and the worker's ``defaults`` of others.

    Raises ApiError, also for unknown fields if ``strict`` is set here or in the body.
    """
    if is_form:
        fields = {**fields, **{key: _parsed(key, fields[key]) for key in _OBJECTS if key in fields}}
    body = check_fields(fields, kind, defaults, is_form=is_form)
    is_url = not body.stream and (body.model or "").removesuffix(":latest") in LINKED
    if is_url and "response_format" not in body.model_fields_set:
        body = body.model_copy(update={"response_format": "url"})
    return check_ignored(body, strict=strict)


def _parsed(name: str, text: str) -> Any:
    """Return the JSON in a field of a form. Raises ApiError."""
    try:
        return read_json(text.encode(), name)
    except FormatError as error:
        raise wrong(name, error.message.removeprefix(f"{name} ")) from None


def _whole_size(text: str) -> dict[str, int | None] | None:
    """Return the sides of ``WIDTHxHEIGHT``; None for "auto". Raises ApiError."""
    if text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise wrong("size", 'must be "auto" or WIDTHxHEIGHT, such as "1024x1024"')
    width, height = int(found[1]), int(found[2])
    if any(side < MULTIPLE or side % MULTIPLE for side in (width, height)):
        raise wrong("size", f"must have sides that are multiples of {MULTIPLE}, not {text}")
    check_pixels("size", width, height)
    return {"width": width, "height": height}
