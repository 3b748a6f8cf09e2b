"""Measure the peak memory of a generation: ``python -m benchmarks.memory``.

A picture is made with the models of models.py, in float32, by ``aimage run``, by a pipeline with
each policy of its memory, and by diffusers (``from_pretrained``), each in a process of its own. The
peak is the resident memory of the whole process, with interpreter and libraries. The limit of the
policy auto is 0.6 times diffusers' peak, the goal of all policies but keep. diffusers offloads
networks from an accelerator only (``enable_model_cpu_offload``), so it has one row. Without
it, ratios are to the first tool, and auto has no limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks.models import SHAPES, Shape, build

PROMPT, STEPS, SEED = "a red fox in the snow", 2, 7
BASE = "diffusers"
TOOLS = (BASE, "run", "keep", "auto", "release")
GOAL = 0.6  # of its peak
COLUMNS = ("shape", "tool", "peak_mib", "ratio", "seconds", "difference")
Pixels = npt.NDArray[np.uint8]


def by_run(directory: Path, side: int, target: Path) -> list[str]:
    """Return the command of ``aimage run``, which releases each network after its last use."""
    command = ["-m", "clowder_aimage", "--store", f"{directory}.store", "run", "model", PROMPT]
    command += ["--local", "-q", "--dtype", "float32", "--size", f"{side}x{side}"]
    return [*command, "--steps", str(STEPS), "--seed", str(SEED), "-o", f"{target}.png"]


def by_policy(directory: Path, side: int, target: Path, policy: str, limit: int | None) -> None:
    """Make a picture with a pipeline; write its pixels."""
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.layout.stored_aimage import read_aimage
    from clowder_aimage.model.loader import load_pipeline
    from clowder_aimage.model.pipeline import Image
    from clowder_aimage.oci import Reference

    store = ImageLayout(Path(f"{directory}.store"))
    aimage = read_aimage(store, Reference.parse("model")).aimage
    pipeline = load_pipeline(store, aimage, dtype="float32")
    pipeline.set_memory(policy, limit, limit=limit)
    request = GenerateRequest.of(PROMPT, width=side, height=side, steps=STEPS, seed=SEED)
    pipeline.preload(request)
    for event in pipeline.generate(request):
        if isinstance(event, Image):
            np.save(target, event.pixels)


def by_diffusers(directory: Path, side: int, target: Path) -> None:
    import torch
    from diffusers import ZImagePipeline

    pipeline = ZImagePipeline.from_pretrained(directory, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(SEED)
    size = {"height": side, "width": side}
    made = pipeline(PROMPT, **size, num_inference_steps=STEPS, guidance_scale=0.0, generator=noise)
    np.save(target, np.asarray(made.images[0]))


def measure(directory: Path, side: int, tool: str, limit: int | None = None) -> dict[str, Any]:
    """Return the peak and the seconds of a tool in a process of its own, and its pixels."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "picture"
        if tool == "run":
            command = by_run(directory, side, target)
        else:
            command = ["-m", "benchmarks.memory", "--child", tool, str(directory), str(side)]
            command += [str(target), str(limit or 0)]
        begun = time.perf_counter()
        silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]  # stdout is for the table
        child = os.posix_spawn(
            sys.executable, [sys.executable, *command], os.environ, file_actions=silent
        )
        _, status, used = os.wait4(child, 0)
        if status:
            raise SystemExit(f"{tool} failed")
        seconds = time.perf_counter() - begun
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak": used.ru_maxrss * unit, "seconds": seconds, "pixels": read(target)}


def read(target: Path) -> Pixels:
    if (saved := Path(f"{target}.npy")).exists():
        return cast(Pixels, np.load(saved))
    with Image.open(f"{target}.png") as image:
        return np.asarray(image.convert("RGB"))


def rows(directory: Path, shape: Shape, tools: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a shape; ratios and differences are to the first tool."""
    side = SHAPES[shape].side
    base = measure(directory, side, tools[0])
    limit = int(GOAL * base["peak"]) if tools[0] == BASE else None
    for tool in tools:
        row = base if tool == tools[0] else measure(directory, side, tool, limit)
        difference = np.abs(row["pixels"].astype(int) - base["pixels"].astype(int))
        yield {
            "shape": shape,
            "tool": tool if tool == BASE else f"aimage {tool}",
            "peak_mib": row["peak"] >> 20,
            "ratio": round(row["peak"] / base["peak"], 2),
            "seconds": round(row["seconds"], 1),
            "difference": int(difference.max()),
        }


def child(tool: str, directory: Path, side: int, target: Path, limit: int) -> None:
    if tool == "diffusers":
        by_diffusers(directory, side, target)
    else:
        by_policy(directory, side, target, tool, (limit or None) if tool == "auto" else None)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        tool, directory, side, target, limit = sys.argv[2:]
        return child(tool, Path(directory), int(side), Path(target), int(limit))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), action="append", dest="shapes")
    parser.add_argument("--directory", type=Path, help="keep the models here for the next run")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each row")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one; repeatable")
    options = parser.parse_args()
    chosen = options.tool or TOOLS
    tools = [tool for tool in chosen if tool != BASE or importlib.util.find_spec(BASE)]
    with tempfile.TemporaryDirectory() as temporary:
        if not options.json:
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for shape in options.shapes or ("medium", "large"):
            model = build((options.directory or Path(temporary)) / shape, shape)
            _pack(model)
            for row in rows(model, shape, tools):
                cells = " | ".join(str(row[column]) for column in COLUMNS)
                print(json.dumps(row) if options.json else f"| {cells} |", flush=True)
    return None


def _pack(directory: Path) -> None:
    from clowder_aimage.create import create
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.oci import Reference

    create(ImageLayout(Path(f"{directory}.store")), Reference.parse("model"), directory)


if __name__ == "__main__":
    main()
