"""The request for pictures: each parameter with its type, its bounds and its words, once.

Interfaces name parameters without their group: ``request.guidance.scale`` is
``guidance`` on the command line, over HTTP and in the metadata of a picture.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from annotated_types import Ge, Gt, Le, MaxLen, MinLen, MultipleOf

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import FormatError
from clowder_aimage.generation.check import build_parameter_error, check_fields
from clowder_aimage.generation.parameter import Parameter, Words, list_parameters
from clowder_aimage.generation.seed import MAX_SEED
from clowder_aimage.oci import Digest

# Parameters that the config of a model may set
MODEL_DEFAULTS = ("width", "height", "steps", "guidance", "guidance_end", "cache_threshold")
# Parameters that a picture states and that do not determine it
ENHANCED = ("original_prompt", "enhancer")
# Parameters that neither determine a picture nor are stated by it
COUNTS = ("n", "previews")
MAX_PICTURES = 1024
MAX_LORAS = 16
MAX_REFERENCES = 4
MAX_SIDE = 8192  # pixels
# The most pixels of a picture
MAX_PIXELS = 4096 * 4096
# Larger reference pictures are scaled down to this number of pixels
REFERENCE_PIXELS = 1024 * 1024
# The name of a mask that is the transparency of the image
ALPHA = "alpha"
# The default for an image without a mask, as in diffusers
STRENGTH = 0.6
UPSCALE_STRENGTH = 0.2
# The default, as in diffusers
CONTROL_STRENGTH = 0.75
OF_MODEL = "the model's"

# Characters of a prompt
MAX_TEXT = 32_000
MAX_NAME = 1024  # characters
MAX_PATH = 4096  # characters
MAX_STEPS = 1000
# The limit of an adapter's strength, also of negative ones
MAX_STRENGTH = 100
Fit = Literal["crop", "pad", "stretch"]
_Pixels = Annotated[int, Ge(0), Le(4096)]
_Digest = str


@dataclass(frozen=True, slots=True)
class Sampling:
    """The size of the pictures, the steps, and the noise that they begin with."""

    width: Annotated[
        int, Ge(16), Le(MAX_SIDE), MultipleOf(16), Words("Width.", OF_MODEL, unit="pixels")
    ] = 1024
    height: Annotated[
        int, Ge(16), Le(MAX_SIDE), MultipleOf(16), Words("Height.", OF_MODEL, unit="pixels")
    ] = 1024
    steps: Annotated[
        int,
        Ge(1),
        Le(MAX_STEPS),
        Words("Denoising steps.", "the model's, or 8", synonyms=("num_inference_steps",)),
    ] = 8
    seed: Annotated[
        int,
        Ge(0),
        Le(MAX_SEED),
        Words("The same seed gives the same picture; each further one has the next.", "random"),
    ] = 0
    # Outside of these bounds there is only one level of noise
    shift: Annotated[
        float | None,
        Ge(0.001),
        Le(1000),
        Words("Shift of the noise schedule; if higher, more steps form the composition.", OF_MODEL),
    ] = None
    cache_threshold: Annotated[
        float,
        Ge(0),
        Le(10),
        Words(
            "Reuse an earlier step if the first block changes by less than this part; 0 for never."
        ),
    ] = 0.0

    @property
    def pixels(self) -> int:
        """Return the number of pixels of a picture."""
        return self.width * self.height

    def __post_init__(self) -> None:
        check_fields(self)
        check_area("width" if self.width >= self.height else "height", self.width, self.height)


@dataclass(frozen=True, slots=True)
class Guidance:
    """The guidance of the steps by the prompt.

    A scale of 0 disables it; w adds w times the difference between prompt and ``negative`` (None:
    the empty text), or w - 1 times (FLUX.2), as in the family's reference.
    """

    scale: Annotated[
        float,
        Ge(0),
        Le(1000),
        Words(
            "Guidance scale (CFG): how closely to follow the prompt; 0 is off.",
            "the model's, or 0",
            name="guidance",
            synonyms=("guidance_scale",),
        ),
    ] = 0.0
    end: Annotated[
        float,
        Ge(0),
        Le(1),
        Words("Part of the way, from noise to picture, that is guided.", name="guidance_end"),
    ] = 1.0
    normalization: Annotated[
        float,
        Ge(0),
        Le(1000),
        Words(
            "Limit of a guided step, as a multiple of the unguided one; 0 for no limit.",
            name="cfg_normalization",
        ),
    ] = 0.0
    negative: Annotated[
        str | None,
        MaxLen(MAX_TEXT),
        Words("Content to avoid; requires guidance above 0.", field="negative_prompt"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.negative == "":
            object.__setattr__(self, "negative", None)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The pictures that a picture begins with, by their digests in the store.

    White parts of the mask are painted, or with ALPHA the transparent parts of the image.
    """

    image: Annotated[_Digest | None, Words("The picture to begin with.", unit="digest")] = None
    mask: Annotated[
        _Digest | None, Words("The picture whose white parts are painted.", unit="digest")
    ] = None
    references: Annotated[
        tuple[_Digest, ...],
        MaxLen(MAX_REFERENCES),
        Words("Pictures that the model edits or combines.", unit="digest"),
    ] = ()
    strength: Annotated[
        float | None,
        Gt(0),
        Le(1),
        Words("Part of the steps that are done.", "0.6; 1 with a mask or expand; 0.2 with upscale"),
    ] = None
    fine: Annotated[bool, Words("Do all steps, from the noise level of strength.")] = False
    fit: Annotated[Fit, Words("Fit the picture to another size.")] = "crop"
    paste: Annotated[bool, Words("Keep the pixels that are not painted.")] = False
    feather: Annotated[
        int,
        Ge(0),
        Le(256),
        Words("Mix pasted and painted pixels over this width.", unit="pixels", usual=(0, 64)),
    ] = 0
    crop: Annotated[bool, Words("Generate only the surroundings of the mask.")] = False
    expand: Annotated[
        tuple[_Pixels, _Pixels, _Pixels, _Pixels] | None,
        Words("Paint these pixels around the picture.", unit="left,top,right,bottom"),
    ] = None
    upscale: Annotated[
        float | None,
        Ge(1),
        Le(4),
        Words("Enlarge the picture, then improve it in tiles.", unit="factor"),
    ] = None

    @property
    def images(self) -> tuple[str, ...]:
        """Return the images in their order, in either role."""
        return self.references if self.image is None else (self.image, *self.references)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.images:
            _require(self, OF_IMAGES, "an image")
        if self.image is not None:
            _check_digest("image", self.image)
        if self.mask is None:
            _require(self, OF_MASKS, "a mask")
        elif self.mask != ALPHA:
            _check_digest("mask", self.mask)
        for reference in self.references:
            _check_digest("references", reference)
        if self.feather and not (self.paste or self.crop):
            raise build_parameter_error(
                "feather", "requires paste or crop: it is the width of their seam"
            )
        self._check_enlarged()
        if self.expand is not None and not any(self.expand):
            object.__setattr__(self, "expand", None)
        if self.image is not None and self.strength is None:
            default = UPSCALE_STRENGTH if self.upscale else STRENGTH
            is_painted = self.mask is not None or self.expand is not None
            object.__setattr__(self, "strength", 1.0 if is_painted else default)

    def _check_enlarged(self) -> None:
        if self.upscale is not None and self.expand is not None:
            raise build_parameter_error("upscale", "cannot be combined with expand")
        for name in ("upscale", "expand"):
            if self.mask is not None and getattr(self, name) is not None:
                raise build_parameter_error(name, "cannot be combined with a mask")


# Parameters that need an image, or a mask
OF_IMAGES = ("mask", "strength", "fine", "paste", "feather", "crop", "expand", "upscale")
OF_MASKS = ("paste", "feather", "crop")


@dataclass(frozen=True, slots=True)
class Control:
    """A control network, and the picture that guides it, by its digest in the store."""

    image: Annotated[
        _Digest | None,
        Words(
            "A picture of edges, depth or a pose that guides a ControlNet.",
            name="control",
            unit="digest",
        ),
    ] = None
    network: Annotated[
        str | None,
        MinLen(1),
        MaxLen(MAX_NAME),
        Words("The ControlNet that control guides.", "the model's own", name="controlnet"),
    ] = None
    strength: Annotated[
        float | None,
        Ge(0),
        Le(10),
        Words("How much control guides.", "0.75", name="control_strength", usual=(0, 2)),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.image is None:
            _require(self, ("network", "strength"), "a control picture")
            return
        _check_digest("control", self.image)
        if self.strength is None:
            object.__setattr__(self, "strength", CONTROL_STRENGTH)


@dataclass(frozen=True, slots=True)
class LoraUse:
    """An adapter of a request: ``model`` is its reference, its file or its name in a directory.

    strength: the factor of its change; None for the one that it recommends, else 1. digest: of the
    manifest, or of the file; required once the adapter is resolved.
    """

    model: Annotated[
        str,
        MinLen(1),
        MaxLen(MAX_PATH),
        Words("The name of an adapter.", name="loras: model", field="model"),
    ]
    strength: Annotated[
        float | None,
        Ge(-MAX_STRENGTH),
        Le(MAX_STRENGTH),
        Words(
            "The factor of its change.",
            "its own",
            name="loras: strength",
            field="strength",
            usual=(0, 2),
        ),
    ] = None
    digest: Annotated[
        str | None,
        MaxLen(200),
        Words("The digest of its manifest or file.", name="loras: digest", field="digest"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the use that an object in JSON states. Raises UsageError."""
        names = {lora_field.name for lora_field in fields(cls)}
        if not {"model"} <= values.keys() <= names:
            raise build_parameter_error("loras", f"must have the fields {', '.join(sorted(names))}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters whose changes are added to the weights."""

    loras: Annotated[
        tuple[LoraUse, ...], MaxLen(MAX_LORAS), Words("Adapters (LoRA), and their strengths.")
    ] = ()

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Output:
    """The number of pictures, and of the previews of each."""

    n: Annotated[int, Ge(1), Le(MAX_PICTURES), Words("Number of pictures, with rising seeds.")] = 1
    previews: Annotated[
        int, Ge(0), Le(3), Words("Number of previews of each picture.", field="partial_images")
    ] = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A valid request for pictures, or the draft of one.

    original_prompt, enhancer: the prompt that a language model has enhanced, and its name; they
    change nothing. stated: the names of the parameters that a draft states; the model has the
    defaults of others (``for_model``). None: it is complete.
    """

    prompt: Annotated[str, MaxLen(MAX_TEXT), Words("What the pictures show.")]
    sampling: Sampling = field(default_factory=Sampling)
    guidance: Guidance = field(default_factory=Guidance)
    input: ImageInput = field(default_factory=ImageInput)
    control: Control = field(default_factory=Control)
    adapters: Adapters = field(default_factory=Adapters)
    output: Output = field(default_factory=Output)
    original_prompt: Annotated[
        str | None, MaxLen(MAX_TEXT), Words("The prompt that an earlier request has enhanced.")
    ] = None
    enhancer: Annotated[
        str | None,
        MinLen(1),
        MaxLen(MAX_NAME),
        Words("The language model that wrote the prompt; requires original_prompt."),
    ] = None
    stated: frozenset[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        is_unguided = not self.guidance.scale and self.is_stated("guidance")
        if self.guidance.negative is not None and is_unguided:
            raise build_parameter_error(
                "negative", "requires guidance above 0", "a guidance of 4 is common"
            )
        if self.sampling.seed + self.output.n - 1 > MAX_SEED:
            most = MAX_SEED - self.output.n + 1
            raise build_parameter_error(
                "seed", f"must be at most {most} for {self.output.n} pictures"
            )
        if self.input.strength is not None and not self.input.fine:
            compute_first_step(self.sampling.steps, self.input.strength)
        if self.enhancer is not None and self.original_prompt is None:
            raise build_parameter_error("enhancer", "requires original_prompt")

    @classmethod
    def of(cls, prompt: str = "", /, **values: Any) -> Self:
        """Return a request with values by their names in interfaces; None is the default.

        Raises UsageError for a wrong value, or an unknown name.
        """
        return cls(prompt).change(**values)

    @classmethod
    def draft(cls, prompt: str = "", /, **values: Any) -> Self:
        """Return a draft with the values that are not None.

        Raises UsageError for values that are wrong with every model.
        """
        return cls(prompt, stated=frozenset()).change(**values)

    def apply_defaults(self, aimage: AImage) -> Self:
        """Return the complete request of a draft: an AImage has the defaults. Raises UsageError."""
        stated = aimage.properties.get("defaults")
        defaults = stated if isinstance(stated, dict) else {}
        names = [name for name in MODEL_DEFAULTS if name in defaults and not self.is_stated(name)]
        return self._with({name: defaults[name] for name in names}, None)

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """Return the request for a picture with this metadata."""
        names = map_parameter_locations().keys() - {*COUNTS, "prompt"}
        values = {name: metadata[name] for name in names & metadata.keys()}
        if metadata.get("prompt") is None:
            raise build_parameter_error("prompt", "must be text")
        return cls.of(metadata["prompt"], **values)

    def collect_values(self) -> dict[str, Any]:
        """Return all parameters by their names in interfaces."""
        return {
            name: location.get_value(self) for name, location in map_parameter_locations().items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the values as JSON has them: the arguments of ``of``."""
        return {**self.collect_values(), "loras": [asdict(use) for use in self.adapters.loras]}

    def is_stated(self, name: str) -> bool:
        """Return True if a parameter is stated; a complete request states all."""
        return self.stated is None or name in self.stated

    @property
    def has_size(self) -> bool:
        """Return True if a side is stated."""
        return self.is_stated("width") or self.is_stated("height")

    def collect_stated_values(self) -> dict[str, Any]:
        """Return the parameters that are stated, by their names in interfaces."""
        return {
            name: location.get_value(self)
            for name, location in map_parameter_locations().items()
            if self.is_stated(name)
        }

    def change(self, **values: Any) -> Self:
        """Return a request with other values of some parameters; None is the default."""
        if self.stated is None:
            return self._with(values, None)
        stated = {name for name, value in values.items() if value is not None}
        return self._with(values, (self.stated - values.keys()) | stated)

    def _with(self, values: Mapping[str, Any], stated: frozenset[str] | None) -> Self:
        groups: dict[str, dict[str, Any]] = {"": {"stated": stated}}
        for name, value in values.items():
            if (location := map_parameter_locations().get(name)) is None:
                raise build_parameter_error(name, "is not a parameter of pictures")
            if name == "loras" and isinstance(value, list | tuple):
                value = tuple(LoraUse.of(use) if isinstance(use, dict) else use for use in value)
            parameter = location.parameter
            value = parameter.default if value is None else value
            groups.setdefault(location.group, {})[parameter.attribute] = value
        direct = groups.pop("")
        parts = {name: replace(getattr(self, name), **changes) for name, changes in groups.items()}
        return replace(self, **parts, **direct)


_GROUPS: Mapping[str, type] = {
    "sampling": Sampling,
    "guidance": Guidance,
    "input": ImageInput,
    "control": Control,
    "adapters": Adapters,
    "output": Output,
}


class ParameterLocation(NamedTuple):
    """The location of a parameter in a request: the name of its group, or ""."""

    group: str
    parameter: Parameter

    def get_value(self, request: GenerateRequest) -> Any:
        """Return the value of the parameter."""
        owner = getattr(request, self.group) if self.group else request
        return getattr(owner, self.parameter.attribute)


@cache
def map_parameter_locations() -> Mapping[str, ParameterLocation]:
    """Return all parameters of pictures by their names in interfaces."""
    groups = {"": GenerateRequest, **_GROUPS}
    locations = [
        ParameterLocation(group, parameter)
        for group, owner in groups.items()
        for parameter in list_parameters(owner)
    ]
    return {location.parameter.name: location for location in locations}


def check_area(name: str, width: int, height: int) -> None:
    """Raise UsageError, with the parameter ``name``, if a picture is too large."""
    if width * height > MAX_PIXELS:
        size = f"{width}x{height} has {width * height}"
        raise build_parameter_error(name, f"exceeds the maximum of {MAX_PIXELS} pixels: {size}")


def compute_first_step(steps: int, strength: float) -> int:
    """Return the step, from 0, at which a picture begins. Raises UsageError: none is left."""
    index = int(max(steps - min(steps * strength, steps), 0))
    if index >= steps:
        hint = f"use a strength of at least {1 / steps:.2g}, or more steps"
        raise build_parameter_error(
            "strength", f"{strength:g} leaves none of {steps} steps to do", hint
        )
    return index


def _require(value: Any, names: Collection[str], needed: str) -> None:
    """Reject parameters that are stated although they need another. Raises UsageError."""
    for parameter in list_parameters(value.__class__):
        if (
            parameter.attribute in names
            and getattr(value, parameter.attribute) != parameter.default
        ):
            raise build_parameter_error(parameter.name, f"requires {needed}")


def _check_digest(name: str, value: str) -> None:
    try:
        Digest.parse(value)
    except FormatError:
        raise build_parameter_error(name, "must be the digest of a picture") from None
