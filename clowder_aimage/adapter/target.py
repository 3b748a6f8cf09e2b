"""Find the layer of a base model that an adapter names, in any naming convention.

The table is derived from the base's tensors, since flattened names cannot be split at underscores:
each layer is listed under its names in diffusers and in the original code (that of ComfyUI too),
with dots and flattened. Prefixes of the tools are removed one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from clowder_aimage.family.image_family import find_original_module, has_exchanged_halves

_NETWORK = (
    r"base_model\.model\.|module[._]|model\.diffusion_model\.|diffusion_model\.|(?:transformer|unet)[._]|"
    r"lora_(?:unet|transformer)_|lycoris_"
)
_PREFIX = re.compile(
    rf"(?:{_NETWORK})|(?P<text>lora_te(?P<number>[0-9]?)_|text_encoder(?P<second>_[0-9])?[._]|"
    r"text_encoders\.[^.]+\.)"
)
# Prefixes that say nothing of the component
_NEUTRAL = ("base_model.", "module")
_NETWORK_PREFIX = re.compile(_NETWORK)
# The most prefixes of a name, such as base_model.model.transformer.
_MAX_PREFIXES = 6
# diffusers writes to_out.0, other tools to_out
_INDEXED = re.compile(r"(to_out|adaLN_modulation)\.[0-9]+$")
# Layers for query, key and value, and the names of the stacked layer.
_STACKS = (("to_{}", ("qkv", "to_qkv")), ("add_{}_proj", ("to_added_qkv",)))
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class TargetRows:
    """A tensor of the base, and the rows [start, stop) of a weight delta that are added to it."""

    tensor: str
    start: int
    stop: int

    @property
    def bias(self) -> str | None:
        """Return the name of the layer's bias, which may be missing; None if it cannot have one."""
        has_bias = self.tensor.endswith(_WEIGHT)
        return f"{self.tensor.removesuffix(_WEIGHT)}.bias" if has_bias else None


@dataclass(frozen=True, slots=True)
class LayerTarget:
    """The tensors that a layer's weight delta is added to, with the ``shape`` of all their rows.

    With ``is_exchanged``, the halves of the delta's rows are in the other order than the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[TargetRows, ...]
    is_exchanged: bool = False

    @property
    def component(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def module(self) -> str:
        """Return the name of the layer in its component."""
        return self.name.rpartition("/")[2]


class TargetTable:
    """The layers of a base with tensors ``shapes``: ``transformer/layers.0.attention.to_q.weight``.

    Names without a component belong to the component "".
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._dotted: dict[str, dict[str, LayerTarget]] = {}
        self._flat: dict[str, dict[str, LayerTarget | None]] = {}
        targets = [_build_target(name, shape) for name, shape in shapes.items() if shape]
        # Biases are changed with their layer.
        targets = [target for target in targets if not target.name.endswith(".bias")]
        for target in [*targets, *_stack_targets(targets)]:
            dotted = self._dotted.setdefault(target.component, {})
            flat = self._flat.setdefault(target.component, {})
            dotted[target.module] = target
            original = (
                find_original_module(target.module) if has_exchanged_halves(target.module) else None
            )
            for name in list_spellings(target.module):
                is_original = original is not None and name.endswith(original)
                spelled = replace(target, is_exchanged=True) if is_original else target
                dotted.setdefault(name, spelled)
                key = _flatten(name)
                # A flattened name of two layers is ambiguous: it stands for neither.
                flat[key] = spelled if flat.get(key, spelled) == spelled else None

    def find(self, stem: str) -> LayerTarget | None:
        """Return the layer with a name in any dialect, or None."""
        components: Iterable[str] = sorted(self._dotted, key=_is_text)
        has_text = False
        for _ in range(_MAX_PREFIXES):
            if (target := self._look_up(stem, components)) is not None:
                return target
            match = _PREFIX.match(stem)
            if match is None:
                return None
            stem = stem[match.end() :]
            if match["text"]:
                # lora_te_, lora_te1_ and text_encoder are the first encoder, lora_te2_ and
                # text_encoder_2 the second.
                number = match["number"] or (match["second"] or "").removeprefix("_")
                is_first = number in ("", "1")
                components, has_text = (
                    ["text_encoder" if is_first else f"text_encoder_{number}"],
                    True,
                )
            elif not has_text and not match[0].startswith(_NEUTRAL):
                components = [name for name in components if not _is_text(name)]
        return None

    def _look_up(self, stem: str, components: Iterable[str]) -> LayerTarget | None:
        for component in components:
            if (target := self._dotted.get(component, {}).get(stem)) is not None:
                return target
        for component in components:
            if (flat_target := self._flat.get(component, {}).get(_flatten(stem))) is not None:
                return flat_target
        return None


def list_spellings(module: str) -> set[str]:
    """Return the names, with dots, of diffusers' layer ``module`` in all dialects."""
    names = {module, find_original_module(module)}
    names |= {_INDEXED.sub(r"\1", name) for name in names}
    return names | {f"model.{name}" for name in names} | {n.removeprefix("model.") for n in names}


def strip_tool_prefixes(stem: str) -> str:
    """Return a stem without the prefixes of tools."""
    return _strip_prefixes(_PREFIX, stem)


def strip_network_prefixes(stem: str) -> str:
    """Return a stem without the prefixes for the network, but with that of a text encoder."""
    return _strip_prefixes(_NETWORK_PREFIX, stem)


def _strip_prefixes(prefix: re.Pattern[str], stem: str) -> str:
    for _ in range(_MAX_PREFIXES):
        match = prefix.match(stem)
        if match is None:
            break
        stem = stem[match.end() :]
    return stem


def _build_target(tensor: str, shape: tuple[int, ...]) -> LayerTarget:
    return LayerTarget(tensor.removesuffix(_WEIGHT), shape, (TargetRows(tensor, 0, shape[0]),))


def _stack_targets(targets: Iterable[LayerTarget]) -> Iterator[LayerTarget]:
    """Yield the stacked layers of query, key and value in other dialects."""
    targets_by_name = {target.name: target for target in targets}
    for name, first in targets_by_name.items():
        for pattern, words in _STACKS:
            stem = name.removesuffix(pattern.format("q"))
            thirds = [targets_by_name.get(stem + pattern.format(letter)) for letter in "qkv"]
            if stem != name and (rows := _stack_rows(thirds, first.shape[1:])):
                shape = (rows[-1].stop, *first.shape[1:])
                yield from (LayerTarget(stem + word, shape, rows) for word in words)


def _stack_rows(
    thirds: Iterable[LayerTarget | None], columns: tuple[int, ...]
) -> tuple[TargetRows, ...]:
    """Return the rows of each layer in the stacked layer; empty if they cannot be stacked."""
    rows: list[TargetRows] = []
    start = 0
    for third in thirds:
        if third is None or len(third.shape) != 2 or third.shape[1:] != columns:
            return ()
        rows.append(TargetRows(third.rows[0].tensor, start, start + third.shape[0]))
        start += third.shape[0]
    return tuple(rows)


def _flatten(name: str) -> str:
    return name.replace(".", "_")


def _is_text(component: str) -> bool:
    return component.startswith("text_encoder")
