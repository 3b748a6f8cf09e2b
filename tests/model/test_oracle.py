"""diffusers' recorded answers for examples/tiny; tests/parity/record.py makes them anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.model.flow.pipeline import FlowPipeline
from tests.model.model_oracle import CASES, differences, excess, ours

FOLDER = Path(__file__).parent / "oracle"


@pytest.mark.parametrize("case", CASES)
def test_same_as_recorded(pipeline: FlowPipeline, case: str) -> None:
    with np.load(FOLDER / f"{case.replace(' ', '-')}.npz") as recorded:
        found = differences(dict(recorded), ours(pipeline, CASES[case]))
    assert set(found) == {
        "text",
        "velocity",
        "decoded",
        "sigmas",
        "latents",
        "picture",
    }
    assert not excess(found), found


def test_every_recorded_case_is_compared() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {name.replace(" ", "-") for name in CASES}
