"""The backend PyTorch beside diffusers alone: load, a picture, and the peak of memory.

    python benchmarks/torch_backend.py --layers 8 --side 256

The model is a random Z-Image of 1024 channels and ``--layers`` layers, in float32 on a CPU and in
bfloat16 on a GPU; ``--full`` is the size of Z-Image, for a GPU. Both read the same files from the
page cache. Loads, without imports, and peaks are of processes of their own, pictures are made in
turns in one. Without a GPU the part for it is not run, and the program says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from clowder_aimage.create import create
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import GenerateRequest, Image
from clowder_aimage.oci import Reference
from tests.parity.make_model import Dims, make

warnings.simplefilter("ignore")
NAME = Reference.parse("m")
OURS, THEIRS = "aimage", "diffusers"
IMPORTS = {
    OURS: ("clowder_aimage.model.torch.zimage", "clowder_aimage.model.torch.flux2"),
    THEIRS: ("diffusers.pipelines.z_image", "transformers.models.qwen3.modeling_qwen3"),
}
PROMPT = "a red fox in the snow, at dawn, by a river"


def dims(layers: int, *, is_full: bool) -> Dims:
    """Return the dimensions of the model."""
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
    small: dict[str, Any] = {"text_hidden": 512, "text_inter": 1536, "heads": 8, "layers": layers}
    return Dims(
        **large if is_full else small,
        axes=(32, 48, 48),
        refiners=2,
        vae_channels=(128, 256, 512, 512) if is_full else (32, 64, 128, 128),
        vae_groups=32,
        dtype=torch.bfloat16 if is_full else torch.float32,
    )


class Both:
    """The model in one of the tools, or in both."""

    def __init__(self, root: Path, side: int, steps: int) -> None:
        self.root, self.side, self.steps = root, side, steps
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = "bfloat16" if self.device == "cuda" else "float32"

    def load(self, tool: str) -> Any:
        """Load all networks."""
        if tool == OURS:
            layout = ImageLayout(self.root / "store")
            aimage = read_aimage(layout, NAME).aimage
            found = load_pipeline(layout, aimage, backend="torch", dtype=self.dtype)
            found.preload(self.request())
            return found
        from diffusers import ZImagePipeline

        dtype = getattr(torch, self.dtype)
        pipeline = ZImagePipeline.from_pretrained(self.root / "files", dtype=dtype)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(self.device)

    def request(self, seed: int = 0) -> GenerateRequest:
        return GenerateRequest(PROMPT, self.side, self.side, self.steps, seed)

    def picture(self, tool: str, pipeline: Any, seed: int) -> float:
        """Make a picture and return the seconds."""
        begun = time.perf_counter()
        if tool == OURS:
            pipeline._captions.clear()  # a prompt of its own, as there
            assert isinstance([*pipeline.generate(self.request(seed))][-1], Image)
        else:
            how: dict[str, Any] = {"guidance_scale": 0.0, "num_inference_steps": self.steps}
            generator = torch.Generator().manual_seed(seed)
            pipeline(PROMPT, width=self.side, height=self.side, generator=generator, **how)
        return time.perf_counter() - begun

    def alone(self, tool: str) -> dict[str, float]:
        """Load and make one picture; return seconds and the peaks of memory in MiB."""
        for name in IMPORTS[tool]:
            importlib.import_module(name)
        begun = time.perf_counter()
        pipeline = self.load(tool)
        loaded = time.perf_counter() - begun
        first = self.picture(tool, pipeline, 0)
        status = Path("/proc/self/status").read_text()  # ru_maxrss includes that of the parent
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / (1 << 20)
        return {"load": loaded, "load and first picture": loaded + first, "peak MiB": peak}


def child(options: argparse.Namespace, root: Path, tool: str) -> dict[str, float]:
    """Measure one tool in a process of its own."""
    command = [sys.executable, __file__, "--root", str(root), "--tool", tool]
    command += ["--side", str(options.side), "--steps", str(options.steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(what: str, values: dict[str, list[float]]) -> None:
    ours, theirs = (statistics.median(values[tool]) for tool in (OURS, THEIRS))
    print(f"| {what} | {ours:.3f} | {theirs:.3f} | {ours / theirs:.2f} |", flush=True)


def compare(options: argparse.Namespace, root: Path) -> None:
    torch.set_grad_enabled(False)
    make(root / "files", 1, dims(options.layers, is_full=options.full))
    create(ImageLayout(root / "store"), NAME, root / "files")
    both = Both(root, options.side, options.steps)
    size = sum(path.stat().st_size for path in (root / "files").rglob("*.safetensors"))
    print(f"{size / (1 << 20):.0f} MiB of weights, {both.device}, {both.dtype}, side {both.side}")
    print(f"\n| | {OURS} | {THEIRS} | ratio |\n|---|---|---|---|")
    runs: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    for _ in range(options.repeat):
        for tool in runs:
            runs[tool].append(child(options, root, tool))
    for what in runs[OURS][0]:
        row(what, {tool: [one[what] for one in found] for tool, found in runs.items()})
    pipelines = {tool: both.load(tool) for tool in runs}
    times: dict[str, list[float]] = {tool: [] for tool in runs}
    for seed in range(options.repeat + 1):
        for tool, pipeline in pipelines.items():
            seconds = both.picture(tool, pipeline, seed)
            if seed:  # the first is a warm-up
                times[tool].append(seconds)
    row("picture, warm", times)
    if both.device == "cpu":
        print("\nnot run: the part for a GPU, as PyTorch sees none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tool", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tool:
        torch.set_grad_enabled(False)
        print(json.dumps(Both(options.root, options.side, options.steps).alone(options.tool)))
        return
    if options.full and not torch.cuda.is_available():
        sys.exit("not run: the full size needs a GPU, and PyTorch sees none")
    with tempfile.TemporaryDirectory() as directory:
        compare(options, Path(directory))


if __name__ == "__main__":
    main()
