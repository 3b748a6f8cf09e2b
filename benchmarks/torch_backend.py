"""The backend PyTorch beside diffusers alone: load, a picture, and the peak of memory.

    python -m benchmarks.torch_backend --layers 34 --side 128 [--stored bfloat16] [--dtype bfloat16]
    python -m benchmarks.torch_backend --layers 34 --side 128 --root DIR --measure load

The model is a random Z-Image of 1024 channels and ``--layers`` layers. Both tools read the same
tensors from the page cache: ``from_pretrained`` and ``to`` the device as a user calls them, with
shards of 1 GB, and blobs of the store. Loads and peaks are of forks of two processes, in turns;
what a load imports is imported before. Pictures are made in turns in one process. ``--measure``
limits what is measured; the model in ``--root`` is made if it is not there, and stays. The program
for a GPU is ``benchmarks.gpu``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from clowder_aimage.create import create
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, Step
from clowder_aimage.oci import Reference
from tests.parity.make_model import Dims, write

warnings.simplefilter("ignore")
OURS, THEIRS = "aimage torch", "diffusers"
PROMPT = "a red fox in the snow, at dawn, by a river"
MEASURES = ("load", "peak", "picture")


def dims(options: argparse.Namespace) -> Dims:
    """Return the dimensions of the model."""
    return Dims(
        text_hidden=512,
        text_inter=1536,
        heads=8,
        layers=options.layers,
        axes=(32, 48, 48),
        refiners=2,
        vae_channels=(32, 64, 128, 128),
        vae_groups=32,
        dtype=getattr(torch, options.stored),
        max_shard_size="1GB",
    )


class Tools:
    """The model in one of the tools."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.root, self.name = options.root, Reference.parse(options.name)
        self.side, self.steps, self.dtype = options.side, options.steps, options.dtype
        self.measures = options.measure
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def load(self, tool: str) -> Any:
        """Load all networks."""
        if tool != THEIRS:
            layout = ImageLayout(self.root / "store")
            aimage = read_aimage(layout, self.name).aimage
            how = {"backend": tool.partition(" ")[2], "dtype": self.dtype}
            found = load_pipeline(layout, aimage, **how)
            found.preload(self.request())
            return found
        from diffusers import ZImagePipeline

        dtype = getattr(torch, self.dtype)
        pipeline = ZImagePipeline.from_pretrained(self.root / "files", dtype=dtype)
        return pipeline.to(self.device)

    def request(self, seed: int = 0) -> GenerateRequest:
        return GenerateRequest.of(
            PROMPT, width=self.side, height=self.side, steps=self.steps, seed=seed
        )

    def picture(self, tool: str, pipeline: Any, seed: int) -> tuple[float, float]:
        """Make a picture and return its seconds, and those of a step."""
        begun = time.perf_counter()
        ends: list[float] = []
        if tool != THEIRS:
            pipeline.state.captions.clear()  # a prompt of its own, as there
            for event in pipeline.generate(self.request(seed)):
                if isinstance(event, Step):
                    ends.append(time.perf_counter())
            assert isinstance(event, Image)
        else:

            def noted(*_: Any) -> dict[str, Any]:
                if self.device == "cuda":
                    torch.cuda.synchronize()  # as the copy of our latents does
                ends.append(time.perf_counter())
                return {}

            pipeline.set_progress_bar_config(disable=True)
            how: dict[str, Any] = {"guidance_scale": 0.0, "num_inference_steps": self.steps}
            how |= {"generator": torch.Generator().manual_seed(seed), "callback_on_step_end": noted}
            pipeline(PROMPT, width=self.side, height=self.side, **how)
        steps = [after - before for before, after in itertools.pairwise(ends)]
        return time.perf_counter() - begun, statistics.median(steps)

    def import_known(self, tool: str) -> Path:
        """Import what another run of the tool imported; return the file with its names."""
        known = self.root / f"{tool}.json"
        for name in json.loads(known.read_text()) if known.exists() else ():
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # of optional parts
                    importlib.import_module(name)
        return known

    def alone(self, tool: str) -> dict[str, float]:
        """Load, and make two pictures for the peak; return seconds, and the peak in MiB."""
        known = self.import_known(tool)
        before = set(sys.modules)
        begun = time.perf_counter()
        pipeline = self.load(tool)
        loaded = time.perf_counter() - begun
        late = sorted(set(sys.modules) - before)
        assert not late or not known.exists(), f"imported by the load, not before: {late}"
        found = {"load": loaded}
        if "peak" in self.measures:
            found |= self._peak(tool, pipeline, loaded)
        known.write_text(json.dumps([name for name in sys.modules if name != "__main__"]))
        return found

    def _peak(self, tool: str, pipeline: Any, loaded: float) -> dict[str, float]:
        first, _ = self.picture(tool, pipeline, 0)
        _, step = self.picture(tool, pipeline, 1)
        status = Path("/proc/self/status").read_text()  # ru_maxrss includes that of the parent
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / (1 << 20)
        return {"load and first picture": loaded + first, "step": step, "peak MiB": peak}


class Process:
    """A process with the modules of a tool, which measures it in forks: importing takes longest.

    With a GPU, whose drivers do not fork, each measurement has a process of its own.
    """

    def __init__(self, options: argparse.Namespace, tool: str) -> None:
        self._command = [sys.executable, "-m", "benchmarks.torch_backend", "--tool", tool]
        for name in ("root", "name", "side", "steps", "dtype"):
            self._command += [f"--{name}", str(getattr(options, name))]
        self._command += ["--measure", *options.measure]
        self._process: subprocess.Popen[str] | None = None

    def measure(self) -> dict[str, float]:
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(self._command, text=True, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        lines = [line for line in self._process.stdout.readline().splitlines() if line]
        found: dict[str, float] = json.loads(lines[-1])
        if torch.cuda.is_available():
            self.close()
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
        self._process = None


def serve(tools: Tools, tool: str) -> None:
    """Measure a tool for each line of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to it
    for _ in sys.stdin:
        tools.import_known(tool)
        if torch.cuda.is_available():
            print(json.dumps(tools.alone(tool)), file=answers, flush=True)
            continue
        if (child := os.fork()) == 0:
            print(json.dumps(tools.alone(tool)), file=answers, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def row(what: str, values: dict[str, list[float]]) -> None:
    medians = {tool: statistics.median(found) for tool, found in values.items()}
    ratios = [value / medians[THEIRS] for tool, value in medians.items() if tool != THEIRS]
    cells = [
        f"{medians[tool]:.3f} ({min(found):.3f} to {max(found):.3f})"
        for tool, found in values.items()
    ]
    cells += [f"{one:.2f}" for one in ratios]
    print(f"| {what} | {' | '.join(cells)} |", flush=True)


def compare(options: argparse.Namespace, tools: list[str]) -> None:
    """Print the table of all tools."""
    ratios = [f"ratio of {tool}" for tool in tools if tool != THEIRS]
    print(f"\n| | {' | '.join([*tools, *ratios])} |\n|---{'|---' * (2 * len(tools) - 1)}|")
    if {"load", "peak"} & {*options.measure}:
        compare_processes(options, tools)
    if "picture" in options.measure:
        compare_pictures(options, tools)


def compare_processes(options: argparse.Namespace, tools: list[str]) -> None:
    """Print loads and peaks of processes of their own, in turns."""
    runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in tools}
    processes = {tool: Process(options, tool) for tool in tools}
    for number in range(options.repeat + 1):
        for tool, process in processes.items():
            found = process.measure()
            if number:  # the first one finds what is imported
                runs[tool].append(found)
    for process in processes.values():
        process.close()
    for what in runs[THEIRS][0]:
        row(what, {tool: [one[what] for one in runs[tool]] for tool in tools})


def compare_pictures(options: argparse.Namespace, tools: list[str]) -> None:
    """Print the seconds of pictures of both tools in this process, in turns."""
    both = Tools(options)
    pipelines = {tool: both.load(tool) for tool in tools}
    times: dict[str, list[float]] = {tool: [] for tool in pipelines}
    for seed in range(options.repeat + 1):
        for tool, pipeline in pipelines.items():
            seconds, _ = both.picture(tool, pipeline, seed)
            if seed:  # the first is a warm-up
                times[tool].append(seconds)
    row("picture, warm", times)


def measure(options: argparse.Namespace) -> None:
    """Make the model, and print what was measured."""
    is_gpu = torch.cuda.is_available()
    if not (options.root / "store").exists():
        with torch.device("cuda" if is_gpu else "cpu"):
            write(options.root / "files", 1, dims(options))
        layout = ImageLayout(options.root / "store")
        create(layout, Reference.parse(options.name), options.root / "files")
    files = (options.root / "files").rglob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    device = torch.cuda.get_device_name() if is_gpu else "cpu"
    print(f"{size >> 20} MiB in {options.stored}, {device}, {options.dtype}, side {options.side}")
    compare(options, [OURS, THEIRS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    is_gpu = torch.cuda.is_available()
    usual = "bfloat16" if is_gpu else "float32"
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--stored", choices=["float32", "bfloat16"], default=usual)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=usual)
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--root", type=Path, help="the directory of the model")
    parser.add_argument("--name", default="m", help=argparse.SUPPRESS)
    parser.add_argument("--tool", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.tool:
        serve(Tools(options), options.tool)
        return
    with tempfile.TemporaryDirectory() as directory:
        options.root = options.root or Path(directory)
        measure(options)


if __name__ == "__main__":
    main()
