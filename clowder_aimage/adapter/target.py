"""Layers of a base model by all the names that adapters have for them.

The table is derived from the base's own tensors, so no underscore has to be guessed apart: each
layer is listed under its names in the dialects of diffusers and of the original code (which is
ComfyUI's), with dots and flattened to underscores. Prefixes of the tools are removed one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from clowder_aimage.family.image_family import exchanges_halves, original_module

_NETWORK = (
    r"base_model\.model\.|model\.diffusion_model\.|diffusion_model\.|(?:transformer|unet)[._]|"
    r"lora_(?:unet|transformer)_|lycoris_"
)
_PREFIX = re.compile(
    rf"(?:{_NETWORK})|(?P<text>lora_te(?P<number>[0-9]?)_|text_encoder(?P<second>_[0-9])?[._]|"
    r"text_encoders\.[^.]+\.)"
)
_FRONT = re.compile(_NETWORK)
_DEPTH = 6  # prefixes of one name
_BARE = re.compile(r"(to_out|adaLN_modulation)\.[0-9]+$")
# layers for query, key and value, and their names as one
_STACKS = (("to_{}", ("qkv", "to_qkv")), ("add_{}_proj", ("to_added_qkv",)))
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class TargetRows:
    """A tensor of the base, and the rows of a change that belong to it."""

    tensor: str
    start: int
    stop: int

    @property
    def bias(self) -> str | None:
        """The name of the layer's bias, which the base need not have; None for a lone tensor."""
        has_bias = self.tensor.endswith(_WEIGHT)
        return f"{self.tensor.removesuffix(_WEIGHT)}.bias" if has_bias else None


@dataclass(frozen=True, slots=True)
class LayerTarget:
    """The tensors that a layer's change is for, of the ``shape`` of all their rows.

    With ``is_exchanged``, the second half of the change's rows is that of the tensor's first rows.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TargetRows, ...]
    is_exchanged: bool = False

    @property
    def component(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def module(self) -> str:
        """The name of the layer in its component."""
        return self.name.rpartition("/")[2]


class TargetTable:
    """The layers of a base with tensors ``shapes``: ``transformer/layers.0.attention.to_q.weight``.

    Names without a component belong to the component "".
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._dotted: dict[str, dict[str, LayerTarget]] = {}
        self._flat: dict[str, dict[str, LayerTarget | None]] = {}
        targets = [_target(name, shape) for name, shape in shapes.items() if shape]
        targets = [one for one in targets if not one.name.endswith(".bias")]
        for target in [*targets, *_fused(targets)]:
            dotted = self._dotted.setdefault(target.component, {})
            flat = self._flat.setdefault(target.component, {})
            dotted[target.module] = target
            other = original_module(target.module) if exchanges_halves(target.module) else None
            for name in spellings(target.module):
                is_other = other is not None and name.endswith(other)
                one = replace(target, is_exchanged=True) if is_other else target
                dotted.setdefault(name, one)
                key = _flatten(name)
                # a name that two layers have when it is flattened is the name of neither
                flat[key] = one if flat.get(key, one) == one else None

    def find(self, stem: str) -> LayerTarget | None:
        """Return the layer that an adapter means by a name, or None."""
        components: Iterable[str] = sorted(self._dotted, key=_is_text)
        has_text = False
        for _ in range(_DEPTH):
            if (found := self._look_up(stem, components)) is not None:
                return found
            match = _PREFIX.match(stem)
            if match is None:
                return None
            stem = stem[match.end() :]
            if match["text"]:
                number = match["number"] or (match["second"] or "").removeprefix("_")
                is_first = number in ("", "1")
                components, has_text = (
                    ["text_encoder" if is_first else f"text_encoder_{number}"],
                    True,
                )
            elif not has_text and not match[0].startswith("base_model."):
                components = [name for name in components if not _is_text(name)]
        return None

    def _look_up(self, stem: str, components: Iterable[str]) -> LayerTarget | None:
        for component in components:
            if (found := self._dotted.get(component, {}).get(stem)) is not None:
                return found
        for component in components:
            if (hit := self._flat.get(component, {}).get(_flatten(stem))) is not None:
                return hit
        return None


def spellings(module: str) -> set[str]:
    """Return the names of a layer, given diffusers' name, in all dialects, with dots."""
    found = {module, original_module(module)}
    found |= {_BARE.sub(r"\1", name) for name in found}
    return found | {f"model.{name}" for name in found} | {n.removeprefix("model.") for n in found}


def dotted_module(stem: str) -> str:
    """Return a stem without the prefixes of tools."""
    return _without(_PREFIX, stem)


def network_module(stem: str) -> str:
    """Return a stem without the prefixes for the network, but with that of a text encoder."""
    return _without(_FRONT, stem)


def _without(prefix: re.Pattern[str], stem: str) -> str:
    for _ in range(_DEPTH):
        match = prefix.match(stem)
        if match is None:
            break
        stem = stem[match.end() :]
    return stem


def _target(tensor: str, shape: tuple[int, ...]) -> LayerTarget:
    return LayerTarget(tensor.removesuffix(_WEIGHT), shape, (TargetRows(tensor, 0, shape[0]),))


def _fused(targets: Iterable[LayerTarget]) -> Iterator[LayerTarget]:
    """Yield the layers for query, key and value that other dialects stack by rows."""
    known = {target.name: target for target in targets}
    for name, first in known.items():
        for pattern, words in _STACKS:
            stem = name.removesuffix(pattern.format("q"))
            thirds = [known.get(stem + pattern.format(letter)) for letter in "qkv"]
            if stem != name and (parts := _stacked_rows(thirds, first.shape[1:])):
                shape = (parts[-1].stop, *first.shape[1:])
                yield from (LayerTarget(stem + word, shape, parts) for word in words)


def _stacked_rows(
    thirds: Iterable[LayerTarget | None], columns: tuple[int, ...]
) -> tuple[TargetRows, ...]:
    """Return the rows of each layer in the stacked one; none if they cannot be stacked."""
    parts: list[TargetRows] = []
    start = 0
    for third in thirds:
        if third is None or len(third.shape) != 2 or third.shape[1:] != columns:
            return ()
        parts.append(TargetRows(third.parts[0].tensor, start, start + third.shape[0]))
        start += third.shape[0]
    return tuple(parts)


def _flatten(name: str) -> str:
    return name.replace(".", "_")


def _is_text(component: str) -> bool:
    return component.startswith("text_encoder")
