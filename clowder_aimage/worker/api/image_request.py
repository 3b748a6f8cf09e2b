"""What a client asks of ``POST /v1/images/generations``: read, checked, and made into wishes.

The fields are those of OpenAI's images API, of its ``gpt-image`` models, and what the neighbours
send beside them: ``num_inference_steps`` and ``guidance_scale`` are vllm-omni's words.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.dialect import AImage
from clowder_aimage.errors import FormatError
from clowder_aimage.model.picture import FORMATS
from clowder_aimage.model.pipeline import MAX_SEED, MAX_STEPS, Request
from clowder_aimage.oci import read_json
from clowder_aimage.worker.engine import ALWAYS, IF_MISSING, NEVER
from clowder_aimage.worker.error import ApiError

MULTIPLE = 16  # pixels
MAX_PIXELS = 3840 * 2160
MAX_PICTURES = 10
MAX_TEXT = 32_000  # characters of a prompt
MAX_GUIDANCE = 1000
MAX_PREVIEWS = 3

AUTO, OPENAI, WITH_PROGRESS, OLLAMA = "auto", "openai", "openai+progress", "ollama"
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
# What clients send and nothing here depends on; ``user`` is neither kept nor logged
_NO_EFFECT = frozenset({"user", "safety_identifier", "moderation", "style", "input_fidelity"})
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A request in which every field is in its bounds. None: the AImage decides."""

    prompt: str
    seed: int
    model: str | None = None
    width: int | None = None
    height: int | None = None
    n: int = 1
    steps: int | None = None
    negative: str | None = None
    guidance: float | None = None
    quality: str = "auto"
    output_format: str = "png"
    compression: int | None = None
    is_url: bool = False
    is_stream: bool = False
    stream_format: str = AUTO
    partial_images: int | None = None
    pull: str = IF_MISSING
    ignored: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """As the client wrote it."""
        return "auto" if self.width is None else f"{self.width}x{self.height}"

    @property
    def encoding(self) -> dict[str, Any]:
        """How pictures are written. PNG loses nothing, so it knows no compression."""
        quality = None if self.output_format == "png" else self.compression
        return {"kind": self.output_format, "quality": quality}

    def wishes(self, aimage: AImage) -> dict[str, Any]:
        """What the pipeline is asked for, where the AImage has its own defaults.

        Raises:
            ApiError: a negative prompt that would have no effect.
        """
        usual = Request("")
        own = aimage.properties.get("defaults", {})
        if self.negative and not (self.guidance or own.get("guidance", usual.guidance)):
            raise wrong("negative_prompt", "needs guidance above 0: without it nothing is avoided")
        wishes: dict[str, Any] = {"seed": self.seed, "n": self.n, "steps": self.steps}
        wishes |= {"width": self.width, "height": self.height}
        wishes |= {"negative": self.negative, "guidance": self.guidance}
        if self.steps is None and PRESETS[self.quality] != 1:
            steps = math.ceil(own.get("steps", usual.steps) * PRESETS[self.quality])
            wishes["steps"] = min(MAX_STEPS, steps)
        return wishes


def wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """That a field cannot be meant."""
    return ApiError(400, f"{param} {message}", code=code, param=param)


def read_request(
    raw: bytes,
    *,
    strict: bool = False,
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
    fields = Fields({key: value for key, value in body.items() if value is not None})
    request = _read(fields, draw)
    if strict or fields.flag("strict", also=(0, 1)):
        fields.refuse_unknown()
    return request


class Fields:
    """The fields of a body, each asked for by its name; what nobody asked for is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._asked: set[str] = {"strict", *_NO_EFFECT}

    def get(self, *names: str) -> tuple[str, Any]:
        """The value, and which of its names it came by; None where there is none."""
        self._asked.update(names)
        found = [(name, self._body[name]) for name in names if name in self._body]
        if any(value != found[0][1] for _, value in found):
            raise wrong(found[0][0], f"and {found[1][0]} are the same, but differ here")
        return found[0] if found else (names[0], None)

    def text(self, name: str, *, most: int) -> str | None:
        _, value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong(name, "must be text", "invalid_type")
        if len(value) > most:
            raise wrong(name, f"can have {most} characters at most, not {len(value)}")
        if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise wrong(name, "holds characters that are not valid Unicode")
        return value

    def word(self, name: str, words: tuple[str, ...], default: str) -> str:
        _, value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(name, "must be text", "invalid_type")
        if value not in words:
            raise wrong(name, f"must be one of {', '.join(words)}, not {_shown(value)}")
        return value

    def count(self, *names: str, least: int, most: int) -> int | None:
        name, value = self.get(*names)
        if value is None:
            return None
        if type(value) is not int:
            raise wrong(name, f"must be a whole number, not {_shown(value)}", "invalid_type")
        if not least <= value <= most:
            raise wrong(name, f"must be from {least} to {most}, not {_shown(value)}")
        return value

    def number(self, *names: str, most: int) -> float | None:
        name, value = self.get(*names)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise wrong(name, f"must be a number, not {_shown(value)}", "invalid_type")
        if not 0 <= value <= most:
            raise wrong(name, f"must be from 0 to {most}, not {_shown(value)}")
        return float(value)

    def flag(self, name: str, *, also: tuple[int, ...] = ()) -> bool:
        _, value = self.get(name)
        if value is None:
            return False
        if type(value) is bool or (type(value) is int and value in also):
            return bool(value)
        raise wrong(name, f"must be true or false, not {_shown(value)}", "invalid_type")

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(sorted(self._body.keys() - self._asked))

    def refuse_unknown(self) -> None:
        """Raises ApiError for the first field that means nothing here."""
        for name in self.unknown:
            shown = _shown(name)
            message = f"{shown} is unknown; without strict it would be ignored"
            raise ApiError(400, message, code="unknown_parameter", param=name[:60])


def _shown(value: object) -> str:
    """A value as an error shows it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "that number"
    return (text if len(text) <= 40 else f"{text[:40]}...").encode("ascii", "replace").decode()


def _read(fields: Fields, draw: Callable[[], int]) -> ImageRequest:
    prompt = fields.text("prompt", most=MAX_TEXT)
    if prompt is None:
        raise ApiError(
            400, "the request has no prompt", code="missing_required_parameter", param="prompt"
        )
    if not prompt.strip():
        raise wrong("prompt", "is empty")
    model = fields.text("model", most=1024)
    width, height = _size(fields)
    n = fields.count("n", least=1, most=MAX_PICTURES) or 1
    seed = fields.count("seed", least=0, most=MAX_SEED - (n - 1))
    request = ImageRequest(
        prompt,
        draw() if seed is None else seed,
        model=model or None,
        width=width,
        height=height,
        n=n,
        steps=fields.count("steps", "num_inference_steps", least=1, most=MAX_STEPS),
        negative=fields.text("negative_prompt", most=MAX_TEXT) or None,
        guidance=fields.number("guidance", "guidance_scale", most=MAX_GUIDANCE),
        quality=fields.word("quality", tuple(PRESETS), "auto"),
        output_format=fields.word("output_format", FORMATS, "png"),
        compression=fields.count("output_compression", least=0, most=100),
        is_url=fields.word("response_format", ("b64_json", "url"), "b64_json") == "url",
        is_stream=fields.flag("stream"),
        stream_format=fields.word("stream_format", (AUTO, OPENAI, WITH_PROGRESS, OLLAMA), AUTO),
        partial_images=fields.count("partial_images", least=0, most=MAX_PREVIEWS),
        pull=fields.word("pull", (NEVER, IF_MISSING, ALWAYS), IF_MISSING),
    )
    _background(fields)
    return replace(request, ignored=fields.unknown)


def _size(fields: Fields) -> tuple[int | None, int | None]:
    text = fields.text("size", most=MAX_TEXT)
    if text is None or text == "auto":
        return None, None
    found = _SIZE.fullmatch(text)
    if found is None:
        raise wrong("size", f'must be "auto" or such as "1024x1024", not {_shown(text)}')
    width, height = int(found[1]), int(found[2])
    if any(side < MULTIPLE or side % MULTIPLE for side in (width, height)):
        raise wrong("size", f"must have sides that are multiples of {MULTIPLE}, not {text}")
    if width * height > MAX_PIXELS:
        raise wrong("size", f"can have {MAX_PIXELS} pixels at most, not {width * height} as {text}")
    return width, height


def _background(fields: Fields) -> None:
    words = ("auto", "opaque", "transparent")
    if fields.word("background", words, "auto") == "transparent":
        raise wrong("background", "cannot be transparent: pictures are opaque", "unsupported_value")
