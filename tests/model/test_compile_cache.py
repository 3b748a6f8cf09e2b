"""Compiled code is kept in the store, for the surroundings that it was compiled for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from clowder_aimage import __version__
from clowder_aimage.layout.compiled import open_compiled
from tests.process import run

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

from clowder_aimage.model.torch import compile_cache  # noqa: E402 - needs torch

_PROGRAM = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from clowder_aimage.model.torch.compile_cache import keep_compiled
keep_compiled(Path(sys.argv[1]), "cpu")
config.compile_threads = 1
print(torch.compile(lambda x: (x + 1).sin())(torch.ones(8)).sum().item())
found = counters["inductor"]
hits = found["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print(hits, found["fxgraph_cache_miss"])
"""


def test_the_directory_is_one_that_only_its_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = open_compiled(tmp_path)
    assert found == tmp_path / ".aimage" / "compiled" and found == open_compiled(tmp_path)
    found.chmod(0o777)
    assert open_compiled(tmp_path) == found and not found.stat().st_mode & 0o022
    monkeypatch.setattr(os, "geteuid", lambda: found.stat().st_uid + 1)
    assert open_compiled(tmp_path) is None
    monkeypatch.undo()
    found.rmdir()
    found.symlink_to(tmp_path)
    assert open_compiled(tmp_path) is None


def test_a_store_of_a_group_has_no_such_directory(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o2775)
    assert open_compiled(root) is None and not (root / ".aimage").exists()


def test_the_name_has_all_that_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    name = compile_cache.name_surroundings("cpu")
    assert name.startswith("cpu_") and name.endswith(f"aimage-{__version__}")
    assert torch.__version__ in name and "/" not in name
    cuda = SimpleNamespace(get_device_name=lambda one: f"NVIDIA H{one.index or 0}/x")
    monkeypatch.setattr(torch, "cuda", cuda)
    names = {compile_cache.name_surroundings(one) for one in ("cuda", "cuda:1")}
    assert {one.partition("_")[0] for one in names} == {"NVIDIA-H0-x", "NVIDIA-H1-x"}
    monkeypatch.setattr(compile_cache, "_PROCESSORS", Path("/nowhere"))
    assert compile_cache.name_surroundings("cpu") != name


def test_a_directory_that_the_user_names_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    compile_cache.keep_compiled(tmp_path, "cpu")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
        environment = {**os.environ}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        done = run(command, env=environment, text=True)
        assert not done.returncode, done.stderr
        outputs.append(done.stdout.split())
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1:] == ["0", "1"] and outputs[1][2] == "0" and int(outputs[1][1])
