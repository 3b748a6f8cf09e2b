"""diffusers' recorded answers for examples/tiny; tests/parity/record.py makes them anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_blobs import FolderStore
from model_oracle import CASES, differences, excess, ours

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.model.backend import mx
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.model.zimage.config import VaeConfig
from clowder_aimage.model.zimage.pipeline import ZImagePipeline
from clowder_aimage.model.zimage.vae import Vae

FOLDER = Path(__file__).parent / "oracle"


@pytest.fixture(scope="module")
def vae(tiny: tuple[FolderStore, AImage]) -> Vae:
    weights = ModelWeights.open(*tiny, "vae")
    whole = Vae(VaeConfig.parse("vae/config.json", weights.config), encoder=True)
    assert weights.apply(whole, skip=whole.skip, dtype=mx.float32) == ()
    return whole


@pytest.mark.parametrize("case", CASES)
def test_same_as_recorded(pipeline: ZImagePipeline, vae: Vae, case: str) -> None:
    with np.load(FOLDER / f"{case.replace(' ', '-')}.npz") as recorded:
        found = differences(dict(recorded), ours(pipeline, CASES[case], vae))
    assert set(found) == {
        "text",
        "velocity",
        "decoded",
        "encoded",
        "sigmas",
        "latents",
        "picture",
    }
    assert not excess(found), found


def test_every_recorded_case_is_compared() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {name.replace(" ", "-") for name in CASES}
