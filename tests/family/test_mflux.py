"""mflux opens what is written for it, and what it saves comes back, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clowder_aimage.create import convert, create
from clowder_aimage.export import export
from clowder_aimage.family.zimage_names import build_vae_shapes
from clowder_aimage.importer import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.family import foreign_layout
from tests.family.conftest import TINY, FamilyStore, digests

pytest.importorskip("mflux", reason="mflux is not installed")
pytestmark = pytest.mark.integration
# mflux's VAE has these widths, whatever the files say
WIDE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> FamilyStore:
    """Return a store with the small model, and a random VAE of the widths of mflux."""
    root = tmp_path_factory.mktemp("mflux")
    source = root / "source"
    shutil.copytree(foreign_layout.TINY, source)
    place = source / "vae/config.json"
    config = json.loads(place.read_text()) | WIDE
    place.write_text(json.dumps(config))
    rng = np.random.default_rng(1)
    tensors = {
        name: rng.integers(0x3C00, 0x3F00, shape, np.uint16)
        for name, shape in build_vae_shapes(config).items()
    }
    foreign_layout.write(source / foreign_layout.FILES["vae"], tensors)
    foreign_layout.write(
        source / foreign_layout.FILES["text_encoder"], foreign_layout.text_encoder()
    )
    return FamilyStore(root, create(ImageLayout(root / "store"), TINY, source))


def networks(source: Path) -> Any:
    """Return mflux's networks with the sizes of the small model and random values."""
    from mflux.models.z_image.model.z_image_text_encoder.text_encoder import TextEncoder
    from mflux.models.z_image.model.z_image_transformer.transformer import ZImageTransformer
    from mflux.models.z_image.model.z_image_vae.vae import VAE

    def given(part: str, *keys: str) -> dict[str, Any]:
        config = json.loads((source / part / "config.json").read_text())
        return {key: config[key] for key in keys}

    sizes = ("dim", "n_layers", "n_refiner_layers", "n_heads", "cap_feat_dim", "axes_dims")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    widths = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return SimpleNamespace(
        transformer=ZImageTransformer(**given("transformer", *sizes)),
        text_encoder=TextEncoder(**given("text_encoder", *heads, *widths)),
        vae=VAE(),
    )


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    from mlx.utils import tree_flatten

    arrays: Any = tree_flatten(tree)
    return {name: array.shape for name, array in arrays}


def resaved(source: Path, opened: Path, target: Path) -> Path:
    """Open a directory with mflux's own code and save it with mflux's."""
    from mflux.models.common.weights.loading.weight_applier import WeightApplier
    from mflux.models.common.weights.loading.weight_loader import WeightLoader
    from mflux.models.common.weights.saving.model_saver import ModelSaver
    from mflux.models.z_image.weights.z_image_weight_definition import ZImageWeightDefinition

    model = networks(source)
    counts = {"transformer": len(model.transformer.layers)}
    counts["text_encoder"] = len(model.text_encoder.layers)

    class Definition(ZImageWeightDefinition):  # type: ignore[misc]
        @staticmethod
        def get_components() -> list[Any]:
            return [
                dataclasses.replace(one, num_layers=counts.get(one.name, one.num_layers))
                for one in ZImageWeightDefinition.get_components()
            ]

    weights = WeightLoader.load(weight_definition=Definition, model_path=str(opened))
    bits = WeightApplier.apply_and_quantize(
        weights=weights, quantize_arg=None, weight_definition=Definition, models=vars(model)
    )
    for name, network in vars(model).items():
        needed = shapes(network.parameters())
        needed.pop("rotary_emb.inv_freq", None)  # computed, not read
        assert needed == shapes(weights.components[name])
    ModelSaver.save_model(model, bits, str(target), Definition)
    return target


@pytest.mark.parametrize("kind", ["diffusers", "mflux", "int8"])
def test_mflux_opens_and_saves_the_same_bits(wide: FamilyStore, kind: str, tmp_path: Path) -> None:
    """mflux renames the tensors of a diffusers directory, and reads its own as they are."""
    own, opened = wide.tiny, wide.root / "source"
    if kind == "int8":
        recipe = Recipe.parse(quantize="transformer=int8", dtype=None, group_size=None)
        own = convert(wide.store, TINY, Reference.parse(kind), recipe)
    if kind != "diffusers":
        opened = tmp_path / "opened"
        name = TINY if kind == "mflux" else Reference.parse(kind)
        export(wide.store, name, opened, layout="mflux")
    saved = resaved(wide.root / "source", opened, tmp_path / "saved")
    assert digests(wide.create("made", saved)).items() >= digests(own).items()
