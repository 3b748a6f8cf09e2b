"""``aimage export`` round trips, with the source deleted before the export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.abridged import abridge
from tests.exporter.conftest import files_in, tensors_in
from tests.process import Aimage
from tests.store import copy_store, unshare


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the embedded model as ``tiny``."""
    home = tmp_path_factory.mktemp("made")
    Aimage(home, home / "store")("create", "tiny", tiny)
    return home / "store"


@pytest.fixture
def here(aimage: Callable[..., Aimage], made: Path) -> Aimage:
    """Return the command line on a copy of that store."""
    found = aimage()
    copy_store(made, found.store)
    return found


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """Return a copy of the embedded model, which tests delete."""
    copy = tmp_path / "model"
    shutil.copytree(tiny, copy)
    return copy


def check_same(tiny: Path, out: Path) -> None:
    """Compare tensors bit by bit and other files byte by byte."""
    before, after = files_in(tiny), files_in(out)
    assert after.keys() == before.keys()
    for name in before:
        if name.endswith(".safetensors"):
            assert tensors_in(out / name) == tensors_in(tiny / name)
        else:
            assert after[name] == before[name]


def test_saved_loaded_and_exported_elsewhere(
    aimage: Callable[..., Aimage], model: Path, tiny: Path, tmp_path: Path
) -> None:
    here, there, third = aimage("here"), aimage("there"), aimage("third")
    digest = here("create", "tiny", model).line
    here("save", "tiny", "-o", "tiny.tar")
    shutil.rmtree(model)
    shutil.rmtree(here.store)
    there("load", "tiny.tar")
    done = there("export", "tiny", "out")
    assert done.line == "out"
    assert "out: 12 files (284 tensors), 1.2 MB" in done.err
    check_same(tiny, tmp_path / "out")
    assert third("create", "again", "out").line == digest


@pytest.mark.integration
def test_pushed_pulled_and_exported_elsewhere(
    aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path, repository: str
) -> None:
    here, there = aimage("here"), aimage("there")
    model, name = abridge(tiny, tmp_path / "model"), f"{repository}:v1"
    digest = here("create", name, model).line
    here("push", name)
    shutil.rmtree(model)
    shutil.rmtree(here.store)
    there("pull", name)
    there("export", name, "out", "-q")
    check_same(abridge(tiny, tmp_path / "again"), tmp_path / "out")
    assert there("create", "again", "out").line == digest


@pytest.mark.parametrize("dialect", ["ollama", "container", "custom"])
def test_every_dialect_exports_the_same_directory(
    aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path, dialect: str
) -> None:
    here = aimage()
    options = ["--manifest-type", "custom"] if dialect == "custom" else ["--dialect", dialect]
    here("create", "tiny", tiny, *options)
    here("export", "tiny", "out")
    check_same(tiny, tmp_path / "out")


def test_export_json_output(here: Aimage, tmp_path: Path) -> None:
    digest = here("show", "tiny", "--json").value["digest"]
    done = here("export", "tiny", "out", "--json")
    assert done.value == {
        "path": "out",
        "reference": "tiny:latest",
        "digest": digest,
        "files": 12,
        "tensors": 284,
        "size": sum(map(len, files_in(tmp_path / "out").values())),
        "copied": 9,
        "reflinked": 0,
        "hardLinked": 0,
        "quantized": {},
    }
    events = [json.loads(line) for line in done.err.splitlines()]
    assert events[0] == {
        "event": "plan",
        "level": "info",
        "task": "exporting",
        "reference": "tiny:latest",
        "size": events[0]["size"],
    }
    assert events[-1]["event"] == "note"


def test_export_with_links(here: Aimage, tiny: Path, tmp_path: Path) -> None:
    done = here("export", "tiny", "out", "--links")
    linked = sum(path.stat().st_nlink > 1 for path in (tmp_path / "out").rglob("*.json"))
    if linked:
        assert "9 hard-linked, 0 copied" in done.err
        assert "do not modify them" in done.err
    else:
        assert "8 reflinked, 0 hard-linked, 0 copied" in done.err
    check_same(tiny, tmp_path / "out")
    here("verify")
    here("rm", "tiny")
    here("gc", "--grace", "0")
    check_same(tiny, tmp_path / "out")


def test_export_quiet(here: Aimage) -> None:
    done = here("export", "tiny", "out", "-q")
    assert (done.out, done.err) == ("out\n", "")


def test_export_of_a_quantized_model(aimage: Callable[..., Aimage], tiny: Path) -> None:
    pytest.importorskip("mlx.core")
    here = aimage()
    here("create", "q", tiny, "--quantize", "transformer=int8,text_encoder=int4")
    done = here("export", "q", "out")
    assert "quantized weights in the format of MLX: text_encoder, transformer" in done.err
    assert here("export", "q", "two", "--json").value["quantized"] == {
        "text_encoder": "MLX",
        "transformer": "MLX",
    }


def test_usage_errors_of_export(here: Aimage) -> None:
    (here.home / "full").mkdir()
    (here.home / "full/mine").touch()
    for arguments, code, message in (
        (["tiny", "full"], 2, "aimage: full is not empty"),
        (["tiny", "no/where"], 2, "aimage: cannot create no/where: no such directory: no"),
        (["none", "out"], 3, "aimage: none:latest not found in the store"),
        (["a b", "out"], 2, "aimage: "),
        (["tiny", ""], 2, "aimage: DIR must not be empty"),
    ):
        done = here("export", *arguments, code=code)
        assert message in done.err
        assert done.out == ""
    assert not (here.home / "out").exists()
    assert [path for path in here.home.iterdir() if ".export-" in path.name] == []


def test_export_of_a_damaged_blob_fails(here: Aimage) -> None:
    layers = here("show", "tiny", "--json").value["layers"]
    digest = next(x["digest"] for x in layers if x["name"].endswith("to_q.weight"))
    path = here.store / "blobs/sha256" / digest.removeprefix("sha256:")
    data = path.read_bytes()
    unshare(path)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = here("export", "tiny", "out", code=5)
    assert "aimage verify --repair" in done.err
    assert not (here.home / "out").exists()
