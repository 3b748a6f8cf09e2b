"""Check that an adapter belongs to a model: its pairs must fit the tensors they change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.lora import LoraPair

Shapes = Mapping[str, tuple[int, ...]]  # of the model's tensors, by name
_APART = re.compile(r"[._]+")
_STACKED = "attention_qkv"
# kohya's and ComfyUI's words for the network
_NETWORKS = (
    *("lora_unet_", "lora_transformer_", "lora_te_"),
    *("transformer_", "unet_", "text_encoder_"),
)


def check_fit(what: str, pairs: Sequence[LoraPair], shapes: Shapes, base: str) -> None:
    """Hold the adapter ``what`` next to the tensors of the model ``base``.

    Names are compared without their dots and underscores, for makers write them in both ways. A
    stacked query, key and value has no tensor of its own in a diffusers model: its thirds are it.

    Raises:
        FormatError: a pair has no tensor there, or does not fit its tensor.
    """
    known: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) >= 2:
            stem = name.removesuffix(".weight")
            known.setdefault(_plain(stem), []).append(shape)
            known.setdefault(_plain(stem.partition("/")[2] or stem), []).append(shape)
    for pair in pairs:
        wanted = _find(pair.target, known)
        if not wanted:
            raise FormatError(
                f"{what} is for another model than {base}, which has no {pair.target[:200]}"
            )
        if not any(shape[0] == pair.rows and shape[1] == pair.columns for shape in wanted):
            raise FormatError(
                f"{what} is for another model than {base}: at {pair.target[:200]} it changes "
                f"{pair.rows} rows of {pair.columns}, and the model has {list(wanted[0])}"
            )


def _find(target: str, known: Mapping[str, list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the shapes that a target may have in the model; those of its thirds, stacked."""
    name = _plain(target)
    if found := known.get(name) or known.get(f"{name}_0"):
        return found
    if not name.endswith(_STACKED):
        return []
    stem = name.removesuffix("qkv")
    thirds = [known.get(f"{stem}to_{letter}") for letter in "qkv"]
    if not all(thirds):
        return []
    rows = sum(third[0][0] for third in thirds if third)
    return [(rows, *third[0][1:]) for third in thirds[:1] if third]


def _plain(name: str) -> str:
    name = _APART.sub("_", name)
    for network in _NETWORKS:
        name = name.removeprefix(network)
    return name
