"""Measure ``aimage create`` against a lower bound: ``python -m benchmarks.create``.

    python -m benchmarks.create [--gib 2] [--shards 8] [--runs 5] [--quantize [TYPE]]
                                [--directory DIR]
    python -m benchmarks.create --all-in-one [--gib 2] [--runs 5] [--directory DIR]

The benchmark creates a Z-Image directory whose transformer has ``--gib`` GiB of random BF16 in
shards. Each round runs each of these in a separate process, on an idle disk:

floor     a script of twenty lines: read the shards in pieces of 4 MiB, hash them with SHA-256,
          write them to new files and sync these
create    ``aimage create`` into a new store, which is synced as well

``--quantize`` adds two rows: ``aimage create --quantize int8``, or another TYPE, and MLX's own
quantization of the same tensors (to mxfp8 for fp8), evaluated one after the other on the CPU, in
three parts: reading, quantizing, and both. With ``--all-in-one`` the model is a single file for
ComfyUI instead: a transformer of the widths of Z-Image-Turbo, with the stacked projections that
``create`` divides, a small text encoder and the VAE. Figures are medians; rounds are interleaved.
Peak memory is that of the process, as the kernel reports it for children that have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.family.image_family import Z_IMAGE, LayoutComponent
from clowder_aimage.family.name_table import TensorChange
from clowder_aimage.importer import Recipe
from clowder_aimage.tensor import encode_header

MIB = 1024 * 1024
DIM, HIDDEN = 3840, 10240  # of Z-Image-Turbo
ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny"
WEIGHTS = "transformer/*.safetensors"
SPAWN = multiprocessing.get_context("spawn")

FLOOR = """
import hashlib, os, sys
target, *sources = sys.argv[1:]
os.mkdir(target)
buffer = memoryview(bytearray(4 * 1024 * 1024))
for number, source in enumerate(sources):
    digest = hashlib.sha256()
    with open(source, "rb", buffering=0) as file, open(f"{target}/{number}", "wb", 0) as copy:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            copy.write(buffer[:count])
        os.fsync(copy.fileno())
    print(digest.hexdigest())
"""
MLX = """
import sys, time
import mlx.core as mx
mode, bits, size, *paths = sys.argv[1:]
reading = quantizing = 0.0
for source in paths:
    for array in mx.load(source).values():
        begun = time.perf_counter()
        mx.eval(array)
        read = time.perf_counter()
        if array.ndim == 2:
            mx.eval(
                mx.quantize(
                    array, group_size=int(size), bits=int(bits), mode=mode, stream=mx.cpu
                )
            )
        quantizing += time.perf_counter() - read
        reading += read - begun
        del array
print(reading, quantizing)
"""


@dataclass
class Row:
    """Runs of one program: seconds, those of processors, and the peak resident memory in bytes."""

    seconds: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def make_model(directory: Path, size: int, shards: int) -> None:
    """Create a directory with ``size`` bytes of weights in a transformer."""
    shutil.copytree(TINY, directory)
    place = directory / "transformer"
    for path in place.glob("*.safetensors*"):
        path.unlink()
    weight_map: dict[str, str] = {}
    number = 0
    for shard in range(1, shards + 1):
        name = f"diffusion_pytorch_model-{shard:05}-of-{shards:05}.safetensors"
        tensors, left = [], size // shards
        while left > 0:
            shape = [(DIM, DIM), (DIM, DIM), (HIDDEN, DIM), (DIM, HIDDEN), (DIM,)][number % 5]
            if len(shape) == 2:
                shape = (max(1, min(shape[0], left // shape[1] // 2)), shape[1])
            tensors.append((f"layers.{number // 5}.{number % 5}.weight", "BF16", shape))
            left -= 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            number += 1
        weight_map |= dict.fromkeys((tensor[0] for tensor in tensors), name)
        _write(place / name, tensors, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (place / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def make_file(directory: Path, size: int) -> None:
    """Create a file for ComfyUI with at least ``size`` bytes of weights, beside its tokenizer."""
    shutil.copytree(TINY / "tokenizer", directory / "tokenizer")
    configs: dict[str, dict[str, Any]] = {
        name: json.loads((TINY / name / "config.json").read_text())
        for name in ("transformer", "text_encoder", "vae")
    }
    configs["transformer"] |= {"dim": DIM, "n_heads": 30, "n_layers": 0}
    configs["vae"] |= {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2}
    (file,) = Z_IMAGE.layouts["comfyui-all-in-one"]
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    while sum(2 * math.prod(shape) for _, _, shape in tensors) < size:
        configs["transformer"]["n_layers"] += 1
        tensors = [tensor for part in file.components for tensor in _stack(part, configs)]
    _write(directory / "z_image.safetensors", tensors)


def _stack(
    part: LayoutComponent, configs: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the tensors of a component in a file."""
    component = Z_IMAGE.get_component(part.component)
    shapes = component.shapes(configs[part.component])
    for name, members in component.dialects[part.dialect].invert(shapes).items():
        own = [shapes[member] for member, _ in members]
        shape = (sum(one[0] for one in own), *own[0][1:])
        is_kernel = members[0][1].change is TensorChange.UNIT_KERNEL
        yield part.prefix + name, "BF16", (*shape, 1, 1) if is_kernel else shape


def _write(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], seed: int = 0) -> None:
    """Write random numbers with the distribution of weights."""
    import numpy as np

    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(encode_header(tensors))
        for _, _, shape in tensors:
            for rows in _chunks(shape[0], 1024):
                values = rng.standard_normal((rows, *shape[1:]), np.float32) * 0.02
                file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def run(row: Row, command: list[str], place: Path) -> str:
    """Run a program that writes to ``place`` and return its output."""
    shutil.rmtree(place, ignore_errors=True)
    os.sync()
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    row.seconds.append(time.perf_counter() - begun)
    row.spent.append(usage.ru_utime + usage.ru_stime)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command[:4]} ended with {child.returncode}"
    row.memory.append(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    return said


def measure(directory: Path, gib: float, shards: int, runs: int, quantize: str | None) -> None:
    """Print the table of one size; without shards, that of a file for ComfyUI."""
    model = directory / f"model-{gib}"
    shutil.rmtree(model, ignore_errors=True)
    size = int(gib * 1024 * MIB)
    making = (
        SPAWN.Process(target=make_model, args=(model, size, shards))
        if shards
        else SPAWN.Process(target=make_file, args=(model, size))
    )
    making.start()  # a child's peak memory starts with its parent's: ours must stay small
    making.join()
    assert making.exitcode == 0
    paths = [str(path) for path in sorted(model.glob(WEIGHTS if shards else "*.safetensors"))]
    place = directory / "made"
    aimage = [sys.executable, "-m", "clowder_aimage.cli", "-q", "--store", str(place), "create"]
    rows: dict[str, Row] = {}

    def row(name: str) -> Row:
        return rows.setdefault(name, Row())

    for _ in range(runs):
        run(row("floor"), [sys.executable, "-c", FLOOR, str(place), *paths], place)
        run(row("create"), [*aimage, "m", str(model)], place)
        if quantize:
            quantized = row(f"create --quantize {quantize}")
            run(quantized, [*aimage, "m", str(model), f"--quantize={quantize}"], place)
            (quantization,) = Recipe.parse(quantize=quantize).quantize.values()
            kind = quantization.type
            terms = [kind.mode, str(kind.bits), str(kind.group_size)]
            mlx = [sys.executable, "-c", MLX, *terms, *paths]
            times = run(row("MLX, the whole process"), mlx, place)
            reading, quantizing = map(float, times.split())
            row("MLX, quantize alone").seconds.append(quantizing)
            row("MLX, read and quantize").seconds.append(reading + quantizing)
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(model)
    show(rows, gib, shards)


def show(rows: dict[str, Row], gib: float, shards: int) -> None:
    """Print the table; ratios are to the floor, and of quantizing to MLX's own."""
    files = f"{shards} shards" if shards else "one file for ComfyUI"
    print(f"\n| {gib} GiB in {files} | s, median | least | ratio | CPU s | peak MiB |")
    print("|---|---|---|---|---|---|")
    own = rows.get("MLX, quantize alone")
    for name, found in rows.items():
        base = own if own and ("quantize" in name or "MLX" in name) else rows["floor"]
        median = statistics.median(found.seconds)
        ratio = median / statistics.median(base.seconds)
        memory = f"{max(found.memory) / MIB:.0f}" if found.memory else ""
        spent = f"{statistics.median(found.spent):.2f}" if found.spent else ""
        print(
            f"| {name} | {median:.2f} | {min(found.seconds):.2f} | {ratio:.2f} | {spent} "
            f"| {memory} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", default="2", help="sizes, such as 1,2,4")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--all-in-one", action="store_true", help="a single file for ComfyUI")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quantize", nargs="?", const="int8", metavar="TYPE")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.all_in_one and options.quantize:
        parser.error("--quantize is measured with shards")
    shards = 0 if options.all_in_one else options.shards
    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        for gib in options.gib.split(","):
            measure(directory, float(gib), shards, options.runs, options.quantize)


if __name__ == "__main__":
    main()
