"""Tensors of files in other layouts, and what cannot be written or counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import AImageError
from clowder_aimage.exporter.family_file import build_tensors
from clowder_aimage.family.image_family import VAE, Z_IMAGE, LayoutComponent, LayoutFile
from clowder_aimage.family.name_table import NameTable, TensorChange
from clowder_aimage.family.tensor_change import restore
from clowder_aimage.formats.tokenizer_size import count_tokens
from clowder_aimage.tensor.weight import SourceTensor, Weight, to_weight

FILE = Z_IMAGE.layouts["comfyui"][0]
QUERY = "layers.0.attention.to_{}.weight"


def weight(name: str, dtype: str = "U8", shape: tuple[int, ...] = (4, 3)) -> Weight:
    size = 1
    for length in shape:
        size *= length
    return to_weight(SourceTensor(name, dtype, shape, Path("x"), 0, size, 0))


def test_halves_are_exchanged_in_both_directions(tmp_path: Path) -> None:
    table = NameTable(renames=(("^a", "b"),), changes=(("^a", TensorChange.HALVES),))
    component = replace(
        VAE, dialects={"diffusers": NameTable(), "x": table}, shapes=lambda _: {"a.weight": (4, 3)}
    )
    family = replace(Z_IMAGE, components=(component,))
    file = LayoutFile("f", (LayoutComponent("vae", "x", "p."),))
    (tensor,) = build_tensors(family, file, {"vae": [weight("a.weight")]}, False).values()
    assert (tensor.name, tensor.shape, tensor.nbytes) == ("p.b.weight", (4, 3), 12)
    assert [(part.start, part.stop) for part in tensor.chunks] == [(6, 12), (0, 6)]
    (tmp_path / "x").write_bytes(bytes([*range(6, 12), *range(6)]))
    theirs = replace(weight("b.weight").tensor, path=tmp_path / "x")
    back = restore(theirs, "a.weight", table.locate("a.weight"))
    # rows of a computed tensor, and a change of those
    again = restore(back, "b.weight", table.locate("a.weight"))
    for made, expected in ((back, bytes(range(12))), (again, (tmp_path / "x").read_bytes())):
        assert made.decoded is not None
        assert b"".join(map(bytes, made.decoded.iter_bytes())) == expected


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "the model has no transformer"),
        (
            {"transformer": [weight("other.weight")]},
            "other.weight has no counterpart in the layout",
        ),
        ({"transformer": [weight(QUERY.format("q"))]}, "the 3 parts of layers.0.attention.qkv"),
        (
            {"transformer": [weight(QUERY.format(x), "I8" if x == "k" else "U8") for x in "qkv"]},
            "are incomplete, or differ in type or shape",
        ),
    ],
)
def test_what_a_layout_cannot_express_is_refused(weights: Any, message: str) -> None:
    with pytest.raises(AImageError, match=message):
        build_tensors(Z_IMAGE, FILE, weights, False)


def test_tensors_without_meaning_are_optional() -> None:
    (extra,) = build_tensors(
        Z_IMAGE, FILE, {"transformer": [weight("norm_final.weight")]}, False
    ).values()
    assert extra.is_extra and extra.name == "norm_final.weight"


def test_odd_rows_have_no_halves() -> None:
    place = replace(NameTable().locate("a"), change=TensorChange.HALVES)
    with pytest.raises(AImageError, match="must have an even number of rows"):
        restore(weight("a", shape=(3, 2)).tensor, "a", place)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 7}}}}, 8),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}}, 2),
        ({"tokenizer.json": {"added_tokens": [{"id": 4}, {"id": "x"}, 3]}}, 5),
        ({"vocab.json": {"a": 2, "b": "x"}, "merges.txt": {}}, 3),
        ({"tokenizer.json": []}, 0),
        ({"merges.txt": {}}, 0),
    ],
)
def test_tokens_are_counted(files: dict[str, Any], count: int) -> None:
    assert (
        count_tokens({name: json.dumps(value).encode() for name, value in files.items()}) == count
    )
