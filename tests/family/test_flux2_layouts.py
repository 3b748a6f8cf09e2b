"""FLUX.2 [klein] in the files of ComfyUI and of the original code, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from clowder_aimage.create import create
from clowder_aimage.errors import AImageError, FormatError, UsageError
from clowder_aimage.export import export
from clowder_aimage.family.image_family import FLUX_2
from clowder_aimage.importer import PackedModel
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.flux2.config import TransformerConfig, VaeConfig
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.exporter.conftest import files_in
from tests.family import flux2_layout
from tests.family.conftest import digests
from tests.model.random_flux2 import CONFIGS, write_flux2

FLUX = Reference.parse("flux")
KLEIN = {  # 3,875,544,576 parameters in the transformer
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "num_layers": 5,
    "num_single_layers": 20,
    "in_channels": 128,
    "joint_attention_dim": 7680,
}
VAE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 32}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    write_flux2(root)
    (root / "text_encoder/generation_config.json").write_text("{}")  # as diffusers writes it
    return root


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> ImageLayout:
    made = ImageLayout(tmp_path_factory.mktemp("store"))
    create(made, FLUX, source)
    return made


def made_from(packed: ImageLayout, path: Path, like: Reference | None = FLUX) -> PackedModel:
    return create(packed, Reference.parse("again"), path, like=like)


@pytest.mark.parametrize("is_whole", [False, True], ids=["split", "all-in-one"])
def test_flux2_becomes_the_same_tensors_and_returns(
    packed: ImageLayout, source: Path, tmp_path: Path, is_whole: bool
) -> None:
    path = flux2_layout.write(source, tmp_path / "there", is_whole=is_whole)
    made, own = made_from(packed, path), digests(create(packed, FLUX, source))
    assert digests(made).items() >= own.items()
    assert made.aimage.properties["family"] == "flux2"
    assert made.aimage.properties["defaults"]["steps"] == 4
    back = tmp_path / "back"
    export(packed, Reference.parse("again"), back, layout="diffusers")
    for file in source.rglob("*"):
        if file.suffix == ".json":
            assert (back / file.relative_to(source)).read_bytes() == file.read_bytes(), file
    assert tensors(back) == tensors(source)
    layout = "comfyui-all-in-one" if is_whole else "comfyui"
    export(packed, FLUX, tmp_path / "written", layout=layout)
    assert tensors(tmp_path / "written") == tensors(tmp_path / "there")


def test_an_autoencoder_without_outer_convolutions_returns(tmp_path: Path) -> None:
    flags = {"use_quant_conv": False, "use_post_quant_conv": False}
    write_flux2(tmp_path / "plain", configs=CONFIGS | {"vae": CONFIGS["vae"] | flags})
    packed, plain = ImageLayout(tmp_path / "store"), Reference.parse("plain")
    own = digests(create(packed, plain, tmp_path / "plain"))
    export(packed, plain, tmp_path / "written", layout="comfyui")
    assert digests(made_from(packed, tmp_path / "written", plain)).items() >= own.items()
    write_flux2(tmp_path / "usual")
    create(packed, FLUX, tmp_path / "usual")
    with pytest.raises(FormatError, match=r"lacks 4 tensors \(quant_conv.weight"):
        made_from(packed, tmp_path / "written")


def test_shards_come_back_by_way_of_another_layout(source: Path, tmp_path: Path) -> None:
    packed, there = ImageLayout(tmp_path / "store"), tmp_path / "sharded"
    create(packed, FLUX, source)
    export(packed, FLUX, there, shard=100_000)
    create(packed, FLUX, there)
    export(packed, FLUX, tmp_path / "comfyui", layout="comfyui")
    made_from(packed, tmp_path / "comfyui")
    export(packed, Reference.parse("again"), tmp_path / "back", layout="diffusers")
    assert files_in(tmp_path / "back") == files_in(there)
    assert len(list(there.rglob("*-of-*.safetensors"))) > 2


def tensors(root: Path) -> dict[str, Any]:
    """Return the values of all tensors in the weight files of a directory."""
    found: dict[str, Any] = {}
    for file in root.rglob("*.safetensors"):
        values = load_file(file)
        found |= {name: (one.shape, one.tobytes()) for name, one in values.items()}
    return found


def test_a_lone_transformer_of_flux2_is_completed(
    packed: ImageLayout, source: Path, tmp_path: Path
) -> None:
    path = flux2_layout.write(source, tmp_path, is_whole=False) / "diffusion_models/x.safetensors"
    own = digests(create(packed, FLUX, source))
    assert digests(made_from(packed, path)).items() >= own.items()
    with pytest.raises(UsageError, match="lacks text_encoder, vae, tokenizer"):
        made_from(packed, path, None)


def test_families_are_not_mixed(packed: ImageLayout, source: Path, tmp_path: Path) -> None:
    before = set(packed.root.rglob("*"))
    root = flux2_layout.write(source, tmp_path, is_whole=False)
    file = root / "vae/x.safetensors"
    vae = file.read_bytes()
    file.write_bytes((TINY / "vae/diffusion_pytorch_model.safetensors").read_bytes())
    with pytest.raises(UsageError, match="has the vae of another family than FLUX"):
        made_from(packed, root)
    file.write_bytes((TINY / "transformer/diffusion_pytorch_model.safetensors").read_bytes())
    with pytest.raises(UsageError, match="have the transformers of two models"):
        made_from(packed, root)
    file.write_bytes(vae)
    tiny = Reference.parse("tiny")
    other = ImageLayout(tmp_path / "other")
    create(other, tiny, TINY)
    with pytest.raises(UsageError, match=r"tiny.* is not a FLUX\.2 \[klein\] model"):
        made_from(other, root, tiny)
    with pytest.raises(UsageError, match="is not an image model that mlx has a layout for"):
        export(packed, FLUX, tmp_path / "out", layout="mlx")
    assert set(packed.root.rglob("*")) == before and not (tmp_path / "out").exists()


def test_the_config_of_flux2_follows_from_shapes() -> None:
    transformer, _, vae = FLUX_2.components
    shapes = transformer.shapes(KLEIN)
    names = {transformer.dialects["original"].locate(name).name for name in shapes}
    assert (len(shapes), len(names)) == (169, 149)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 3_875_544_576
    config = transformer.configure(shapes)
    assert {key: config[key] for key in transformer.sizes} == KLEIN
    assert TransformerConfig.parse("config.json", config).ffn_dim == 9216
    assert len(vae.shapes(VAE)) == 251
    config = vae.configure(vae.shapes(VAE))
    assert {key: config[key] for key in vae.sizes} == VAE
    VaeConfig.parse("config.json", config)


def test_other_models_of_flux_are_refused(
    packed: ImageLayout, source: Path, tmp_path: Path
) -> None:
    path = flux2_layout.write(source, tmp_path, is_whole=False) / "diffusion_models/x.safetensors"
    data = path.read_bytes().replace(b"time_in.in_layer", b"guidance_in.layr")
    path.write_bytes(data)
    with pytest.raises(AImageError, match=r"FLUX\.2 \[dev\]"):
        made_from(packed, path)
