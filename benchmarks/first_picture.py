"""Measure the time from the start of a process to its first step and its first picture.

    python -m benchmarks.first_picture [--shape small|medium|large] [--seconds 20] [--rounds 3]
        [--case NAME] [--json] [--directory DIR]

warm            the model is in the store, and its files are in the page cache
cold            the same without the page cache
pull, then run  ``aimage pull`` and ``aimage run``, one after another
while pulling   ``aimage run`` of a model that the store lacks
int4 first      the same with ``--first int4``: a smaller variant in the registry is used
diffusers       ``from_pretrained`` of the directory that the AImage is made of, warm and cold

Pulls are from docker-registry through ``link.py``: one link, shared by all connections, over which
the model takes ``--seconds``. The goal of "while pulling": its first step comes at most 1 s after
the longer one of the pull alone and of "warm".

Rows are medians of interleaved rounds. Needs docker-registry; without torch and diffusers their
rows are left out. ``--directory`` keeps the models for the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.link import link
from benchmarks.models import SHAPES, build
from benchmarks.transfer import registry

if TYPE_CHECKING:
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.model.pipeline import PipelineEvent

PROMPT, STEPS = "a red circle on a blue square", "2"
PRECISION = "int4"  # of the variant
OURS, THEIRS = "aimage", "diffusers"
AIMAGE = [sys.executable, "-m", "clowder_aimage"]
_MARK = "first step at "


@dataclass
class Run:
    """The places and options of a run; ``host`` is the registry behind the link."""

    model: Path
    store: Path
    empty: Path
    picture: Path
    side: int
    host: str

    @property
    def name(self) -> str:
        return f"{self.host}/bench/model:v1"


Times = tuple[float, float]  # seconds from the start to the first step, and to the end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the model over the link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print rows as lines of JSON")
    parser.add_argument("--directory", type=Path, help="keep the models here")
    known = _cases()
    parser.add_argument("--case", action="append", choices=known, help="only this one; repeatable")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        root = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = root.resolve() / options.shape
        root.mkdir(parents=True, exist_ok=True)
        model = build(root / "model", options.shape)
        store = root / "store"
        _aimage(store, "create", "bench/model:v1", str(model))
        there = stack.enter_context(registry(root / "registry"))
        _aimage(store, "tag", "bench/model:v1", f"{there}/bench/model:v1")
        _aimage(store, "push", f"{there}/bench/model:v1")
        _attach(store, f"{there}/bench/model", PRECISION)
        size = sum(path.stat().st_size for path in _files(model))
        through = stack.enter_context(link(there, size / options.seconds, shared=True))
        side = SHAPES[options.shape].side
        run = Run(model, store, root / "empty", root / "picture.png", side, through.host)
        _aimage(store, "tag", "bench/model:v1", run.name)
        rows: dict[str, list[Times]] = {}
        for _ in range(options.rounds):
            for case in options.case or known:
                rows.setdefault(case, []).append(known[case](run))
        shutil.rmtree(run.empty, ignore_errors=True)
    _print(options.shape, size, rows, as_json=options.json)


def _cases() -> dict[str, Callable[[Run], Times]]:
    """Return the cases by their names; each starts with ``aimage`` or the name of the peer."""
    cases: dict[str, Callable[[Run], Times]] = {
        "aimage warm": _warm,
        "aimage cold": _cold,
        "aimage pull, then run": _pull_then_run,
        "aimage while pulling": _while_pulling,
        f"aimage {PRECISION} first": _variant_first,
    }
    if all(importlib.util.find_spec(name) for name in ("torch", "diffusers")):
        cases |= {"diffusers warm": _diffusers, "diffusers cold": _diffusers_cold}
    return cases


def _warm(run: Run) -> Times:
    _read(run.store)
    return _child(run, OURS, str(run.store), run.name)


def _cold(run: Run) -> Times:
    _drop(run.store)
    return _child(run, OURS, str(run.store), run.name)


def _pull_then_run(run: Run) -> Times:
    pulled = _pull(run)
    step, end = _child(run, OURS, str(run.empty), run.name)
    return pulled + step, pulled + end


def _while_pulling(run: Run) -> Times:
    shutil.rmtree(run.empty, ignore_errors=True)
    os.sync()
    return _child(run, OURS, str(run.empty), run.name)


def _variant_first(run: Run) -> Times:
    shutil.rmtree(run.empty, ignore_errors=True)
    os.sync()
    return _child(run, OURS, str(run.empty), run.name, "--first", PRECISION)


def _diffusers(run: Run) -> Times:
    _read(run.model)
    return _child(run, THEIRS, str(run.model))


def _diffusers_cold(run: Run) -> Times:
    _drop(run.model)
    return _child(run, THEIRS, str(run.model))


def _pull(run: Run) -> float:
    """Return the seconds of a pull into an empty store."""
    shutil.rmtree(run.empty, ignore_errors=True)
    os.sync()
    begun = time.monotonic()
    _aimage(run.empty, "pull", run.name)
    return time.monotonic() - begun


def _attach(store: Path, repository: str, precision: str) -> None:
    """Push a variant of the AImage with the tag v1."""
    names = f"{repository}:v1", f"{repository}:{precision}"
    _aimage(store, "convert", *names, "--quantize", precision, "--attach")
    _aimage(store, "push", names[1])


def _aimage(store: Path, *arguments: str) -> None:
    command = [*AIMAGE, "--store", str(store), *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed: {done.stderr[-500:]}")


def _child(run: Run, tool: str, *arguments: str) -> Times:
    """Run this file as the process to measure."""
    command = [sys.executable, "-m", "benchmarks.first_picture", "--child", tool]
    command += [str(run.picture), str(run.side), *arguments]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    end = time.monotonic()
    marks = [line for line in done.stderr.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marks:
        sys.exit(f"{tool} failed: {done.stderr[-2000:]}")
    return float(marks[0].removeprefix(_MARK)) - begun, end - begun


def _mark() -> None:
    print(f"{_MARK}{time.monotonic()}", file=sys.stderr, flush=True)


def _child_aimage(picture: str, side: str, store: str, name: str, *more: str) -> None:
    """Run the verb, and print when its first step is done."""
    from clowder_aimage.generate import RunnableModel

    original = RunnableModel.generate

    def watched(model: RunnableModel, request: GenerateRequest) -> Iterator[PipelineEvent]:
        with contextlib.closing(original(model, request)) as events:
            yield next(events)
            _mark()
            yield from events

    RunnableModel.generate = watched  # type: ignore[method-assign, assignment]
    options = ["--size", f"{side}x{side}", "--steps", STEPS, "--seed", "1", "-o", picture]
    options += ["--dtype", "float32", *more]
    sys.argv = ["aimage", "-q", "--store", store, "run", name, PROMPT, *options]
    runpy.run_module("clowder_aimage", run_name="__main__")


def _child_diffusers(picture: str, side: str, model: str) -> None:
    import torch
    from diffusers import ZImagePipeline

    pipeline = ZImagePipeline.from_pretrained(model, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    is_first = True

    def stepped(_: object, __: int, ___: object, kept: dict[str, object]) -> dict[str, object]:
        nonlocal is_first
        if is_first:
            _mark()
        is_first = False
        return kept

    made = pipeline(
        PROMPT,
        width=int(side),
        height=int(side),
        num_inference_steps=int(STEPS),
        guidance_scale=0.0,
        generator=torch.Generator().manual_seed(1),
        callback_on_step_end=stepped,
    )
    made.images[0].save(picture)


def _read(root: Path) -> None:
    """Read all files below ``root`` into the page cache."""
    for path in _files(root):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _drop(root: Path) -> None:
    """Drop all files below ``root`` from the page cache."""
    os.sync()
    for path in _files(root):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def _print(shape: str, size: int, rows: dict[str, list[Times]], *, as_json: bool) -> None:
    if not as_json:
        print(f"{shape}, {size / 1e6:.0f} MB\n")
        print("| case | first step s | picture s |\n|---|---|---|")
    for case, times in rows.items():
        step, end = (statistics.median(each) for each in zip(*times, strict=True))
        if as_json:
            facts = {"case": case, "shape": shape, "bytes": size, "rounds": len(times)}
            print(json.dumps(facts | {"first_step_s": round(step, 3), "picture_s": round(end, 3)}))
        else:
            print(f"| {case} | {step:.2f} | {end:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        children: dict[str, Callable[..., None]] = {OURS: _child_aimage, THEIRS: _child_diffusers}
        children[sys.argv[2]](*sys.argv[3:])
    else:
        main()
