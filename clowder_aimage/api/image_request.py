"""What a client asks of ``POST /v1/images/generations``: read and checked.

The fields are those of OpenAI's images API, of its ``gpt-image`` models, and what the neighbours
send beside them: ``num_inference_steps`` and ``guidance_scale`` are vllm-omni's words.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from clowder_aimage.api.request_fields import RequestFields, shown, wrong
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.limits import ALWAYS, IF_MISSING, NEVER
from clowder_aimage.errors import FormatError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.model.pipeline import (
    FORMATS,
    MAX_SEED,
    MAX_STEPS,
    GenerateRequest,
    PictureEncoding,
)
from clowder_aimage.oci import read_json

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
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageDefaults:
    """What a worker does where a request does not say."""

    pull: str = IF_MISSING
    stream_format: str = AUTO
    facts: bool = True


_USUAL = ImageDefaults()


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A request in which every field is in its bounds. None: the AImage decides. ``sides``: those
    that were said by themselves, not as ``size``."""

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
        """As the client wrote it."""
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
    """The request that a body is. ``draw`` gives the seed of one that names none.

    Raises:
        ApiError: it is no JSON object, a field is out of bounds, or (with ``strict``, or where the
            body says so) unknown.
    """
    try:
        body = read_json(raw, "the request's body")
    except FormatError as error:
        raise ApiError(400, error.message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body is no JSON object", code="invalid_json")
    fields = RequestFields({key: value for key, value in body.items() if value is not None})
    request = _read(fields, draw, usual)
    if strict or fields.flag("strict", also=(0, 1)):
        fields.refuse_unknown()
    return request


def _read(
    fields: RequestFields, draw: Callable[[], int], usual: ImageDefaults = _USUAL
) -> ImageRequest:
    prompt = fields.text("prompt", most=MAX_TEXT)
    if prompt is None:
        raise ApiError(
            400, "the request has no prompt", code="missing_required_parameter", param="prompt"
        )
    if not prompt.strip():
        raise wrong("prompt", "is empty")
    model = fields.text("model", most=1024)
    width, height, sides = _size(fields)
    n = fields.count("n", least=1, most=MAX_PICTURES) or 1
    seed = fields.count("seed", least=0, most=MAX_SEED - (n - 1))
    request = ImageRequest(
        prompt,
        draw() if seed is None else seed,
        model=model or None,
        width=width,
        height=height,
        sides=sides,
        n=n,
        steps=fields.count("steps", "num_inference_steps", least=1, most=MAX_STEPS),
        negative=fields.text("negative_prompt", most=MAX_TEXT) or None,
        guidance=fields.number("guidance", "guidance_scale", most=MAX_GUIDANCE),
        shift=fields.number("shift", least=SHIFTS[0], most=SHIFTS[1]),
        quality=fields.word("quality", tuple(PRESETS), "auto"),
        output_format=fields.word("output_format", FORMATS, "png"),
        compression=fields.count("output_compression", least=0, most=100),
        is_url=fields.word("response_format", ("b64_json", "url"), "b64_json") == "url",
        is_stream=fields.flag("stream"),
        stream_format=fields.word("stream_format", DIALECTS, usual.stream_format),
        partial_images=fields.count("partial_images", least=0, most=MAX_PREVIEWS),
        pull=fields.word("pull", (NEVER, IF_MISSING, ALWAYS), usual.pull),
        facts=fields.flag("png_facts", default=usual.facts),
    )
    _background(fields)
    return replace(request, ignored=fields.unknown)


def _size(fields: RequestFields) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Width, height, and which of them were said by themselves."""
    size = _whole_size(fields.text("size", most=MAX_TEXT))
    most = MAX_PIXELS // MULTIPLE
    said = {name: fields.count(name, least=MULTIPLE, most=most) for name in ("width", "height")}
    alone = {name: side for name, side in said.items() if side is not None}
    for name, side in alone.items():
        if side % MULTIPLE:
            raise wrong(name, f"must be a multiple of {MULTIPLE}, not {side}")
        if size is not None and size[name] != side:
            raise wrong(name, f"is {side}, but {size[name]} in size")
    if size is not None:
        return size["width"], size["height"], ()
    if len(alone) == 2:
        check_pixels("width", alone["width"], alone["height"])
    return said["width"], said["height"], tuple(alone)


def _whole_size(text: str | None) -> dict[str, int] | None:
    if text is None or text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise wrong("size", f'must be "auto" or such as "1024x1024", not {shown(text)}')
    width, height = int(found[1]), int(found[2])
    if any(side < MULTIPLE or side % MULTIPLE for side in (width, height)):
        raise wrong("size", f"must have sides that are multiples of {MULTIPLE}, not {text}")
    check_pixels("size", width, height)
    return {"width": width, "height": height}


def check_pixels(param: str, width: int, height: int) -> None:
    """Refuse what no model here is asked for. Raises ApiError."""
    if width * height > MAX_PIXELS:
        asked = f"{width * height} as {width}x{height}"
        raise wrong(param, f"can make {MAX_PIXELS} pixels at most, not {asked}")


def _background(fields: RequestFields) -> None:
    words = ("auto", "opaque", "transparent")
    if fields.word("background", words, "auto") == "transparent":
        raise wrong("background", "cannot be transparent: pictures are opaque", "unsupported_value")
