"""The configuration of a peft adapter: rank and alpha of each layer.

It is ``adapter_config.json`` beside the weights (peft, ``LoraConfig``), or the value of
``lora_adapter_metadata`` in their header, which diffusers writes with the component before each
key.
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
"""Of ranks and alphas: then their ratio is finite in float32."""
KINDS = ("LORA", "LOHA", "LOKR")
_SYNTAX = re.compile(r"[\[\](){}*+?|$^\\]")
# settings that change what the tensors mean
_OTHERS = ("layer_replication", "alora_invocation_tokens", "use_qalora", "arrow_config")
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Values by the ends of modules' names; the first end that matches gives the value."""

    ends: Mapping[str, tuple[int, float]]
    anchored: Mapping[str, tuple[int, float]]

    @classmethod
    def parse(cls, value: object, what: str) -> Pattern:
        """Parse a ``rank_pattern`` or ``alpha_pattern``.

        peft takes the keys as regular expressions. Here a dot is a dot, and ``^`` at the start
        stands for the start of the name; other syntax is refused. Raises FormatError.
        """
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise FormatError(f"{what} is not an object")
        ends: dict[str, tuple[int, float]] = {}
        anchored: dict[str, tuple[int, float]] = {}
        for position, (key, number) in enumerate(value.items()):
            plain = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
            if _SYNTAX.search(plain):
                raise FormatError(
                    f"{what} has a regular expression, which is not read: {key!r:.200}",
                    hint="write the names of the modules instead",
                )
            found = anchored if key.startswith("^") else ends
            found.setdefault(plain, (position, _number(number, what)))
        return cls(ends, anchored)

    def find(self, names: Iterable[str]) -> float | None:
        """Return the value for a module with one of these names."""
        found = []
        for name in names:
            found += [self.anchored[name]] if name in self.anchored else []
            while True:
                found += [self.ends[name]] if name in self.ends else []
                _, dot, name = name.partition(".")
                if not dot:
                    break
        return min(found)[1] if found else None


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
    def parse(cls, value: Mapping[str, Any], what: str) -> PeftConfig:
        """Parse a configuration; ``what`` names it in messages.

        ``fan_in_fan_out`` has no effect: peft applies it to layers with transposed weights only,
        whose adapters are not transposed.

        Raises:
            FormatError: It is not valid, or of a kind that cannot be read.
        """
        kind = value.get("peft_type") or "LORA"
        if kind not in KINDS:
            raise FormatError(
                f"{what}: unsupported adapter type {kind!r:.40}",
                hint="LoRA, LoHa, LoKr and DoRA can be read",
            )
        if (odd := next((key for key in _OTHERS if value.get(key)), None)) is not None:
            raise FormatError(f"{what} sets {odd}, which is not supported")
        made = value.get("init_lora_weights")
        if isinstance(made, str) and made.lower().startswith(_CHANGED_BASES):
            raise FormatError(
                f"{what}: an adapter of type {made:.40} changes the base when training starts",
                hint="convert it to a plain LoRA with peft's save_pretrained",
            )
        saved = value.get("modules_to_save") or ()
        if not isinstance(saved, list | tuple) or not all(isinstance(one, str) for one in saved):
            raise FormatError(f"{what}: modules_to_save is not a list of names")
        base = value.get("base_model_name_or_path")
        return cls(
            kind,
            _rank(value.get("r"), f"r of {what}"),
            _optional(value.get("alpha" if kind != "LORA" else "lora_alpha"), f"alpha of {what}"),
            Pattern.parse(value.get("rank_pattern"), f"rank_pattern of {what}"),
            Pattern.parse(value.get("alpha_pattern"), f"alpha_pattern of {what}"),
            value.get("use_rslora") is True,
            value.get("use_dora") is True,
            value.get("bias", "none") != "none",
            tuple(saved),
            base.strip() or None if isinstance(base, str) else None,
        )

    def alpha_of(self, names: Iterable[str]) -> float | None:
        """Return alpha for a module with one of these names."""
        found = self.alphas.find(names)
        return self.alpha if found is None else found

    def rank_of(self, names: Iterable[str]) -> int | None:
        """Return the rank for a module with one of these names. Raises FormatError."""
        found = self.ranks.find(names)
        return self.rank if found is None else _rank(found, "a rank of rank_pattern")

    def saves(self, module: str) -> bool:
        """Return whether the adapter has the whole tensors of a module (``modules_to_save``)."""
        return any(module == one or module.endswith(f".{one}") for one in self.saved)


def parse_metadata(metadata: Mapping[str, str], what: str) -> dict[str, PeftConfig]:
    """Return the configurations of diffusers in a header, by component. Raises FormatError."""
    text = metadata.get(METADATA)
    if not text:
        return {}
    value = read_json(text.encode(), f"{METADATA} of {what}")
    if not isinstance(value, dict):
        raise FormatError(f"{METADATA} of {what} is not a JSON object")
    found: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        component, _, name = key.rpartition(".")
        found.setdefault(component, {})[name] = item
    return {name: PeftConfig.parse(one, f"{METADATA} of {what}") for name, one in found.items()}


def _optional(value: object, what: str) -> float | None:
    return None if value is None else _number(value, what)


def _rank(value: object, what: str) -> int | None:
    if value is None:
        return None
    number = _number(value, what)
    if number < 1 or not number.is_integer():
        raise FormatError(f"{what} is not a rank: {value!r:.40}")
    return int(number)


def _number(value: object, what: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= MAX_ALPHA:
        return float(value)
    raise FormatError(f"{what} is not a number: {value!r:.40}")
