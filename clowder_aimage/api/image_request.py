"""The request of ``POST /v1/images/generations``: read and checked.

The fields are those of OpenAI's images API, of its ``gpt-image`` models, and those that other
servers have beside them: ``num_inference_steps`` and ``guidance_scale`` are vllm-omni's.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from clowder_aimage.api.request_body import RequestBody, parse_body, wrong
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.limits import IF_MISSING
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.model.pipeline import (
    MAX_SEED,
    MAX_STEPS,
    GenerateRequest,
    PictureEncoding,
)

MULTIPLE = 16  # pixels
MAX_PIXELS = 3840 * 2160
MAX_PICTURES = 10
MAX_TEXT = 32_000  # characters of a prompt
MAX_GUIDANCE = 1000
SHIFTS = (0.001, 1000)  # beyond these there is one noise level
MAX_PREVIEWS = 3

AUTO, OPENAI, WITH_PROGRESS, OLLAMA = "auto", "openai", "openai+progress", "ollama"
DIALECTS = (AUTO, OPENAI, WITH_PROGRESS, OLLAMA)
# What a preset multiplies the model's own number of steps with
PRESETS = {
    "auto": 1.0,
    "low": 0.5,
    "medium": 1.0,
    "standard": 1.0,
    "high": 2.0,
    "hd": 2.0,
    "xhigh": 3.0,
    "max": 4.0,
}
# Fields that clients send and nothing here depends on; ``user`` is neither kept nor logged
NO_EFFECT = frozenset({"user", "safety_identifier", "moderation", "style", "input_fidelity"})
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
_Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]
_Side = Annotated[int, Field(ge=MULTIPLE, le=MAX_PIXELS // MULTIPLE, multiple_of=MULTIPLE)]


def _flag(value: object) -> object:
    return bool(value) if type(value) is int and value in (0, 1) else value


class ImageBody(RequestBody):
    """The fields of the body, each within its own bounds."""

    model_config = ConfigDict(extra="allow")

    prompt: _Text
    model: Annotated[str, Field(max_length=1024)] | None = None
    size: _Text | None = None
    width: _Side | None = None
    height: _Side | None = None
    n: int = Field(1, ge=1, le=MAX_PICTURES)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    steps: _Steps | None = None
    num_inference_steps: _Steps | None = None
    negative_prompt: _Text | None = None
    guidance: _Guidance | None = None
    guidance_scale: _Guidance | None = None
    shift: float | None = Field(None, ge=SHIFTS[0], le=SHIFTS[1])
    quality: Literal["auto", "low", "medium", "standard", "high", "hd", "xhigh", "max"] = "auto"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(None, ge=0, le=100)
    response_format: Literal["b64_json", "url"] = "b64_json"
    background: Literal["auto", "opaque", "transparent"] = "auto"
    stream: bool = False
    stream_format: Literal["auto", "openai", "openai+progress", "ollama"] | None = None
    partial_images: int | None = Field(None, ge=0, le=MAX_PREVIEWS)
    pull: Literal["never", "if-missing", "always"] | None = None
    png_facts: bool | None = None
    strict: Annotated[bool, BeforeValidator(_flag)] = False


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """Settings of the worker for fields that a request does not have."""

    pull: str = IF_MISSING
    stream_format: str = AUTO
    facts: bool = True


_USUAL = ImageDefaults()


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A request whose fields are in their bounds.

    Fields that are None are the AImage's to decide. ``sides``: those given as ``width`` or
    ``height``, not as ``size``.
    """

    prompt: str
    seed: int
    model: str | None = None
    width: int | None = None
    height: int | None = None
    sides: tuple[str, ...] = ()
    n: int = 1
    steps: int | None = None
    negative: str | None = None
    guidance: float | None = None
    shift: float | None = None
    quality: str = "auto"
    output_format: str = "png"
    compression: int | None = None
    is_url: bool = False
    is_stream: bool = False
    stream_format: str = AUTO
    partial_images: int | None = None
    pull: str = IF_MISSING
    facts: bool = True
    ignored: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """The size as the client wrote it."""
        if self.width is None or self.height is None:
            return "auto"
        return f"{self.width}x{self.height}"

    @property
    def encoding(self) -> PictureEncoding:
        """The file format of the pictures. PNG is lossless and has no quality."""
        quality = None if self.output_format == "png" else self.compression
        return PictureEncoding(self.output_format, quality, self.facts)

    def for_model(self, aimage: AImage, previews: int = 0) -> GenerateRequest:
        """Return the parameters, with the defaults of the AImage.

        Raises:
            ApiError: a negative prompt that would have no effect; one side with which the
                AImage's other one makes too large a picture.
        """
        parameters = GenerateRequest.for_model(
            aimage,
            self.prompt,
            width=self.width,
            height=self.height,
            steps=self.steps,
            seed=self.seed,
            negative=self.negative,
            guidance=self.guidance,
            shift=self.shift,
            n=self.n,
            previews=previews,
        )
        if self.negative and not parameters.guidance:
            raise wrong("negative_prompt", "needs guidance above 0: without it nothing is avoided")
        if len(self.sides) == 1:
            check_pixels(self.sides[0], parameters.width, parameters.height)
        if self.steps is None and PRESETS[self.quality] != 1:
            steps = math.ceil(parameters.steps * PRESETS[self.quality])
            parameters = replace(parameters, steps=min(MAX_STEPS, steps))
        return parameters


def read_request(
    raw: bytes,
    *,
    strict: bool = False,
    usual: ImageDefaults = _USUAL,
    draw: Callable[[], int] = lambda: secrets.randbits(32),
) -> ImageRequest:
    """Return the request in the body ``raw``. ``draw`` returns a seed if it has none.

    Raises:
        ApiError: It is not a JSON object, a field is out of bounds, or (with ``strict``, or if the
            body says so) unknown.
    """
    body = parse_body(raw, ImageBody)
    if not body.prompt.strip():
        raise wrong("prompt", "is empty")
    if body.background == "transparent":
        raise wrong("background", "cannot be transparent: pictures are opaque", "unsupported_value")
    if body.seed is not None and body.seed + body.n - 1 > MAX_SEED:
        raise wrong("seed", f"must be at most {MAX_SEED - body.n + 1} for {body.n} pictures")
    unknown = tuple(sorted((body.model_extra or {}).keys() - NO_EFFECT))
    if unknown and (strict or body.strict):
        name = unknown[0][:60]
        message = f"{name!a} is unknown; without strict it would be ignored"
        raise ApiError(400, message, code="unknown_parameter", param=name)
    width, height, sides = _size(body)
    return ImageRequest(
        body.prompt,
        draw() if body.seed is None else body.seed,
        model=body.model or None,
        width=width,
        height=height,
        sides=sides,
        n=body.n,
        steps=_same(body, "steps", "num_inference_steps"),
        negative=body.negative_prompt or None,
        guidance=_same(body, "guidance", "guidance_scale"),
        shift=body.shift,
        quality=body.quality,
        output_format=body.output_format,
        compression=body.output_compression,
        is_url=body.response_format == "url",
        is_stream=body.stream,
        stream_format=body.stream_format or usual.stream_format,
        partial_images=body.partial_images,
        pull=body.pull or usual.pull,
        facts=usual.facts if body.png_facts is None else body.png_facts,
        ignored=unknown,
    )


def _same(body: ImageBody, name: str, other: str) -> Any:
    """Return the value of a field that has two names. Raises ApiError if they differ."""
    values = {getattr(body, each) for each in (name, other)} - {None}
    if len(values) > 1:
        raise wrong(name, f"and {other} are the same, but differ here")
    return next(iter(values), None)


def _size(body: ImageBody) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Return width, height, and which of them were given by themselves."""
    size = _whole_size(body.size)
    alone = {"width": body.width, "height": body.height}
    given = {name: side for name, side in alone.items() if side is not None}
    if size is not None:
        for name, side in given.items():
            if size[name] != side:
                raise wrong(name, f"is {side}, but {size[name]} in size")
        return size["width"], size["height"], ()
    if len(given) == 2:
        check_pixels("width", given["width"], given["height"])
    return body.width, body.height, tuple(given)


def _whole_size(text: str | None) -> dict[str, int] | None:
    if text is None or text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise wrong("size", 'must be "auto" or such as "1024x1024"')
    width, height = int(found[1]), int(found[2])
    if any(side < MULTIPLE or side % MULTIPLE for side in (width, height)):
        raise wrong("size", f"must have sides that are multiples of {MULTIPLE}, not {text}")
    check_pixels("size", width, height)
    return {"width": width, "height": height}


def check_pixels(param: str, width: int, height: int) -> None:
    """Raise ApiError if a picture is larger than any that is made here."""
    if width * height > MAX_PIXELS:
        given = f"{width * height} as {width}x{height}"
        raise wrong(param, f"can make {MAX_PIXELS} pixels at most, not {given}")
