"""Requested dtypes and quantizations of weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clowder_aimage.errors import FormatError, UsageError, build_extra_error
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.quantization import ALIASES, FP8, QUANT_TYPES, ROW_SCALED

AUTO = "auto"
DTYPES: Mapping[str, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
# mxfp4 is only read.
_CHOSEN = {name: Quantization.parse(name) for name in (*QUANT_TYPES, *ALIASES) if name != "mxfp4"}
_CHOSEN[FP8] = ROW_SCALED
CHOICES = tuple(_CHOSEN)
GROUPED = tuple(name for name, chosen in _CHOSEN.items() if chosen.type.has_bias)
# The same for all of them
GROUP_SIZES = QUANT_TYPES["int8"].group_sizes


def build_quantize_pattern() -> str:
    """Return the regular expression of the types of components, as ``Recipe.parse`` takes them."""
    kind = f" *({_build_names_pattern(CHOICES)}) *"
    bare, other = (
        f"( *{BARE} *=)?{kind}",
        *(f" *{name} *={kind}" for name in QUANTIZABLE if name != BARE),
    )
    return f"({bare}(,{other})?|{other}(,{bare})?)"


def build_grouped_pattern() -> str:
    """Return the regular expression that finds a type whose group size may be chosen."""
    return f"(^|[=, ])({_build_names_pattern(GROUPED)})($|[, ])"


def _build_names_pattern(names: Iterable[str]) -> str:
    return "|".join(re.sub("[a-z]", lambda a: f"[{a[0]}{a[0].upper()}]", name) for name in names)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The dtype of weights and the quantization of each component.

    ``dtype`` is a key of DTYPES, AUTO (F32 with only BF16 values becomes BF16) or None (unchanged).
    """

    dtype: str | None = None
    quantize: Mapping[str, Quantization] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, dtype: str | None = None, quantize: str | None = None, group_size: int | None = None
    ) -> Recipe:
        """Parse ``int8`` or ``transformer=int4,text_encoder=int8``.

        A type without a component applies to the transformer.

        Raises:
            UsageError: An option is unknown, or conflicts with another.
        """
        if dtype is not None and dtype not in (*DTYPES, AUTO):
            raise UsageError(f"unknown dtype {dtype!r:.40}: use {', '.join(DTYPES)} or {AUTO}")
        if quantize is None:
            if group_size is not None:
                raise UsageError("a group size requires a quantization")
            return cls(dtype)
        types = _parse_types(quantize)
        chosen = {name: _parse_quantization(kind, group_size) for name, kind in types.items()}
        if group_size is not None and not any(
            quantization.type.has_bias for quantization in chosen.values()
        ):
            raise UsageError(
                "a group size requires int4 or int8: the other types have a fixed group size"
            )
        return cls(dtype, chosen)

    @property
    def changes(self) -> bool:
        """Return True if the recipe can change weights."""
        return self.dtype is not None or bool(self.quantize)

    @property
    def precision(self) -> str | None:
        """Return the type of the transformer, else that of another component or of all floats."""
        types = [self.quantize.get(BARE), *self.quantize.values()]
        return next((quantization.type.name for quantization in types if quantization), self.dtype)

    def check_tools(self) -> None:
        """Check that the required packages are installed. Raises UsageError."""
        by_mlx = any(not quantization.is_by_row for quantization in self.quantize.values())
        needed = [*(["numpy"] if self.changes else []), *(["mlx"] if by_mlx else [])]
        for name in needed:
            if importlib.util.find_spec(name) is None:
                raise build_extra_error("changing weights", "mlx")

    def of(self, component: str) -> Quantization | None:
        """Return the quantization of a component, or None."""
        return self.quantize.get(component or BARE)

    def check_components(self, names: Iterable[str]) -> None:
        """Check that ``names`` includes all components to quantize. Raises UsageError."""
        present = {name or BARE for name in names}
        if self.changes and not present:
            raise UsageError(
                "only tensors can be cast or quantized, but the model is packed as whole files"
            )
        for name in self.quantize:
            if name not in present:
                raise UsageError(f"the model has no {name} with weights to quantize")


def _parse_types(text: str) -> dict[str, str]:
    types: dict[str, str] = {}
    for item in text.split(","):
        component, equals, kind = item.partition("=")
        component, kind = (component.strip(), kind.strip()) if equals else (BARE, item.strip())
        if component == "vae":
            raise UsageError("the vae cannot be quantized: its errors would be visible in pictures")
        if component not in QUANTIZABLE:
            raise UsageError(
                f"{component!r:.60} cannot be quantized", hint=f"use {' or '.join(QUANTIZABLE)}"
            )
        if kind.lower() not in CHOICES:
            raise UsageError(f"cannot quantize to {kind!r:.40}", hint=f"use {', '.join(CHOICES)}")
        if component in types:
            raise UsageError(f"duplicate quantization for the {component}")
        types[component] = kind
    return types


def _parse_quantization(kind: str, group_size: int | None) -> Quantization:
    chosen = _CHOSEN[kind.lower()]
    if not chosen.type.has_bias:
        return chosen
    try:
        return Quantization.parse(kind, group_size)
    except FormatError as error:
        raise UsageError(error.message) from None


# Not a VAE: its errors would be visible in pictures.
QUANTIZABLE = ("text_encoder", "transformer")
# The default component, also for a model of a single component.
BARE = "transformer"
_GROUP = re.compile(
    r"((?:.*\.)?layers\.\d+\.(?:mlp\.(?:experts|shared_experts)|block_sparse_moe\.experts))\..+"
)


def find_expert_group(name: str) -> str | None:
    """Return the prefix of a tensor's group of experts, or None.

    Experts of a layer share a blob (ollama, "Tensor Blob Format": packed blobs).
    """
    match = _GROUP.fullmatch(name)
    return match[1] if match else None
