"""Whether an adapter belongs to a model: its pairs must fit the tensors that they change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clowder_aimage.errors import FormatError
from clowder_aimage.importer.formats.lora import Pair

Shapes = Mapping[str, tuple[int, ...]]  # of the model's tensors, by name
_APART = re.compile(r"[._]+")
# kohya's and ComfyUI's words for the network
_NETWORKS = (
    "lora_unet_",
    "lora_transformer_",
    "lora_te_",
    "transformer_",
    "unet_",
    "text_encoder_",
)


def check_fit(what: str, pairs: Sequence[Pair], shapes: Shapes, base: str) -> None:
    """Hold the adapter ``what`` next to the tensors of the model ``base``.

    Names are compared without their dots and underscores, for makers write them in both ways. A
    stacked query, key and value has no tensor of its own in a diffusers model: its thirds are it.

    Raises:
        FormatError: none of the pairs has a tensor there, or one does not fit its tensor.
    """
    known: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) >= 2:
            stem = name.removesuffix(".weight")
            known.setdefault(_plain(stem), []).append(shape)
            known.setdefault(_plain(stem.partition("/")[2] or stem), []).append(shape)
    found = 0
    for pair in pairs:
        wanted = known.get(_plain(pair.target)) or known.get(_plain(f"{pair.target}.0"))
        if wanted is None:
            found += _plain(pair.target).endswith("attention_qkv")
            continue
        if not any(shape[0] == pair.rows and shape[1] == pair.columns for shape in wanted):
            raise FormatError(
                f"{what} is for another model than {base}: at {pair.target[:200]} it changes "
                f"{pair.rows} rows of {pair.columns}, and the model has {list(wanted[0])}"
            )
        found += 1
    if not found:
        raise FormatError(
            f"{what} is for another model than {base}, which has no {pairs[0].target[:200]}, nor "
            "any other layer that the adapter changes"
        )


def _plain(name: str) -> str:
    name = _APART.sub("_", name)
    for network in _NETWORKS:
        name = name.removeprefix(network)
    return name
