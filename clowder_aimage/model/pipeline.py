"""The interface of image pipelines: requests, steps and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Digest

if TYPE_CHECKING:  # a worker without numpy stores models and still parses requests
    import numpy as np
    import numpy.typing as npt

    from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
    from clowder_aimage.content.store import BlobFiles

# In the order of their use; adapters that are packed with a model first
COMPONENTS = ("adapters", "text_encoder", "transformer", "vae")
FORMATS = ("png", "jpeg", "webp")  # of picture files
# Parameters that a config may set
MODEL_DEFAULTS = ("width", "height", "steps", "guidance", "guidance_end", "cache_threshold")
MAX_STEPS = 1000
MAX_PICTURES = 1024
MAX_SEED = (1 << 64) - 1
MAX_PREVIEWS = 16
MAX_SCALE = 10_000  # of guidance and of the schedule's shift
MAX_THRESHOLD = 10  # of the step cache, which then reuses almost any step
MAX_LORAS = 16
MAX_FEATHER = 256  # pixels
STRENGTH = 0.6  # of an image without a mask, as in diffusers
CONTROL_STRENGTH = 0.75  # as in diffusers
MAX_CONTROL = 10  # of the strength of a control network
UPSCALE_STRENGTH = 0.2  # of an image that is enlarged
MAX_EXPAND = 4096  # pixels on a side
MAX_UPSCALE = 4
FITS = ("crop", "pad", "stretch")
ALPHA = "alpha"  # the mask that is the transparency of the image
MAX_STRENGTH = 100  # of an adapter, also negative
MAX_REFERENCES = 4
REFERENCE_PIXELS = 1024 * 1024  # of a reference picture; larger ones are scaled down


@dataclass(frozen=True, slots=True, eq=False)
class PictureInput:
    """The picture that a request begins with, at its size, its mask, and other pictures.

    pixels, control: RGB (height, width, 3), uint8. mask: (height, width), uint8; from 128 on it is
    painted. references: RGB of any size.
    """

    pixels: npt.NDArray[np.uint8] | None = None
    mask: npt.NDArray[np.uint8] | None = None
    control: npt.NDArray[np.uint8] | None = None
    references: tuple[npt.NDArray[np.uint8], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StoredControlNet:
    """An AImage with a control network in ``component``; ``name`` is for errors."""

    files: BlobFiles
    aimage: AImage
    name: str
    component: str = ""


@dataclass(frozen=True, slots=True)
class LoraUse:
    """An adapter of a request: ``model`` is its reference, file or name in a directory.

    strength: the factor of its change; None for the one that the adapter recommends, else 1.
    digest: of the manifest, or of the file; required once the adapter was found.
    """

    model: str
    strength: float | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Parameters of a generation, passed between processes as ``dataclasses.asdict``.

    width, height: pixels. steps: denoising steps. seed: of the first picture; each further picture
    uses the next seed. guidance: the scale of classifier-free guidance, as in the family's
    reference: 0 disables it; w adds w times the difference between prompt and ``negative`` (None:
    the empty text), or w - 1 times (FLUX.2). guidance_end: guidance is
    off at steps that begin after this part of the way from noise (0) to picture (1). shift:
    replaces the model's own shift of the noise schedule. cache_threshold: a step reuses the work
    of an earlier one if the first block of the transformer changes its result by less than this
    part of it; 0 computes every step. cfg_normalization: with guidance, the length of the velocity
    is at most this multiple of the unguided one's; 0 does not limit it. image, mask: digests of
    picture files in the store; the picture begins with the image, and white parts of the mask (or
    "alpha": transparent parts of the image) are painted. strength: the part of the steps that is
    done, from 0 to 1. fine: all steps are done, from the noise level of the strength. fit: crop,
    pad or stretch the image to the size. paste: what is not painted is the image's; feather: pixels
    over which it is mixed. crop: only the surroundings of the mask are generated. expand: pixels
    that are added to the left, top, right and bottom of the image, and painted; the size is that of
    the result, rounded up to what the model supports. upscale: the factor by which the image is
    enlarged, then improved in tiles of the size; 0 does not. control: digest of a picture file that
    guides a control network; controlnet: the network's reference, None for the model's own;
    control_strength: a factor of its hints. references: digests of picture files that the model
    edits or combines. loras: adapters, whose changes are added, also as objects of their fields.
    original_prompt, enhancer: the prompt that a language model has enhanced, and the name of that
    model; they change nothing. n: number of pictures. previews: number of previews of each picture.
    """

    prompt: str
    width: int = 1024
    height: int = 1024
    steps: int = 8
    seed: int = 0
    negative: str | None = None
    guidance: float = 0.0
    guidance_end: float = 1.0
    cfg_normalization: float = 0.0
    shift: float | None = None
    cache_threshold: float = 0.0
    image: str | None = None
    mask: str | None = None
    strength: float | None = None
    fine: bool = False
    fit: str = "crop"
    paste: bool = False
    feather: int = 0
    crop: bool = False
    expand: tuple[int, ...] = ()
    upscale: float = 0.0
    control: str | None = None
    controlnet: str | None = None
    control_strength: float | None = None
    references: tuple[str, ...] = ()
    loras: tuple[LoraUse, ...] = ()
    original_prompt: str | None = None
    enhancer: str | None = None
    n: int = 1
    previews: int = 0

    def __post_init__(self) -> None:
        uses: tuple[Any, ...] = tuple(self.loras)
        uses = tuple(LoraUse(**use) if isinstance(use, dict) else use for use in uses)
        object.__setattr__(self, "loras", uses)
        object.__setattr__(self, "expand", tuple(self.expand))
        object.__setattr__(self, "references", tuple(self.references))
        if self.image is not None and self.strength is None:
            is_painted = self.mask is not None or bool(self.expand)
            default = UPSCALE_STRENGTH if self.upscale else STRENGTH
            object.__setattr__(self, "strength", 1.0 if is_painted else default)
        if self.control is not None and self.control_strength is None:
            object.__setattr__(self, "control_strength", CONTROL_STRENGTH)

    @classmethod
    def for_model(cls, aimage: AImage, prompt: str, **parameters: Any) -> GenerateRequest:
        """Return a request in which missing parameters (None) have the defaults of the AImage."""
        own = aimage.properties.get("defaults")
        known = own.items() if isinstance(own, dict) else ()
        defaults = {key: value for key, value in known if key in MODEL_DEFAULTS}
        given = {key: value for key, value in parameters.items() if value is not None}
        return cls(prompt, **defaults | given)


def first_step(steps: int, strength: float) -> int:
    """Return the step, from 0, at which a picture begins. Raises UsageError: none is left."""
    first = int(max(steps - min(steps * strength, steps), 0))
    if first >= steps:
        raise UsageError(
            f"strength {strength:g} leaves none of {steps} steps to do",
            hint=f"use a strength of at least {1 / steps:.2g}, or more steps",
        )
    return first


def whole_steps(steps: int, strength: float) -> int:
    """Return the steps of the schedule of which the last ``steps`` are done with ``fine``."""
    return max(steps, round(steps / strength))


def ignored_image(request: GenerateRequest) -> str:
    """Return why the image of a request has no effect, and what to use; else the empty text.

    It is so if the first step begins at full noise. With a mask, the rest of the image is kept.
    """
    steps, strength = request.steps, request.strength
    if request.image is None or not strength or request.mask is not None or request.expand:
        return ""
    if request.fine:
        is_ignored = whole_steps(steps, strength) == steps
    else:
        is_ignored = first_step(steps, strength) == 0
    if not is_ignored:
        return ""
    least = (steps - 1) / steps if not request.fine else steps / (steps + 1)
    other = "more steps" if request.fine else "more steps, or fine"
    lower = f"a strength of at most {math.floor(least * 100) / 100:g}" if least else ""
    lower += (" or " if request.fine else ", ") if lower else ""
    return (
        f"strength {strength:g} with steps {steps} begins at full noise, so the image is ignored; "
        f"use {lower}{other}"
    )


def previews_after(previews: int, steps: int) -> frozenset[int]:
    """Return the steps followed by a preview: evenly spaced, never the last one."""
    after = (round((k + 1) * steps / (previews + 1)) for k in range(previews))
    return frozenset(step for step in after if 0 < step < steps)


# The fields that determine a picture
ENHANCED = ("original_prompt", "enhancer")  # fields that a picture states only
PARAMETERS = tuple(
    field.name
    for field in fields(GenerateRequest)
    if field.name not in ("n", "previews", *ENHANCED)
)


@dataclass(frozen=True, slots=True)
class PictureEncoding:
    """The file format of pictures.

    kind: one of FORMATS. quality: 0 to 100, of JPEG and WebP. has_facts: a file stores its
    parameters.
    """

    kind: str = "png"
    quality: int | None = None
    has_facts: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """The end of step ``index`` of ``total`` (1 to total), for picture ``picture`` (0 to n - 1)."""

    index: int
    total: int
    picture: int


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """A preview of picture ``picture``: smaller RGB ``pixels`` (height, width, 3), uint8.

    ``number`` counts the previews of a picture from 0.
    """

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
        """Return the width in pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """Return the height in pixels."""
        return int(self.pixels.shape[0])


class Pipeline(Protocol):
    """A loaded model, used only on the thread that loaded it."""

    @property
    def library(self) -> Any:
        """The library that computes its networks: an ``ArrayLibrary``."""
        ...

    def generate(
        self, request: GenerateRequest, given: PictureInput | None = None
    ) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels the generation.

        ``given`` is the picture of a request with an image.

        Raises:
            UsageError: Immediately, if this model does not support the request.
        """
        ...

    def set_memory(
        self,
        policy: str,
        memory: int | None,
        total: int | None = None,
        *,
        text_encoder: str | None = None,
        limit: int | None = None,
        is_last: bool = False,
    ) -> None:
        """Set the memory for this process and that of the device; see ``MemoryBudget``.

        The policies of all networks and of the text encoder are keep, release, or auto.
        """
        ...

    def check(self, request: GenerateRequest, given: PictureInput | None = None) -> None:
        """Reject a request, or its picture, that this model does not support; change nothing.

        Raises UsageError.
        """
        ...

    def preload(self, request: GenerateRequest) -> str:
        """Load all networks if they can stay in memory while the request's pictures are made.

        Returns what stays in memory, in words. Raises as ``ModelWeights.apply`` does.
        """
        ...

    def prepare(self, request: GenerateRequest) -> None:
        """Encode the texts of a request, which follows. Raises as ``generate`` does."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that adapters may change, by ``component/name``."""
        ...

    def use_adapters(self, uses: Sequence[tuple[LoadedAdapter, float]]) -> None:
        """Use these adapters, each with a strength, and no others from now on."""
        ...

    def use_control(self, stored: StoredControlNet) -> None:
        """Use a control network for requests that name one, from now on.

        Raises:
            UsageError: The family of the model has none.
            FormatError: The network is of another base model, or damaged.
        """
        ...


PipelineEvent = Step | Preview | Image


def check_parameters(request: GenerateRequest) -> None:
    """Reject parameters that no model supports. Raises UsageError with the field and its bound."""
    for name, side in (("width", request.width), ("height", request.height)):
        if not _is_int(side) or side < 1:
            raise UsageError(f"{name} must be a whole number of pixels above 0, not {side!r:.40}")
    _check_count("steps", request.steps, MAX_STEPS)
    _check_count("n", request.n, MAX_PICTURES)
    if not _is_int(request.previews) or not 0 <= request.previews <= MAX_PREVIEWS:
        raise UsageError(
            f"previews must be a whole number from 0 to {MAX_PREVIEWS}, not {request.previews!r}"
        )
    if not _is_int(request.seed) or not 0 <= request.seed <= MAX_SEED - (request.n - 1):
        raise UsageError(f"seed must be a whole number from 0 to 2^64 - n, not {request.seed!r}")
    _check_number("guidance", request.guidance, 0, MAX_SCALE)
    _check_number("guidance_end", request.guidance_end, 0, 1)
    _check_number("cfg_normalization", request.cfg_normalization, 0, MAX_SCALE)
    _check_number("cache_threshold", request.cache_threshold, 0, MAX_THRESHOLD)
    if request.shift is not None:
        _check_number("shift", request.shift, 1 / MAX_SCALE, MAX_SCALE)
    for name in ("prompt", "negative", *ENHANCED):
        value = getattr(request, name)
        _check_text(name, "" if value is None and name != "prompt" else value)
    _check_loras(request.loras)
    _check_picture(request)
    _check_control(request)
    if len(request.references) > MAX_REFERENCES:
        raise UsageError(
            f"references must be at most {MAX_REFERENCES} pictures, not {len(request.references)}"
        )
    for reference in request.references:
        _check_digest("references", reference)
    if request.fit not in FITS:
        raise UsageError(f"fit must be one of {', '.join(FITS)}, not {request.fit!r:.40}")


def _check_control(request: GenerateRequest) -> None:
    if request.control is None:
        for name in ("controlnet", "control_strength"):
            if getattr(request, name) is not None:
                raise UsageError(f"{name} requires a control picture")
        return
    _check_digest("control", request.control)
    if request.controlnet is not None:
        _check_text("controlnet", request.controlnet)
    strength = request.control_strength
    _check_number("control_strength", 0 if strength is None else strength, 0, MAX_CONTROL)


def _check_picture(request: GenerateRequest) -> None:
    if request.image is None:
        for name in (
            "mask",
            "strength",
            "fine",
            "paste",
            "feather",
            "crop",
            "expand",
            "upscale",
        ):
            if getattr(request, name):
                raise UsageError(f"{name} requires an image")
        return
    _check_digest("image", request.image)
    _check_mask(request)
    if request.strength is not None:
        _check_number("strength", request.strength, 0, 1)
    if not request.strength:
        raise UsageError("strength must be above 0: nothing would change")
    if not request.fine:
        first_step(request.steps, request.strength)
    _check_enlarged(request)
    if not _is_int(request.feather) or not 0 <= request.feather <= MAX_FEATHER:
        raise UsageError(
            f"feather must be a whole number of pixels from 0 to {MAX_FEATHER}, not "
            f"{request.feather!r:.40}"
        )


def _check_mask(request: GenerateRequest) -> None:
    if request.mask is None:
        for name in ("paste", "feather", "crop"):
            if getattr(request, name):
                raise UsageError(f"{name} requires a mask")
    elif request.mask != ALPHA:
        _check_digest("mask", request.mask)
    if request.feather and not (request.paste or request.crop):
        raise UsageError("feather requires paste or crop: it is the width of their seam")


def _check_enlarged(request: GenerateRequest) -> None:
    _check_number("upscale", request.upscale, 0, MAX_UPSCALE)
    if 0 < request.upscale < 1:
        raise UsageError(f"upscale must be from 1 to {MAX_UPSCALE}, not {request.upscale:g}")
    others = {
        "expand": bool(request.expand),
        "a mask": request.mask is not None,
    }
    for name, is_given in others.items() if request.upscale else ():
        if is_given:
            raise UsageError(f"upscale cannot be combined with {name}")
    if not request.expand:
        return
    if request.mask is not None:
        raise UsageError("expand cannot be combined with a mask: the new area is painted")
    sides = request.expand
    if len(sides) != 4 or not all(_is_int(side) and 0 <= side <= MAX_EXPAND for side in sides):
        raise UsageError(
            f"expand must be four numbers of pixels from 0 to {MAX_EXPAND}, for left, top, right "
            f"and bottom, not {list(sides)!r:.60}"
        )
    if not any(sides):
        raise UsageError("expand must be above 0 on one side: nothing would change")


def _check_digest(name: str, value: str) -> None:
    try:
        Digest.parse(value)
    except FormatError:
        raise UsageError(f"{name} must be the digest of a picture, not {value!r:.100}") from None


def _check_loras(loras: tuple[LoraUse, ...]) -> None:
    if len(loras) > MAX_LORAS:
        raise UsageError(f"loras must be at most {MAX_LORAS}, not {len(loras)}")
    for use in loras:
        if not isinstance(use, LoraUse):
            raise UsageError(f"loras must be adapters, not {use!r:.40}")
        _check_text("loras: model", use.model)
        _check_text("loras: digest", use.digest or "")
        if use.strength is not None:
            _check_number("loras: strength", use.strength, -MAX_STRENGTH, MAX_STRENGTH)


@dataclass(frozen=True, slots=True)
class Sides:
    """The sides that a model supports, in pixels: multiples of ``multiple`` up to the limits."""

    multiple: int
    max_width: int
    max_height: int

    def check(self, request: GenerateRequest) -> None:
        """Reject a request with other sides. Raises UsageError."""
        for name, side, longest in (
            ("width", request.width, self.max_width),
            ("height", request.height, self.max_height),
        ):
            if side < self.multiple or side % self.multiple:
                raise UsageError(f"{name} must be a multiple of {self.multiple} pixels, not {side}")
            if side > longest:
                raise UsageError(
                    f"{name} must be at most {longest} pixels with this model, not {side}"
                )


def check_request(
    request: GenerateRequest,
    sides: Sides,
    needs: Callable[[int, int], int],
    limit: int | None,
) -> None:
    """Reject a request that is out of bounds. Raises UsageError with the field and its bound.

    ``needs`` returns the bytes that a picture of a given width and height needs at least; ``limit``
    bounds them.
    """
    check_parameters(request)
    sides.check(request)
    if limit is not None:
        _check_arrays(request, sides.multiple, needs, limit)


def _check_arrays(
    request: GenerateRequest, multiple: int, needs: Callable[[int, int], int], limit: int
) -> None:
    """Reject a picture whose arrays would be too large. MLX raises no error: the process ends."""
    width, height = request.width, request.height
    if (needed := needs(width, height)) <= limit:
        return
    side = math.isqrt(width * height) // multiple * multiple
    while side and needs(side, side) > limit:
        side -= multiple
    example = f", such as {side}x{side}" if side else ""
    raise UsageError(
        f"width {width} and height {height} are too large for this machine: "
        f"at least {_gib(needed)} of memory required, {_gib(limit)} available",
        hint=f"use a smaller size{example}",
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_number(name: str, value: float, least: float, most: float) -> None:
    if type(value) not in (int, float) or not least <= value <= most:
        raise UsageError(f"{name} must be a number from {least} to {most}, not {value!r:.40}")


def _check_count(name: str, value: int, limit: int) -> None:
    if not _is_int(value) or not 1 <= value <= limit:
        raise UsageError(f"{name} must be a whole number from 1 to {limit}, not {value!r}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text, not {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} contains characters that are not valid Unicode") from None


def to_pixels(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Convert values from 0 to 1 to bytes: times 255 in float32, rounded half to even."""
    import numpy as np

    return (np.clip(values, 0, 1) * np.float32(255)).round().astype(np.uint8)


def downsample(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a picture at half its size; each pixel is the mean of four."""
    height, width, colours = pixels.shape
    quarters = pixels.reshape(height // 2, 2, width // 2, 2, colours)
    mean: npt.NDArray[np.uint8] = quarters.mean(axis=(1, 3)).round().astype(pixels.dtype)
    return mean
