"""``run`` with the path of a model: it is packed under the name of its file, then run."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.test_remote_verbs import at
from tests.cli.test_run_text import Talker, talker, talker_files
from tests.process import Aimage, run
from tests.scripted_worker import ScriptedWorker, says
from tests.text.tiny_gguf import write_gguf
from tests.text.tiny_text import write_model

__all__ = ["at", "talker", "talker_files"]
TINY = Path(__file__).parents[2] / "examples/tiny"


def names(here: Aimage) -> dict[str, str]:
    """Return the digests of the names in the store."""
    return {one["reference"]: one["digest"] for one in json.loads(here("ls", "--json").out)}


@pytest.mark.parametrize("path", ["./Model.v1"])
def test_a_directory_is_packed_and_run(talker: Talker, talker_files: Path, path: str) -> None:
    here, _ = talker("Red.")
    shutil.copytree(talker_files, here.home / "Model.v1")
    said = here("run", path, "which?")
    assert said.out == "Red.\n"
    assert "aimage run model.v1:latest" in said.err and "aimage rm model.v1:latest" in said.err
    assert here("run", "model.v1", "which?").out == "Red.\n"
    assert names(here).keys() == {"model.v1:latest", "x:latest"}


def test_a_gguf_file_is_packed_and_run(talker: Talker, talker_files: Path) -> None:
    here, _ = talker("Red.")
    file = write_gguf(here.home / "Talk-1B.gguf", talker_files)
    assert here("run", file, "which?").out == "Red.\n"
    assert "talk-1b:latest" in names(here)
    (layer,) = here("show", "talk-1b", "--json").value["layers"]
    assert layer["digest"] == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


def test_another_model_of_that_name_stays(talker: Talker, talker_files: Path) -> None:
    here, _ = talker("Red.")
    here("tag", "x", "model")
    before = names(here)
    write_model(here.home / "model", seed=1)
    for _ in range(2):  # the second time, it is there
        assert here("run", "./model", "which?").out == "Red.\n"
    after = names(here)
    (other,) = after.keys() - before.keys()
    digest = after.pop(other)
    assert after == before
    assert other == f"model-{digest.removeprefix('sha256:')[:8]}:latest"


def test_a_stored_name_is_no_path(talker: Talker, talker_files: Path) -> None:
    here, _ = talker("Red.")
    (here.home / "x").mkdir()  # not a model
    assert here("run", "x", "which?").out == "Red.\n"


def test_what_cannot_be_run(aimage: Callable[..., Aimage]) -> None:
    here, one = aimage(), np.zeros((4, 4), np.float32)
    save_file({"a.lora_A.weight": one, "a.lora_B.weight": one}, here.home / "l.safetensors")
    save_file({"w": one}, here.home / "w.safetensors")
    (here.home / "empty").mkdir()
    said = here("run", "l.safetensors", "a fox", code=1).err
    assert "aimage run MODEL --lora l.safetensors" in said
    assert "aimage create NAME w.safetensors" in here("run", "w.safetensors", "a fox", code=1).err
    here("run", "empty", "a fox", code=1)
    assert not names(here)


def test_a_worker_has_models_of_its_own(at: Callable[[ScriptedWorker], Aimage]) -> None:
    worker = ScriptedWorker(lambda _: says({}))
    with worker.running():
        here = at(worker)
        (here.home / "model").mkdir()
        assert "--local" in here("run", "./model", "a fox", code=2).err
    assert not worker.asked


def test_missing_parts_are_named_with_the_command(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    """No file of another program has the tokenizer; a transformer alone lacks more."""
    here = aimage()
    here("create", "tiny", TINY)
    for layout, parts in (
        ("comfyui-all-in-one", "lacks tokenizer"),
        ("comfyui", "lacks text_encoder, vae, tokenizer"),
    ):
        here("export", "tiny", tmp_path / layout, "--as", layout)
        found = sorted((tmp_path / layout).glob("**/*.safetensors"))
        (file,) = (one for one in found if one.parent.name in ("checkpoints", "diffusion_models"))
        said = here("run", file, "a fox", code=2).err
        assert parts in said and f"aimage create NAME {file} --like REF" in said
    assert names(here).keys() == {"tiny:latest"}


def test_as_a_process(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    command = [sys.executable, "-m", "clowder_aimage", "run", str(TINY), "a fox"]
    more = ["--size", "32x32", "--steps", "1", "-o", "fox.png", "--local"]
    ended = run([*command, *more], env=here.env(), cwd=here.home)
    assert (ended.returncode, ended.stdout) == (0, b"fox.png\n")
    assert b"packed as tiny:latest" in ended.stderr
    assert (here.home / "fox.png").read_bytes().startswith(b"\x89PNG")
