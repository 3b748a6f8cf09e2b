"""Image models are written in the layouts of other tools, and come back without a difference."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from clowder_aimage.create import convert
from clowder_aimage.errors import UsageError
from clowder_aimage.export import export
from clowder_aimage.importer import Recipe
from clowder_aimage.oci import Reference
from tests.family import foreign_layout
from tests.family.conftest import TINY, FamilyStore, digests

# what seed 003's layout and mflux's do not have, and this tool adds
ADDED = {"transformer_config.json", "config.json"}
EXTRAS = ("norm_final.weight", "rotary_emb.inv_freq")


def files_in(root: Path) -> dict[str, bytes]:
    """Return the files below a directory."""
    paths = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def written(family: FamilyStore, name: str, layout: str, root: Path) -> dict[str, bytes]:
    export(family.store, Reference.parse(name), root, layout=layout)
    return files_in(root)


@pytest.mark.parametrize("layout", foreign_layout.LAYOUTS)
def test_files_come_back_byte_for_byte(family: FamilyStore, layout: str, tmp_path: Path) -> None:
    family.create(layout, family.path(layout))
    theirs = files_in(family.path(layout))
    made = written(family, layout, layout, tmp_path / "back")
    changed = {name for name, data in theirs.items() if made.get(name) != data}
    added = {name.rpartition("/")[2] for name in made.keys() - theirs.keys()}
    assert (changed | added) <= ADDED
    if layout == "mlx":
        found = json.loads(made["config.json"])
        assert {**json.loads(theirs["config.json"]), **found} == found


@pytest.mark.parametrize("layout", foreign_layout.LAYOUTS)
def test_a_diffusers_directory_comes_back_from_every_layout(
    family: FamilyStore, layout: str, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    own = written(family, "tiny", layout, there)
    expected = tensors(family.path(layout), files_in(family.path(layout)))
    assert tensors(there, own) == {
        name: value for name, value in expected.items() if not name.endswith(EXTRAS)
    }
    made = family.create(f"{layout}-again", there)
    assert digests(made).items() > digests(family.tiny).items()
    before = files_in(foreign_layout.TINY)
    assert written(family, f"{layout}-again", "diffusers", tmp_path / "back") == before


def tensors(root: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the values and shapes of all tensors in weight files."""
    files = (root / name for name in names if name.endswith(".safetensors"))
    found = {n: one for file in files for n, one in foreign_layout.read_tensors(file).items()}
    return {n: one.tobytes() + str(one.shape).encode() for n, one in found.items()}


def test_quantized_weights_are_written_for_mlx_alone(family: FamilyStore, tmp_path: Path) -> None:
    recipe = Recipe.parse(quantize="transformer=int8", dtype=None, group_size=None)
    small = convert(family.store, TINY, Reference.parse("int8"), recipe)
    for layout in ("mlx", "mflux"):
        own = written(family, "int8", layout, tmp_path / layout)
        made = family.create(f"int8-{layout}", tmp_path / layout)
        assert {n: d for n, d in digests(made).items() if n.startswith("transformer/layers")} == {
            n: d for n, d in digests(small).items() if n.startswith("transformer/layers")
        }
        assert b'"FP8"' in own.get("config.json", b'"FP8"')
    for layout in ("comfyui", "comfyui-all-in-one"):
        with pytest.raises(UsageError, match="is quantized to int8"):
            written(family, "int8", layout, tmp_path / layout)
        assert not (tmp_path / layout).exists()


def test_only_image_models_have_layouts(family: FamilyStore, tmp_path: Path) -> None:
    path = foreign_layout.write(tmp_path / "x.safetensors", foreign_layout.mlx_vae())
    family.create("vae", path, like=None)
    with pytest.raises(UsageError, match="is not an image model that comfyui has a layout for"):
        written(family, "vae", "comfyui", tmp_path / "out")
