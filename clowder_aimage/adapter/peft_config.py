"""The configuration of a peft adapter: rank and alpha of each layer.

It is ``adapter_config.json`` in the directory of the weights (peft, ``LoraConfig``), or the value
of ``lora_adapter_metadata`` in their header; diffusers prefixes its keys with the component.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
METADATA = "lora_adapter_metadata"
MAX_ALPHA = 1e30
"""The limit of ranks and alphas: their ratio must be finite in float32."""
KINDS = ("LORA", "LOHA", "LOKR")
_SYNTAX = re.compile(r"[\[\](){}*+?|$^\\]")
# Ways to begin the training that leave the base as it is, and those that change it. Source: peft,
# ``tuners/lora/layer.py`` and ``tuners/lokr/layer.py``
_INITIALIZATIONS = ("true", "false", "gaussian", "eva", "orthogonal", "mica", "lycoris")
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Variants of LoRA have settings of these forms. Known are those that tensors show, or that end with
# the training
_VARIANT = re.compile(r"use_.*|.*_config|layer_replication|alora_invocation_tokens")
_KNOWN_VARIANTS = frozenset(
    "use_dora use_rslora use_effective_conv2d runtime_config megatron_config eva_config "
    "corda_config loftq_config lora_ga_config velora_config".split()
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Values by the ends of modules' names; the first matching end has precedence."""

    ends: Mapping[str, tuple[int, float]]
    anchored: Mapping[str, tuple[int, float]]

    @classmethod
    def parse(cls, value: object, label: str) -> Pattern:
        """Parse a ``rank_pattern`` or ``alpha_pattern``.

        The keys of peft are regular expressions. Here a dot is a dot, and ``^`` at the start stands
        for the start of the name; other syntax is rejected. Raises FormatError.
        """
        # The regular expressions of a file from a stranger can take exponential time.
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise FormatError(f"{label} is not an object")
        ends: dict[str, tuple[int, float]] = {}
        anchored: dict[str, tuple[int, float]] = {}
        # The first matching key has precedence in peft, hence the positions.
        for position, (key, number) in enumerate(value.items()):
            plain = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
            if _SYNTAX.search(plain):
                raise FormatError(
                    f"{label} has a regular expression, which is not read: {key!r:.200}",
                    hint="write the names of the modules instead",
                )
            values = anchored if key.startswith("^") else ends
            values.setdefault(plain, (position, _parse_number(number, label)))
        return cls(ends, anchored)

    def find(self, names: Iterable[str]) -> float | None:
        """Return the value for a module with one of these names."""
        matches = []
        for name in names:
            matches += [self.anchored[name]] if name in self.anchored else []
            while True:
                matches += [self.ends[name]] if name in self.ends else []
                _, dot, name = name.partition(".")
                if not dot:
                    break
        return min(matches)[1] if matches else None


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings that scale an adapter's matrices."""

    kind: str
    rank: int | None
    alpha: float | None
    ranks: Pattern
    alphas: Pattern
    is_rslora: bool
    is_dora: bool
    has_biases: bool
    saved: tuple[str, ...]
    base: str | None

    @classmethod
    def parse(cls, value: Mapping[str, Any], label: str) -> PeftConfig:
        """Parse a configuration; ``label`` names it in messages.

        Raises:
            FormatError: It is not valid, or of an unsupported kind.
        """
        # fan_in_fan_out is ignored: peft applies it to transposed weights, not to the adapter.
        kind = value.get("peft_type") or "LORA"
        if kind not in KINDS:
            raise FormatError(
                f"{label}: unsupported adapter type {kind!r:.40}",
                hint="LoRA, LoHa, LoKr and DoRA can be read",
            )
        for key, setting in value.items():
            if setting and key not in _KNOWN_VARIANTS and _VARIANT.fullmatch(key):
                raise FormatError(f"{label} sets {key[:80]}, which is not supported")
        for key in ("init_lora_weights", "init_weights"):
            _check_initialization(value.get(key), label)
        saved = value.get("modules_to_save") or ()
        if not isinstance(saved, list | tuple) or not all(
            isinstance(module, str) for module in saved
        ):
            raise FormatError(f"{label}: modules_to_save is not a list of names")
        base = value.get("base_model_name_or_path")
        return cls(
            kind,
            _parse_rank(value.get("r"), f"r of {label}"),
            _parse_optional(
                value.get("alpha" if kind != "LORA" else "lora_alpha"), f"alpha of {label}"
            ),
            Pattern.parse(value.get("rank_pattern"), f"rank_pattern of {label}"),
            Pattern.parse(value.get("alpha_pattern"), f"alpha_pattern of {label}"),
            _parse_flag(value.get("use_rslora"), f"use_rslora of {label}"),
            _parse_flag(value.get("use_dora"), f"use_dora of {label}"),
            value.get("bias", "none") != "none",
            tuple(saved),
            base.strip() or None if isinstance(base, str) else None,
        )

    def find_alpha(self, names: Iterable[str]) -> float | None:
        """Return alpha for a module with one of these names."""
        alpha = self.alphas.find(names)
        return self.alpha if alpha is None else alpha

    def find_rank(self, names: Iterable[str]) -> int | None:
        """Return the rank for a module with one of these names. Raises FormatError."""
        rank = self.ranks.find(names)
        return self.rank if rank is None else _parse_rank(rank, "a rank of rank_pattern")

    def is_saved(self, module: str) -> bool:
        """Return True if the adapter has complete tensors of a module (``modules_to_save``)."""
        return any(module == name or module.endswith(f".{name}") for name in self.saved)


def parse_metadata(metadata: Mapping[str, str], label: str) -> dict[str, PeftConfig]:
    """Return the configurations of diffusers in a header, by component. Raises FormatError."""
    text = metadata.get(METADATA)
    if not text:
        return {}
    value = read_json(text.encode(), f"{METADATA} of {label}")
    if not isinstance(value, dict):
        raise FormatError(f"{METADATA} of {label} is not a JSON object")
    configs: dict[str, dict[str, Any]] = {}
    for key, setting in value.items():
        component, _, name = key.rpartition(".")
        configs.setdefault(component, {})[name] = setting
    return {
        name: PeftConfig.parse(config, f"{METADATA} of {label}") for name, config in configs.items()
    }


def _check_initialization(value: object, label: str) -> None:
    """Refuse an adapter whose base is not the plain model. Raises FormatError."""
    name = str(value).lower()
    if value is None or name in _INITIALIZATIONS:
        return
    if name.startswith(_CHANGED_BASES):
        raise FormatError(
            f"{label}: an adapter of type {name:.40} changes the base when training starts",
            hint="convert it to a plain LoRA with peft's save_pretrained",
        )
    raise FormatError(
        f"{label}: the initialization {name:.40} is unknown, and may change the base",
        hint="convert it to a plain LoRA with peft's save_pretrained",
    )


def _parse_optional(value: object, label: str) -> float | None:
    return None if value is None else _parse_number(value, label)


def _parse_flag(value: object, label: str) -> bool:
    # What is not a boolean counts as true in peft, the text "false" too
    if value is not None and not isinstance(value, bool):
        raise FormatError(f"{label} is neither true nor false: {value!r:.40}")
    return bool(value)


def _parse_rank(value: object, label: str) -> int | None:
    if value is None:
        return None
    number = _parse_number(value, label)
    if number < 1 or not number.is_integer():
        raise FormatError(f"{label} is not a rank: {value!r:.40}")
    return int(number)


def _parse_number(value: object, label: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= MAX_ALPHA:
        return float(value)
    raise FormatError(f"{label} is not a number: {value!r:.40}")
