"""Lone safetensors files, and files that are packed as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.export import export
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.exporter.conftest import files_in
from tests.importer.conftest import safetensors
from tests.process import Aimage

NAME, TWO = Reference.parse("ckpt"), Reference.parse("two")
TENSORS = [
    ("model.diffusion_model.out.2.weight", "F16", (4, 4)),
    ("first_stage_model.bias", "F32", (3,)),
    ("layers.0.mlp.experts.0.w1.weight", "F32", (2, 2)),
    ("layers.0.mlp.experts.1.w1.weight", "F32", (2, 2)),
    ("step", "I64", ()),
]
SCALED = [("a.weight", "F8_E4M3", (4, 4)), ("a.scale_weight", "F32", ())]
SLASHED = [("a/b", "F32", (2,))]
WHOLE = ModelForm(whole_files=True)


def test_a_checkpoint_is_packed_by_tensor_and_exported_byte_for_byte(
    store: ImageLayout, tmp_path: Path
) -> None:
    path = tmp_path / "sd_xl_base.safetensors"
    data = safetensors(TENSORS, **{"modelspec.title": "SDXL", "note": "as it came"})
    path.write_bytes(data)
    made = create(store, NAME, path)
    aimage = read_aimage(store, NAME).aimage
    assert aimage.properties["format"] == "safetensors"
    assert aimage.properties["name"] == "SDXL"
    assert aimage.properties["parameters"] == 16 + 3 + 8 + 1
    assert [x.name for x in aimage.layers if x.is_tensor] == sorted(
        ["layers.0.mlp.experts", *(name for name, _, _ in TENSORS if "experts" not in name)]
    )
    export(store, NAME, tmp_path / "out")
    assert files_in(tmp_path / "out") == {path.name: data}
    assert create(store, TWO, tmp_path / "out").descriptor == made.descriptor


@pytest.mark.parametrize("tensors", [SCALED, SLASHED])
def test_tensors_that_cannot_be_layers_stay_in_their_file(
    store: ImageLayout, tmp_path: Path, tensors: list[Any]
) -> None:
    path = tmp_path / "flux.safetensors"
    path.write_bytes(safetensors(tensors))
    create(store, NAME, path)
    (layer,) = read_aimage(store, NAME).aimage.layers
    assert layer.name == path.name
    export(store, NAME, tmp_path / "out")
    assert files_in(tmp_path / "out") == {path.name: path.read_bytes()}


def test_a_checkpoint_without_tensors_or_data_is_refused(
    store: ImageLayout, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors([]))
    with pytest.raises(ModelError, match="contains no tensors"):
        create(store, NAME, path)
    path.write_bytes(safetensors(TENSORS)[:-1])
    with pytest.raises(FormatError, match="damaged"):
        create(store, NAME, path)


def test_any_files_are_packed_as_they_are(store: ImageLayout, tmp_path: Path) -> None:
    root = tmp_path / "things"
    (root / "deep").mkdir(parents=True)
    (root / "old.ckpt").write_bytes(b"\x80\x02.")
    (root / "deep" / "notes.txt").write_bytes(b"words")
    (root / ".hidden").write_bytes(b"x")
    made = create(store, NAME, root, form=WHOLE)
    aimage = read_aimage(store, NAME).aimage
    assert aimage.properties["format"] == "files"
    assert aimage.properties["pickled"] is True
    export(store, NAME, tmp_path / "out")
    assert files_in(tmp_path / "out") == {"old.ckpt": b"\x80\x02.", "deep/notes.txt": b"words"}
    again = create(store, TWO, tmp_path / "out", form=ModelForm("files"))
    assert again.descriptor == made.descriptor


def test_unknown_models_are_refused_with_the_remedy(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    root = tmp_path / "model"
    root.mkdir()
    run = aimage("store")
    assert "contains no files" in run("create", "x", root, "--whole-files", code=1).err
    (root / "model.ckpt").write_bytes(b"\x80\x02.")
    for path in (root, root / "model.ckpt"):
        said = run("create", "x", path, code=1).err
        assert "or pack all files as they are, with --whole-files" in said
    said = run("create", "x", root, "--variant", "fp16", "--whole-files", code=2).err
    assert "only a diffusers pipeline has variants" in said
    assert "does not exist" in run("create", "x", root / "absent", "--whole-files", code=3).err
    run("create", "x", root / "model.ckpt", "--whole-files")
