"""What every image pipeline takes and gives: a request in, steps and pictures out."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from clowder_aimage.errors import UsageError

if TYPE_CHECKING:  # a worker that only keeps models has no numpy, and still reads requests
    import numpy as np
    import numpy.typing as npt

FORMATS = ("png", "jpeg", "webp")  # of files with pictures
MAX_STEPS = 1000
MAX_PICTURES = 1024
MAX_SEED = (1 << 64) - 1
MAX_PREVIEWS = 16


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to make.

    width, height: pixels. steps: denoising steps. seed: of the first picture; the next one takes
    the next seed. guidance: 0 switches classifier-free guidance off; w adds w times the
    difference between prompt and ``negative`` (the empty text, if None). shift: replaces the
    model's own shift of the noise schedule. n: how many pictures. previews: of each, on the way.
    """

    prompt: str
    width: int = 1024
    height: int = 1024
    steps: int = 8
    seed: int = 0
    negative: str | None = None
    guidance: float = 0.0
    shift: float | None = None
    n: int = 1
    previews: int = 0

    def previews_after(self) -> frozenset[int]:
        """The steps that a preview follows: spread evenly, never the last one."""
        after = (round((k + 1) * self.steps / (self.previews + 1)) for k in range(self.previews))
        return frozenset(step for step in after if 0 < step < self.steps)


@dataclass(frozen=True, slots=True)
class Step:
    """Step ``index`` of ``total`` is done (1 to total), for picture ``picture`` (0 to n - 1)."""

    index: int
    total: int
    picture: int


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """What picture ``picture`` is about to be: smaller RGB ``pixels`` (height, width, 3), uint8.
    ``number`` counts from 0."""

    pixels: npt.NDArray[np.uint8]
    number: int
    picture: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A finished picture: RGB ``pixels`` of shape (height, width, 3), uint8."""

    pixels: npt.NDArray[np.uint8]
    seed: int
    picture: int = 0

    @property
    def width(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[0])


class Pipeline(Protocol):
    """A loaded model. It lives on the thread that loaded it."""

    def generate(self, request: GenerateRequest) -> Generator[Made, None, None]:
        """Steps, previews and pictures, as they come; closing the generator cancels.

        Raises:
            UsageError: at once, for a request that this model cannot serve.
        """
        ...

    def make_room(self, wish: str, memory: int | None, whole: int | None = None) -> None:
        """``wish``: whether what is not needed for each picture stays in memory, as ``Room`` has
        it, with ``memory`` bytes to share; ``whole``: bytes that there are at all."""
        ...


Made = Step | Preview | Image


@dataclass(frozen=True, slots=True)
class Arrays:
    """The largest arrays while a picture is made: ``size`` in bytes, and ``numbers`` in one that is
    multiplied. Or how large they may be; None for no bound."""

    size: int | None = None
    numbers: int | None = None


_ANY = Arrays()


def check_request(
    request: GenerateRequest,
    *,
    multiple: int,
    max_width: int,
    max_height: int,
    needs: Callable[[int, int], Arrays] | None = None,
    most: Arrays = _ANY,
) -> None:
    """Refuse a request out of bounds: sides must be multiples of ``multiple`` pixels. ``needs``
    says how large the arrays of a picture of width and height are; ``most`` bounds them.

    Raises:
        UsageError: in one sentence, with the field and the bound.
    """
    for name, side, limit in (
        ("width", request.width, max_width),
        ("height", request.height, max_height),
    ):
        if not _is_int(side) or side < multiple or side % multiple:
            raise UsageError(f"{name} must be a multiple of {multiple} pixels, not {side!r}")
        if side > limit:
            raise UsageError(f"{name} can be {limit} pixels at most with this model, not {side}")
    _check_count("steps", request.steps, MAX_STEPS)
    _check_count("n", request.n, MAX_PICTURES)
    if not _is_int(request.previews) or not 0 <= request.previews <= MAX_PREVIEWS:
        raise UsageError(
            f"previews must be a whole number from 0 to {MAX_PREVIEWS}, not {request.previews!r}"
        )
    if not _is_int(request.seed) or not 0 <= request.seed <= MAX_SEED - (request.n - 1):
        raise UsageError(f"seed must be a whole number from 0 to 2^64 - n, not {request.seed!r}")
    if not _is_number(request.guidance) or request.guidance < 0:
        raise UsageError(f"guidance must be 0 or above, not {request.guidance!r}")
    if request.shift is not None and not (_is_number(request.shift) and request.shift > 0):
        raise UsageError(f"shift must be above 0, not {request.shift!r}")
    _check_text("prompt", request.prompt)
    if request.negative is not None:
        _check_text("negative", request.negative)
    if needs is not None:
        _check_arrays(request, multiple, needs, most)


def _check_arrays(
    request: GenerateRequest, multiple: int, needs: Callable[[int, int], Arrays], most: Arrays
) -> None:
    """Refuse a picture whose arrays would be too large: no error comes of such ones, the process
    ends, or what it computes is wrong."""
    width, height = request.width, request.height
    if (why := _excess(needs(width, height), most)) is None:
        return
    side = math.isqrt(width * height) // multiple * multiple
    while side and _excess(needs(side, side), most):
        side -= multiple
    such = f", such as {side}x{side}" if side else ""
    raise UsageError(
        f"width {width} and height {height} make too large a picture here: {why}",
        hint=f"ask for a smaller one{such}",
    )


def _excess(needed: Arrays, most: Arrays) -> str | None:
    """Why arrays cannot be; None where they can."""
    if needed.size is not None and most.size is not None and needed.size > most.size:
        return f"it takes {_gib(needed.size)} of memory at least, and there is {_gib(most.size)}"
    if needed.numbers is None or most.numbers is None or needed.numbers <= most.numbers:
        return None
    return f"attention has {needed.numbers} numbers, and this device takes {most.numbers}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def _check_count(name: str, value: int, limit: int) -> None:
    if not _is_int(value) or not 1 <= value <= limit:
        raise UsageError(f"{name} must be a whole number from 1 to {limit}, not {value!r}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text, not {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} holds characters that are not valid Unicode") from None


def to_pixels(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Values from 0 to 1 as bytes: times 255 in float32, rounded half to even."""
    import numpy as np

    return (np.clip(values, 0, 1) * np.float32(255)).round().astype(np.uint8)


def halved(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A picture at half its size, of which each pixel is the mean of four."""
    height, width, colours = pixels.shape
    quarters = pixels.reshape(height // 2, 2, width // 2, 2, colours)
    mean: npt.NDArray[np.uint8] = quarters.mean(axis=(1, 3)).round().astype(pixels.dtype)
    return mean
