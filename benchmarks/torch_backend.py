"""The backend PyTorch beside diffusers alone: load, a picture, and the peak of memory.

    python -m benchmarks.torch_backend --layers 34 --side 128 [--stored bfloat16] [--dtype bfloat16]
    python -m benchmarks.torch_backend --layers 34 --side 128 --root DIR --measure load
    python -m benchmarks.torch_backend --full

The model is a random Z-Image of 1024 channels and ``--layers`` layers. Both tools read the same
tensors from the page cache: ``from_pretrained`` and ``to`` the device as a user calls them, with
shards of 1 GB, and blobs of the store. Loads and peaks are of forks of two processes, in turns;
what a load imports is imported before. Pictures are made in turns in one process. ``--measure``
limits what is measured; the model in ``--root`` is made if it is not there, and stays.

``--full`` is the program for a GPU: Z-Image in its size is made there, created, pushed, pulled, and
run with both backends, 1024 pixels wide. Without a GPU it runs with a small model, and says so.
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
from collections.abc import Iterator
from importlib.util import find_spec
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
OURS, MLX, THEIRS = "aimage torch", "aimage mlx", "diffusers"
PROMPT = "a red fox in the snow, at dawn, by a river"
MEASURES = ("load", "peak", "picture")
_SMALL: dict[str, Any] = {
    "text_hidden": 64,
    "text_inter": 128,
    "heads": 2,
    "axes": (16, 8, 8),
    "refiners": 2,
}


def dims(options: argparse.Namespace, *, is_gpu: bool) -> Dims:
    """Return the dimensions of the model: those of Z-Image with ``--full`` on a GPU."""
    how: dict[str, Any] = {"dtype": getattr(torch, options.stored), "max_shard_size": "1GB"}
    if options.full and not is_gpu:
        return Dims(**_SMALL, **how)
    large: dict[str, Any] = {
        "text_hidden": 2560,
        "text_inter": 9728,
        "text_layers": 36,
        "text_heads": 32,
        "text_kv_heads": 8,
        "text_head_dim": 128,
        "heads": 30,
        "layers": 30,
    }
    medium: dict[str, Any] = {"text_hidden": 512, "text_inter": 1536, "heads": 8}
    return Dims(
        **large if options.full else {**medium, "layers": options.layers},
        axes=(32, 48, 48),
        refiners=2,
        vae_channels=(128, 256, 512, 512) if options.full else (32, 64, 128, 128),
        vae_groups=32,
        **how,
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
        if self.device == "cuda" and tool != MLX:
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
    if "picture" in options.measure and MLX not in tools:
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


@contextlib.contextmanager
def registry(root: Path) -> Iterator[str]:
    """Serve an empty store as a registry; yield host:port."""
    command = [sys.executable, "-m", "clowder_aimage", "registry", "serve"]
    command += ["--store", str(root), "--addr", "127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().removeprefix("http://")
        finally:
            process.terminate()


def travel(options: argparse.Namespace) -> None:
    """Create the AImage, push it to a registry, and pull it into the store that is measured."""
    root, aimage = options.root, [sys.executable, "-m", "clowder_aimage"]
    with registry(root / "registry") as host:
        options.name = f"{host}/team/full:v1"
        for verb, *more in (("create", options.name, root / "files"), ("push", options.name)):
            timed([*aimage, verb, "-q", *more, "--store", root / "made"], verb)
        timed([*aimage, "pull", "-q", options.name, "--store", root / "store"], "pull")


def timed(command: list[Any], what: str) -> None:
    begun = time.perf_counter()
    subprocess.run([str(one) for one in command], check=True, stdout=subprocess.DEVNULL)
    print(f"{what}: {time.perf_counter() - begun:.1f} s", flush=True)


def measure(options: argparse.Namespace) -> None:
    """Make the model, and print what was measured and what was not."""
    is_gpu = torch.cuda.is_available()
    is_made = (options.root / "store").exists()
    if not is_made:
        with torch.device("cuda" if is_gpu else "cpu"):
            write(options.root / "files", 1, dims(options, is_gpu=is_gpu))
    files = (options.root / "files").rglob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    device = torch.cuda.get_device_name() if is_gpu else "cpu"
    print(f"{size >> 20} MiB in {options.stored}, {device}, {options.dtype}, side {options.side}")
    tools = [OURS, THEIRS]
    if options.full:
        tools = [OURS, MLX, THEIRS] if find_spec("mlx") else tools
        travel(options)
    elif not is_made:
        layout = ImageLayout(options.root / "store")
        create(layout, Reference.parse(options.name), options.root / "files")
    compare(options, tools)
    if options.full and MLX not in tools:
        print("\nnot run: the backend mlx, which is not installed")
    if not is_gpu:
        what = "the size of Z-Image at 1024x1024" if options.full else "the part for a GPU, --full"
        print(f"\nnot run: {what}, as PyTorch sees no GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    is_gpu = torch.cuda.is_available()
    usual = "bfloat16" if is_gpu else "float32"
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--stored", choices=["float32", "bfloat16"], default=usual)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=usual)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--root", type=Path, help="the directory of the model")
    parser.add_argument("--name", default="m", help=argparse.SUPPRESS)
    parser.add_argument("--tool", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.side = options.side or (1024 if options.full and is_gpu else 128)
    torch.set_grad_enabled(False)
    if options.tool:
        serve(Tools(options), options.tool)
        return
    with tempfile.TemporaryDirectory() as directory:
        options.root = options.root or Path(directory)
        measure(options)


if __name__ == "__main__":
    main()
