"""A worker with the backend PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.process import Aimage
from tests.worker.conftest import LocalWorker

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

PICTURE = ("--size", "32x32", "--steps", 2, "--seed", 5)


def test_a_worker_computes_with_pytorch(worker: LocalWorker, aimage: Callable[[], Aimage]) -> None:
    other, here = worker.start("--backend", "torch"), aimage()
    here.environment["AIMAGE_HOST"] = other.url
    made = here("run", "tiny", "a fox", *PICTURE, "-o", "x.png", "--json").value
    assert made["backend"].startswith("torch ")
    (row,) = here("ps", "--json").value
    assert row["reference"] == "tiny:latest"
