"""Requests that a model does not support are refused before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from clowder_aimage.create import create
from clowder_aimage.engine import scheduler
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.generation.request import LoraUse
from clowder_aimage.layout.layered_store import LayeredStore
from tests.conftest import TINY
from tests.lora_file import write_lora
from tests.worker.engine_runs import NAME, FakeRunner, job, played, served


@pytest.fixture(scope="module")
def stored_models(tmp_path_factory: pytest.TempPathFactory) -> LayeredStore:
    store = LayeredStore([tmp_path_factory.mktemp("check") / "store"])
    # The shapes of tensors that have blobs are in the manifest
    create(store, NAME, TINY)
    return store


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    write_lora(folder / "ink.safetensors")
    write_lora(folder / "wide.safetensors", width=64)
    return folder


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"width": 33}, UsageError, "width must be a multiple of 16"),
        ({"references": ("sha256:" + "0" * 64,)}, UsageError, "does not see reference pictures"),
        ({"loras": (LoraUse("wide"),)}, FormatError, "64"),
        ({"loras": (LoraUse("absent"),)}, NotFoundError, "absent"),
    ],
)
def test_a_request_is_refused_before_the_model_is_loaded(
    stored_models: LayeredStore,
    lora_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, Any],
    error: type[AImageError],
    text: str,
) -> None:
    async def start(*_: object) -> FakeRunner:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(scheduler, "Runner", FakeRunner)
    monkeypatch.setattr(FakeRunner, "start", start)

    async def play(engine: Any) -> None:
        with pytest.raises(error, match=text):
            await served(engine, job(parameters=parameters))

    played(stored_models, play, lora_dir=str(lora_dir))


def test_a_request_that_the_model_supports_is_served(
    stored_models: LayeredStore, lora_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "Runner", FakeRunner)

    async def play(engine: Any) -> int:
        parameters = {"loras": (LoraUse("ink"),), "width": 64, "height": 32}
        return len(await served(engine, job(parameters=parameters)))

    assert played(stored_models, play, lora_dir=str(lora_dir)) > 3
