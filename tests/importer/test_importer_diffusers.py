"""Diffusers pipelines of any class: packed by tensor, exported byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import convert, create
from clowder_aimage.dialect import DIALECTS
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.export import export
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.exporter.conftest import files_in
from tests.importer.conftest import safetensors
from tests.process import Aimage

ONE, TWO = Reference.parse("one"), Reference.parse("two")
B, A = ("b.weight", "F16", (4, 4)), ("a.bias", "F32", (4,))
INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "force_zeros_for_empty_prompt": True,
    "feature_extractor": [None, None],
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
FILES = {
    "model_index.json": json.dumps(INDEX).encode(),
    "scheduler/scheduler_config.json": b"{}",
    "tokenizer/vocab.json": b'{"a": 1}',
    "tokenizer/merges.txt": b"a b",
    "unet/config.json": b'{"_class_name": "UNet2DConditionModel"}',
    "vae/config.json": b'{"sample_size": 64}',
    # the order of tensors and the metadata are not those that an export would choose
    "vae/diffusion_pytorch_model.safetensors": safetensors([B, A], "vae", by="hand"),
}
STEM = "unet/diffusion_pytorch_model"


def shards(variant: str = "") -> dict[Any, Any]:
    dot = f".{variant}" if variant else ""
    names = [f"{STEM}{dot}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    parts = {"b.weight": Path(names[0]).name, "a.bias": Path(names[1]).name}
    return {
        names[0]: safetensors([B], variant),
        names[1]: safetensors([A], variant),
        f"{STEM}.safetensors.index{dot}.json": json.dumps({"weight_map": parts}).encode(),
    }


def write(root: Path, *groups: dict[str, bytes]) -> Path:
    for name, data in [pair for files in groups for pair in files.items()]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize("variant", ["", "fp16"])
def test_any_pipeline_is_exported_byte_for_byte(
    store: ImageLayout, tmp_path: Path, variant: str, dialect: str
) -> None:
    source = write(tmp_path / "sdxl", FILES, shards(variant))
    made = create(store, ONE, source, dialect=dialect)
    aimage = read_aimage(store, ONE).aimage
    assert aimage.properties["pipeline"] == "StableDiffusionXLPipeline"
    assert aimage.properties["format"] == "diffusers"
    assert {x.name for x in aimage.layers if x.is_tensor} == {
        *("unet/a.bias", "unet/b.weight", "vae/a.bias", "vae/b.weight")
    }
    export(store, ONE, tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(source)
    again = create(store, TWO, tmp_path / "out", dialect=dialect)
    assert again.descriptor == made.descriptor


def test_the_chosen_variant_is_packed(store: ImageLayout, tmp_path: Path) -> None:
    source = write(tmp_path / "sdxl", FILES, shards(), shards("fp16"), shards("bf16"))
    for variant, absent in (("", ("fp16", "bf16")), ("fp16", ("bf16", "diffusion_pytorch_model-"))):
        create(store, ONE, source, form=ModelForm(variant=variant))
        export(store, ONE, tmp_path / f"out{variant}")
        names = list(files_in(tmp_path / f"out{variant}"))
        assert not [name for name in names if any(word in name for word in absent)]
        assert len([name for name in names if name.startswith(STEM)]) == 3
    with pytest.raises(UsageError, match="in the variant 'fp8'"):
        create(store, ONE, source, form=ModelForm(variant="fp8"))
    for path in source.glob("unet/*model-0*"):
        path.unlink()
    (source / f"{STEM}.safetensors.index.json").unlink()
    with pytest.raises(UsageError, match=r"several variants: bf16, fp16") as caught:
        create(store, ONE, source)
    assert caught.value.remedy == "choose_weights"


def test_a_converted_pipeline_has_weight_files_for_its_libraries(
    store: ImageLayout, tmp_path: Path
) -> None:
    create(store, ONE, write(tmp_path / "sdxl", FILES, shards("fp16")))
    convert(store, ONE, TWO, Recipe("bf16"))
    export(store, TWO, tmp_path / "out")
    names = {name for name in files_in(tmp_path / "out") if "safetensors" in name}
    assert names == {f"{one}/diffusion_pytorch_model.safetensors" for one in ("unet", "vae")}


def test_pickled_components_are_refused_and_copies_left_out(
    store: ImageLayout, tmp_path: Path
) -> None:
    source = write(tmp_path / "sd", FILES, {f"{STEM}.bin": b"\x80\x02."})
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model\.bin is pickled") as caught:
        create(store, ONE, source)
    assert caught.value.remedy == "whole_files"
    write(source, shards())
    create(store, ONE, source)
    assert not [x for x in read_aimage(store, ONE).aimage.layers if x.name.endswith(".bin")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": ["X"]}, "invalid pipeline class"),
        ({"_class_name": "../X"}, "invalid pipeline class"),
        ({"../vae": ["diffusers", "AutoencoderKL"]}, "invalid component name"),
        ({"unet_2": ["diffusers", "UNet2DConditionModel"]}, "unet_2 is missing"),
        (dict.fromkeys(set(INDEX) - {"_class_name"}), "names no components"),
    ],
)
def test_an_invalid_index_is_refused(
    store: ImageLayout, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    index = {"model_index.json": json.dumps(INDEX | changes).encode()}
    with pytest.raises(ModelError, match=said):
        create(store, ONE, write(tmp_path / "sd", FILES, shards(), index))


def test_missing_weights_and_unknown_quantization_are_refused(
    store: ImageLayout, tmp_path: Path
) -> None:
    source = write(tmp_path / "sd", FILES)
    with pytest.raises(ModelError, match="contains no weights in safetensors"):
        create(store, ONE, source)
    write(source, shards(), {"unet/config.json": b'{"quantization_config": {"quant_method": "x"}}'})
    with pytest.raises(FormatError, match="unsupported quantization") as caught:
        create(store, ONE, source)
    assert caught.value.remedy == "whole_files"
    create(store, ONE, source, form=ModelForm(whole_files=True))
    export(store, ONE, tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(source)


def test_run_names_what_it_can_run(aimage: Callable[..., Aimage], tmp_path: Path) -> None:
    run = aimage("store")
    run("create", "one", write(tmp_path / "sd", FILES, shards()))
    said = run("run", "--local", "one", "a cat", code=1).err
    assert "Flux2KleinPipeline can be run; one:latest is StableDiffusionXLPipeline" in said
    assert "run it with diffusers: aimage export one:latest DIR" in said


@pytest.mark.parametrize("variant", ["", "fp16"])
def test_a_component_by_itself_is_packed_by_tensor_and_exported_byte_for_byte(
    store: ImageLayout, tmp_path: Path, variant: str
) -> None:
    source = write(tmp_path / "sdxl", FILES, shards(variant)) / "unet"
    create(store, TWO, source.parent)
    create(store, ONE, source)
    aimage = read_aimage(store, ONE).aimage
    assert aimage.properties["format"] == "diffusers"
    assert aimage.properties["architecture"] == "UNet2DConditionModel"
    assert {x.name for x in aimage.layers if x.is_tensor} == {"a.bias", "b.weight"}
    whole = {x.descriptor.digest for x in read_aimage(store, TWO).aimage.layers}
    assert {x.descriptor.digest for x in aimage.layers if x.is_tensor} <= whole
    export(store, ONE, tmp_path / "out")
    assert files_in(tmp_path / "out") == files_in(source)
    convert(store, ONE, TWO, Recipe("bf16"))
    export(store, TWO, tmp_path / "converted")
    assert (tmp_path / "converted/diffusion_pytorch_model.safetensors").is_file()
    with pytest.raises(UsageError, match="in the variant 'fp8'"):
        create(store, ONE, source, form=ModelForm(variant="fp8"))


def test_a_component_in_the_hugging_face_cache_may_be_links(
    store: ImageLayout, tmp_path: Path
) -> None:
    snapshot = write(tmp_path / "models--o--r/snapshots/c0", FILES)
    path = snapshot / "vae/diffusion_pytorch_model.safetensors"
    blob = write(tmp_path / "models--o--r/blobs", {"b0": path.read_bytes()}) / "b0"
    path.unlink()
    path.symlink_to(blob)
    (snapshot / "vae/config.json").write_text('{"_class_name": "AutoencoderKL"}')
    create(store, ONE, snapshot / "vae")
    assert read_aimage(store, ONE).aimage.properties["architecture"] == "AutoencoderKL"
    path.unlink()
    path.symlink_to(write(tmp_path, {"elsewhere": blob.read_bytes()}) / "elsewhere")
    with pytest.raises(ModelError, match="outside the model directory"):
        create(store, ONE, snapshot / "vae")


def test_run_names_the_class_of_a_component(aimage: Callable[..., Aimage], tmp_path: Path) -> None:
    run = aimage("store")
    run("create", "one", write(tmp_path / "sd", FILES, shards()) / "unet")
    said = run("run", "--local", "one", "a cat", code=1).err
    assert "Flux2KleinPipeline can be run; one:latest is UNet2DConditionModel" in said
