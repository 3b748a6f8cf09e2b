"""Every program in benchmarks/ runs with its smallest sizes and prints its figures."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.process import run
from tests.program import find_program

NETWORKS = ("torch", "diffusers")
REGISTRY = ("docker-registry",)


@dataclass(frozen=True)
class Start:
    """A program with its smallest options.

    Args:
        command: The name of the module and the options.
        figure: A text of the output.
        packages: Without one of these modules the test is skipped.
        programs: Without one of these the test is skipped, or fails with AIMAGE_REQUIRE_TOOLS.
        has_goals: The exit code is 1 where a time is above its limit, as on a busy machine.
    """

    command: str
    figure: str
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    has_goals: bool = False

    @property
    def name(self) -> str:
        return self.command.split()[0]


STARTS = (
    Start("adapter --shape tiny --rounds 1", "| ratio_median |", ("mlx",)),
    Start("affinity --jobs 20 --workers 2 --load 0.1", "'met':"),
    Start("create --gib 0.01 --runs 1 --quantize", "| MLX, quantize alone |", ("mlx",)),
    Start(
        "first_picture --shape tiny --seconds 0.1 --rounds 1 --case 'aimage while pulling'",
        "| aimage while pulling |",
        ("mlx",),
        REGISTRY,
    ),
    Start("fleet --nodes 2 --mib 1 --rounds 1 --ways alone,near", "| near |", (), REGISTRY),
    Start(
        "gateway streams --workers 1 --streams 2 --seconds 0.02",
        "whole                       2",
        (),
        ("nats-server",),
    ),
    Start(
        "gpu --tiny --root {place} --out {place}.jsonl --parts 'make,create,eager,worker eager'",
        "| worker eager: first picture s |",
        NETWORKS,
    ),
    Start("http_server --rounds 1 --mib 8", "| GET 8 MiB s |", (), REGISTRY),
    Start("idle --counts 1 --layers 10 --rounds 1 --seconds 0.1 --settle 0", "| open files |"),
    Start(
        "jobs --workers 1 --gateways 1 --jobs 2 --clients 2",
        "p99_ms",
        ("mlx",),
        ("nats-server",),
    ),
    Start(
        "load --count 3 --kib 4 --rounds 1 --way ModelWeights.load",
        "| ModelWeights.load |",
        ("mlx",),
    ),
    Start("memory --shape tiny --tool keep --tool auto", "| aimage auto |", ("mlx",)),
    Start("models {place} --shape tiny", "{place}"),
    Start("page --runs 1", '"first_paint"', ("mlx", "playwright"), ("chromium",), has_goals=True),
    Start("quality --precisions float32,fp8 --scenes 1", "| fp8 | 21 |", ("mlx",)),
    Start("receive --shapes s --servers aimage,aimage:2 --rounds 1", "| s | aimage:2 |"),
    Start("rederive --gib 0.01 --rounds 1", "| rederive int8 |", ("mlx",)),
    Start("serve --rounds 1 --side 64", "| HTTP, stream |", ("mlx",)),
    Start("simulate --nodes 2,4 --mib 1", "| 4 |"),
    Start(
        "soak --minutes 0.02 --calm 0.01 --idle 2",
        "| registry: manifest |",
        ("mlx",),
        has_goals=True,
    ),
    Start("startup --runs 1", "| aimage ls |"),
    Start("step --shape tiny --part step --tool aimage --rounds 1", "| aimage |", ("mlx",)),
    Start("store --counts 2 --layers 10 --blobs 10 --rounds 1", "| durable |"),
    Start("text --shape tiny --tokens 4 --rounds 1", "| worker |", ("mlx_lm",)),
    Start(
        "text --runtime llama.cpp --whole --clients 2 --shape tiny --tokens 4 --rounds 1",
        "| worker |",
        ("xllamacpp",),
    ),
    Start(
        "text --runtime llama.cpp --shape tiny --tokens 4 --rounds 1", "| worker |", ("xllamacpp",)
    ),
    Start(
        "torch_backend --layers 1 --side 32 --steps 2 --repeat 1 --measure picture",
        "| picture, warm |",
        NETWORKS,
    ),
    Start(
        "transfer --link --push --delta --shapes s --rounds 1 --peers skopeo",
        "| aimage pull |",
        (),
        (*REGISTRY, "skopeo", "curl"),
    ),
    Start(
        "transfer --push --shapes s --rounds 1 --peers skopeo --tls",
        "| push over TLS |",
        (),
        (*REGISTRY, "skopeo"),
    ),
)
# They run in children of these programs
CHILDREN = {"attack": "soak", "link": "transfer", "wire": "fleet"}


def test_each_program_is_started() -> None:
    programs = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    }
    started = {start.name for start in STARTS}
    assert programs == started | {*CHILDREN} and {*CHILDREN.values()} <= started


def test_tools_that_are_not_installed_are_named() -> None:
    words = ["--push", "--shapes", "s", "--peers", "skopeo,bamboo"]
    done = run([sys.executable, "-m", "benchmarks.transfer", *words], cwd=ROOT, text=True)
    assert done.returncode == 2
    assert "not a known tool in PATH:" in done.stderr and "bamboo" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="some programs read /proc")
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.command.partition(" --")[0])
def test_a_program_runs_with_its_smallest_sizes(start: Start, tmp_path: Path) -> None:
    for name in start.programs:
        find_program(name)
    if absent := [name for name in start.packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    words = shlex.split(start.command.format(place=tmp_path / "model"))
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # other tests run at the same time
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = run(command, cwd=ROOT, env=environment, text=True)
    about = done.stdout + done.stderr
    assert done.returncode in ((0, 1) if start.has_goals else (0,)), about
    assert start.figure.format(place=tmp_path / "model") in done.stdout, about
    assert "Traceback" not in about and "Error" not in done.stdout, about
