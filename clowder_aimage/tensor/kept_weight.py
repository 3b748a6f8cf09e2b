"""Weights that are not quantized, by their names, types and shapes; the reasons are in configs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from clowder_aimage.tensor.quantization import Quantization
from clowder_aimage.tensor.weight import FLOATS

MIN_ELEMENTS = 1024
MAX_ROW = 1 << 20
"""The longest row with a scale of its own, in values: it is in memory as a whole."""
UNFIT = "rows no multiple of"
"""The reason that a group size completes."""

# Reasons by patterns of the name; the first match applies.
_NAMES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("norm", re.compile(r"norm")),
    ("embedder", re.compile(r"embed")),
    ("final layer", re.compile(r"final_layer|^(.*\.)?lm_head\.")),
    ("pad token", re.compile(r"pad_token")),
    ("router", re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)\.")),
)
# Further reasons if each row has one scale.
_SENSITIVE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("final layer", re.compile(r"^proj_out\.")),
    ("modulation", re.compile(r"modulation", re.IGNORECASE)),
)
_FIRST, _LAST = "first block", "last block"
# The lists of a network's blocks, in the order of computation. Refiners are not among them.
_LISTS = {
    "transformer_blocks": 0,
    "single_transformer_blocks": 1,
    "layers": 2,
    "layer": 2,
    "blocks": 2,
}
# The outermost list: a block may have lists, too
_BLOCK = re.compile(rf"((?:[^.]+\.)*?)({'|'.join(_LISTS)})\.(\d{{1,6}})\..+")


@dataclass(frozen=True, slots=True)
class KeepRule:
    """The rule for the weights of a component that is quantized to ``quantization``.

    A network with sensitive blocks has ``ends``: the prefixes of its first and its last block.
    """

    quantization: Quantization
    ends: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, quantization: Quantization, names: Iterable[str]) -> KeepRule:
        """Return the rule for a component with the tensors ``names``."""
        return cls(quantization, tuple(_find_ends(names)) if quantization.is_by_row else ())

    def find_reason(self, name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
        """Return the reason not to quantize a tensor, or None to quantize it."""
        if dtype not in FLOATS:
            return f"{dtype} values"
        patterns = _NAMES + _SENSITIVE if self.quantization.is_by_row else _NAMES
        for reason, pattern in patterns:
            if pattern.search(name):
                return reason
        if len(shape) != 2:
            return f"{len(shape)} dimensions" if len(shape) != 1 else "1 dimension"
        if shape[0] * shape[1] < MIN_ELEMENTS:
            return f"under {MIN_ELEMENTS} elements"
        if not self.quantization.fits(shape):
            return f"{UNFIT} {self.quantization.group_size}"
        if self.quantization.is_by_row and shape[1] > MAX_ROW:
            return f"rows of more than {MAX_ROW} values"
        return next((reason for prefix, reason in self.ends if name.startswith(prefix)), None)


def _find_ends(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the prefixes of the first and the last block of each network."""
    networks: dict[str, set[tuple[int, int, str]]] = {}
    for match in filter(None, map(_BLOCK.fullmatch, names)):
        network, blocks, number = match.groups()
        block = _LISTS[blocks], int(number), f"{network}{blocks}.{number}."
        networks.setdefault(network, set()).add(block)
    for found in networks.values():
        yield min(found)[2], _FIRST
        yield max(found)[2], _LAST
