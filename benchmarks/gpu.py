"""A model of the size of Z-Image on a GPU, beside diffusers: ``python -m benchmarks.gpu --full``.

    python -m benchmarks.gpu --tiny
    python -m benchmarks.gpu --full --root /dev/shm/gpu --out gpu.jsonl --parts load,theirs

Random weights are made on the device. Each part is a process of its own, and writes its figures to
``--out`` as it has them, a JSON object a line, so that a run that is stopped has those before. A
run ends within ``--seconds``, 345: parts that would begin later are left out, and named. With
``--full`` each part has a limit of time too. The goals are compared at the end: they are those of
one H100. ``--tiny`` runs the same parts with a small model, on a CPU too, which shows that they
work and nothing else.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.models import Shape, Tensor

PROMPT = "a red fox in the snow, at dawn, by a river"
NAME = "gpu"
# Ways to compute: the options of TorchTuning, and those of a worker
WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "eager": ({"compile": "never"}, ("--compile", "never")),
    "compiled": ({"compile": "now"}, ("--compile", "now")),
    "fp8": ({"compile": "now", "compute": "fp8"}, ("--compile", "now", "--compute", "fp8")),
}
# The most seconds of each part, in the order of their worth
PARTS = {
    "make": 80,
    "create": 60,
    "eager": 70,
    "theirs": 90,
    "compiled": 110,
    "fp8": 110,
    "worker eager": 80,
    "worker compiled": 110,
    "worker fp8": 110,
}
# Of a figure, by the part and its name: at least, or at most
GOALS: dict[tuple[str, str], tuple[str, float]] = {
    ("eager", "load again s"): ("<=", 1.5),
    ("compiled", "step 1024 ms"): ("<=", 100),
    ("compiled", "step 512 ms"): ("<=", 25),
    ("worker eager", "first picture s"): ("<=", 10),
    ("worker compiled", "1024 in turn a second"): (">=", 1.1),
    ("worker compiled", "512 at once a second"): (">=", 5),
    ("fp8", "step 1024 ms"): ("<=", 73),
    ("worker fp8", "1024 in turn a second"): (">=", 1.5),
}
_GIB = 1 << 30
# Passes at once of a small model, for which no device was measured to gain
_TINY_BATCH = 4
# Seconds for the end of a part that was too slow
_END = 8
# Files and blobs take 41 GB, which a disk may read more slowly than a GPU
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Run:
    """The options of a run. ``sides``: of large and of small pictures; ``repeat``: of each.

    batch: the passes at once; None for as many as the device is measured to gain by.
    """

    root: Path
    out: Path
    shape: Shape
    sides: tuple[int, int]
    steps: int
    repeat: int
    clients: int
    batch: int | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Run:
        if options.full:
            return cls(options.root, options.out, "full", (1024, 512), 8, 3, 8)
        return cls(options.root, options.out, "tiny", (64, 32), 2, 2, 2, _TINY_BATCH)

    def write(self, part: str, **figures: Any) -> None:
        """Add figures of a part to the file, and print them."""
        line = json.dumps({"part": part, **figures})
        with self.out.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def label(self, side: int) -> int:
        """Return the side of a full picture that one of this run stands for."""
        return 1024 if side == self.sides[0] else 512


def measure_on_device(run: Run, part: str) -> Callable[..., None]:
    """Return a function that writes figures with the peak of the memory since the last call."""
    import torch

    def write(**figures: Any) -> None:
        if torch.cuda.is_available():
            figures["peak GiB"] = round(torch.cuda.max_memory_allocated() / _GIB, 2)
            torch.cuda.reset_peak_memory_stats()
        run.write(part, **figures)

    return write


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- the model


def make(run: Run) -> None:
    """Write the model as a diffusers directory, with values that the device draws."""
    import torch

    is_gpu = torch.cuda.is_available()
    begun = time.perf_counter()
    # The encoder leaves out its last layer
    layers = 2 if run.shape == "tiny" else None
    models.build(run.root / "files", run.shape, text_layers=layers, write=write_component)
    device = torch.cuda.get_device_name() if is_gpu else "cpu"
    size = sum(file.stat().st_size for file in (run.root / "files").rglob("*.safetensors"))
    facts = {"device": device, "torch": torch.__version__, "cores": os.cpu_count()}
    run.write("make", seconds=round(time.perf_counter() - begun, 2), bytes=size, **facts)


def write_component(
    directory: Path, component: str, config: dict[str, Any], tensors: Iterator[Tensor]
) -> None:
    """Write a component in bfloat16, as ``models.build`` asks for it."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = {**config, "dtype": "bfloat16"} if "dtype" in config else config
    named = list(tensors)
    with models.open_component(directory, component, config, named, "BF16") as file:
        for name, shape in named:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            base, scale = models.find_spread(name, shape)
            values = torch.randn(shape, generator=generator, device=device) * scale + base
            file.write(values.bfloat16().cpu().contiguous().view(torch.uint8).numpy().data)


def create(run: Run) -> None:
    """Create the AImage."""
    begun = time.perf_counter()
    command = [*_aimage(run), "create", NAME, str(run.root / "files"), "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run.write("create", seconds=round(time.perf_counter() - begun, 2))


def _aimage(run: Run) -> list[str]:
    os.environ["AIMAGE_STORE"] = str(run.root / "store")
    return [sys.executable, "-m", "clowder_aimage"]


# -- in a process


def ours(run: Run, way: str) -> None:
    """Load the model, and make pictures: the first, warm ones, and after another load."""
    begun = time.perf_counter()
    from clowder_aimage.generation.request import GenerateRequest
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.layout.compiled import open_compiled
    from clowder_aimage.layout.stored_aimage import read_aimage
    from clowder_aimage.model.library_choice import TorchTuning
    from clowder_aimage.model.loader import load_pipeline
    from clowder_aimage.model.pipeline import Image, Step
    from clowder_aimage.oci import Reference

    layout = ImageLayout(run.root / "store")
    aimage = read_aimage(layout, Reference.parse(NAME)).aimage
    write = measure_on_device(run, way)
    # The measured batches are kept there for the worker
    compiled = open_compiled(run.root / "store")
    tuning = TorchTuning(
        **WAYS[way][0], batch=run.batch, compiled=None if compiled is None else str(compiled)
    )
    pipeline = load_pipeline(layout, aimage, backend="torch", dtype="bfloat16", tuning=tuning)
    write(**{"open s": round(time.perf_counter() - begun, 2)})

    def request(side: int, seed: int = 0) -> GenerateRequest:
        return GenerateRequest.of(PROMPT, width=side, height=side, steps=run.steps, seed=seed)

    def load(what: str) -> None:
        begun = time.perf_counter()
        pipeline.preload(request(run.sides[0]))
        synchronize()
        write(**{f"{what} s": round(time.perf_counter() - begun, 3)})

    def picture(side: int, seed: int) -> tuple[float, float, Any]:
        """Return the seconds of a picture and of its steps, and its pixels."""
        begun, ends = time.perf_counter(), list[float]()
        for event in pipeline.generate(request(side, seed)):
            if isinstance(event, Step):
                ends.append(time.perf_counter())
        assert isinstance(event, Image)
        steps = [after - before for before, after in itertools.pairwise(ends)]
        return time.perf_counter() - begun, statistics.median(steps), event.pixels

    load("load")
    for side in run.sides:
        first, _, pixels = picture(side, 0)
        if side == run.sides[0]:
            _keep_picture(run, way, pixels)
            _compare_picture(run, way)
        taken = [picture(side, seed)[:2] for seed in range(1, run.repeat + 1)]
        label = run.label(side)
        figures = {
            f"first {label} s": round(first, 3),
            f"picture {label} s": round(statistics.median(each[0] for each in taken), 4),
            f"step {label} ms": round(1000 * statistics.median(each[1] for each in taken), 2),
        }
        write(**figures)
    write(batches=pipeline.library.batches.to_json())
    side, label = run.sides[1], run.label(run.sides[1])
    many = request(side).change(n=run.clients)
    # The first time, code is compiled and passes are recorded
    for _ in range(1 if way == "eager" else 2):
        begun = time.perf_counter()
        images = [event for event in pipeline.generate(many) if isinstance(event, Image)]
        seconds = time.perf_counter() - begun
    figures = {f"{label} of {run.clients} a second": round(run.clients / seconds, 3)}
    write(**figures, **{"passes at once": max(image.batch for image in images)})
    if way != "eager":
        # The same files are read in each way
        return
    pipeline.sleep()
    load("load again")
    pipeline.sleep()
    begun = time.perf_counter()
    pipeline.copy_to_host(64 * _GIB, lambda: False)
    write(**{"copy to host s": round(time.perf_counter() - begun, 2)})
    load("load from host")


def theirs(run: Run) -> None:
    """Do the same with diffusers, and compare the picture."""
    import numpy as np
    import torch
    from diffusers import ZImagePipeline

    torch.set_grad_enabled(False)
    write = measure_on_device(run, "theirs")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.perf_counter()
    pipeline = ZImagePipeline.from_pretrained(run.root / "files", dtype=torch.bfloat16)
    pipeline = pipeline.to(device)
    synchronize()
    write(**{"load s": round(time.perf_counter() - begun, 3)})
    pipeline.set_progress_bar_config(disable=True)

    def picture(side: int, seed: int) -> tuple[float, float, Any]:
        ends: list[float] = []

        def note(*_: Any) -> dict[str, Any]:
            synchronize()
            ends.append(time.perf_counter())
            return {}

        begun = time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        how: dict[str, Any] = {"guidance_scale": 0.0, "num_inference_steps": run.steps}
        how |= {"generator": generator, "callback_on_step_end": note, "output_type": "np"}
        pixels = pipeline(PROMPT, width=side, height=side, **how).images[0]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        return time.perf_counter() - begun, statistics.median(steps), pixels

    for side in run.sides:
        *_, pixels = picture(side, 0)
        if side == run.sides[0]:
            _keep_picture(run, "theirs", (pixels * 255).round().astype(np.uint8))
            for way in WAYS:
                _compare_picture(run, way)
        taken = [picture(side, seed)[:2] for seed in range(1, run.repeat + 1)]
        label = run.label(side)
        figures = {
            f"picture {label} s": round(statistics.median(each[0] for each in taken), 4),
            f"step {label} ms": round(1000 * statistics.median(each[1] for each in taken), 2),
        }
        write(**figures)


def _keep_picture(run: Run, way: str, pixels: Any) -> None:
    import numpy as np

    np.save(run.root / f"{way}.npy", pixels)


def _compare_picture(run: Run, way: str) -> None:
    """Write the difference of diffusers' picture from ours of the same seed, if both are made."""
    import numpy as np

    files = [run.root / f"{maker}.npy" for maker in (way, "theirs")]
    if all(file.exists() for file in files):
        ours, theirs = (np.load(file).astype(int) for file in files)
        difference = np.abs(ours - theirs)
        largest, mean = int(difference.max()), round(float(difference.mean()), 3)
        run.write("theirs", **{f"from {way}, largest": largest, f"from {way}, mean": mean})


# -- over HTTP


def worker(run: Run, way: str) -> None:
    """Measure pictures of a worker: the first one, in turn, and of several clients at once."""
    part = f"worker {way}"
    begun = time.perf_counter()
    command = [*_aimage(run), "serve", "--addr", "127.0.0.1:0", "--backend", "torch"]
    command += ["--dtype", "bfloat16", "--default-model", NAME, "--log-level", "warning"]
    command += ["--queue", "64", *WAYS[way][1], "--batch", str(run.batch or "auto")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().split()[-1]
            ask = partial(_ask, url, run.steps)
            ask(run.sides[0], 0)
            run.write(part, **{"first picture s": round(time.perf_counter() - begun, 2)})
            for side in run.sides:
                label = run.label(side)
                ask(side, 0)
                rate = _time(run.repeat + 1, partial(_ask_in_turn, ask, side))
                run.write(part, **{f"{label} in turn a second": rate})
                # Code for batches is compiled by the first small ones
                for _ in range(2 if side == run.sides[1] else 1):
                    rate = _time(run.clients, partial(_ask_at_once, ask, side))
                run.write(part, **{f"{label} at once a second": rate})
            run.write(part, batches=_find_batches(url))
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()


def _ask(url: str, steps: int, side: int, seed: int) -> None:
    """Request a picture, and check that it is a PNG file."""
    body = {"model": NAME, "prompt": PROMPT, "size": f"{side}x{side}", "seed": seed}
    body |= {"steps": steps, "response_format": "b64_json"}
    request = urllib.request.Request(
        f"{url}/v1/images/generations",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        (answer,) = json.load(response)["data"]
    assert base64.b64decode(answer["b64_json"]).startswith(b"\x89PNG")


def _find_batches(url: str) -> Any:
    """Return the measured batches of the model."""
    with urllib.request.urlopen(f"{url}/v1/worker", timeout=30) as response:
        (model,) = json.load(response)["batches"]
    return model["limits"]


def _ask_in_turn(ask: Callable[[int, int], None], side: int, count: int) -> None:
    for seed in range(count):
        ask(side, seed)


def _ask_at_once(ask: Callable[[int, int], None], side: int, count: int) -> None:
    pool = ThreadPoolExecutor(count)
    try:
        list(pool.map(partial(ask, side), range(count)))
    finally:
        # After an error the worker is ended at once, which ends the others
        pool.shutdown(wait=False, cancel_futures=True)


def _time(count: int, work: Callable[[int], None]) -> float:
    """Return how many of ``count`` pictures ``work`` makes a second."""
    begun = time.perf_counter()
    work(count)
    return round(count / (time.perf_counter() - begun), 3)


# -- the run


def do_part(run: Run, part: str) -> None:
    """Do a part in this process. SIGTERM ends it, and what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))
    if part == "make":
        make(run)
    elif part == "create":
        create(run)
    elif part == "theirs":
        theirs(run)
    elif part.startswith("worker "):
        worker(run, part.removeprefix("worker "))
    else:
        ours(run, part)


def run_parts(options: argparse.Namespace) -> None:
    """Run each part as a process, within its limit and that of the run."""
    run, end = Run.of(options), time.monotonic() + options.seconds
    # A worker has the compiled code of the part before it
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.root / "compiled"))
    for part in options.parts:
        # The rest is for the end of the process, and the summary
        rest = end - time.monotonic() - _END
        # A CPU compiles for minutes
        limit = min(PARTS[part], rest) if options.full else rest
        if limit < min(20, PARTS[part]):
            run.write(part, error="left out: the time of the run is over")
            continue
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part]
        command += ["--root", str(options.root), "--out", str(options.out)]
        command += ["--full" if options.full else "--tiny"]
        begun = time.monotonic()
        # A session of its own, which is ended with all that is in it
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
        try:
            _, said = process.communicate(timeout=limit)
            error = said.decode(errors="replace").strip().splitlines()[-3:]
            if process.returncode:
                run.write(part, error=error)
        except subprocess.TimeoutExpired:
            run.write(part, error=f"ended after {limit:.0f} s, its limit")
            # The models of a worker have sessions of their own: the worker ends them
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A compiler may have left the session with the other end of the pipe
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END)
        run.write(part, **{"part took s": round(time.monotonic() - begun, 1)})
    summarize(run)


def summarize(run: Run) -> None:
    """Print the table of figures, and of goals."""
    figures: dict[tuple[str, str], float] = {}
    for line in run.out.read_text().splitlines():
        values = json.loads(line)
        part = values.pop("part")
        figures |= {(part, name): value for name, value in values.items()}
    print("\n| | goal | found | |\n|---|---|---|---|")
    for (part, name), (sign, goal) in GOALS.items():
        found = figures.get((part, name))
        is_met = found is not None and (found <= goal if sign == "<=" else found >= goal)
        verdict = "met" if is_met else "not measured" if found is None else "missed"
        verdict = verdict if run.shape == "full" else "of another size"
        print(f"| {part}: {name} | {sign} {goal:g} | {found} | {verdict} |")
    for way in WAYS:
        inside = figures.get((way, "picture 1024 s"))
        # Between pictures that are asked for in turn, the device waits for the client
        outside = figures.get((f"worker {way}", "1024 at once a second"))
        if inside and outside:
            more = 100 * (1 / outside / inside - 1)
            print(f"| {way}: HTTP above in process | <= 3 % | {more:.1f} % | |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--full", action="store_true")
    size.add_argument("--tiny", action="store_true")
    parser.add_argument("--root", type=Path, help="the directory of the model [default: a new one]")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--seconds", type=float, default=345)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: use {', '.join(PARTS)}")
    if options.part:
        do_part(Run.of(options), options.part)
        return
    is_large = options.full and _MEMORY.exists() and shutil.disk_usage(_MEMORY).free > 60 * _GIB
    with tempfile.TemporaryDirectory(dir=_MEMORY if is_large else None) as directory:
        options.root = options.root or Path(directory)
        run_parts(options)


if __name__ == "__main__":
    main()
