"""Time the networks of an image pipeline, and those of others: ``python -m benchmarks.step``.

Parts: a step of the transformer, the decoding of a picture, the encoding of a text, the encoding of
a picture of twice the side. Each tool has a process of its own that loads the same random float32
weights. They take turns, so that all of them meet the same disturbances; a turn is a run, or the
mean of as many as take 0.3 s. Ratios are to diffusers on PyTorch, parity is the largest difference
from its result over its largest value. mflux computes with the system's OpenBLAS; it has a row if
it can be imported.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import flux2
from benchmarks.models import SHAPES, Shape, build

BASE = "diffusers"
TOOLS = ("aimage", BASE, "mflux")
PARTS = ("step", "decode", "encode", "picture")
USUAL = ("small", "medium", "large", flux2.SHAPE)  # shapes
COLUMNS = ("part", "shape", "tool", "min_s", "median_s", "ratio_min", "ratio_median", "parity")
TOKENS = 64  # of the text
TIME = 0.25  # of the step, 0 to 1
WARM_UP = 2  # rounds
AT_LEAST = 0.3  # seconds of a round: as the steps of a picture, runs follow each other
Run = Callable[[], Any]  # returns an array that numpy can convert


def inputs(shape: Shape) -> dict[str, Any]:
    """Return random latents, text features and tokens."""
    widths, random = SHAPES[shape], np.random.default_rng(1)
    side = widths.side // 8
    return {
        "latents": random.standard_normal((16, side, side)).astype(np.float32),
        "features": random.standard_normal((TOKENS, widths.text_hidden)).astype(np.float32),
        "tokens": random.integers(0, widths.vocabulary, TOKENS),
        "pixels": random.uniform(-1, 1, (2 * widths.side, 2 * widths.side, 3)).astype(np.float32),
    }


# -- the tools, each in a process of its own


def aimage(directory: Path, part: str, given: dict[str, Any]) -> Run:
    """Return the part of this project's pipeline."""
    from clowder_aimage.model.backend import mx
    from clowder_aimage.model.flow.config import TextEncoderConfig
    from clowder_aimage.model.flow.text_encoder import TextEncoder
    from clowder_aimage.model.flow.vae import LatentEncoder
    from clowder_aimage.model.zimage import config
    from clowder_aimage.model.zimage.transformer import Transformer
    from clowder_aimage.model.zimage.vae import Vae

    def load(component: str, kind: Any, parsed: Any) -> Any:
        folder = directory / component
        name = f"{component}/config.json"
        network = kind(parsed.parse(name, json.loads((directory / name).read_text())))
        (file,) = folder.glob("*.safetensors")
        stored = cast("dict[str, mx.array]", mx.load(str(file)))
        network.load_weights(
            [
                (network.sanitize(key), value.transpose(0, 2, 3, 1) if value.ndim == 4 else value)
                for key, value in stored.items()
                if not network.skip(key)
            ]
        )
        mx.eval(network.parameters())
        return network

    def evaluated(value: mx.array) -> mx.array:
        mx.eval(value)
        return value

    if part == "step":
        transformer = load("transformer", Transformer, config.TransformerConfig)
        caption = transformer.build_caption(mx.array(given["features"]))
        mx.eval(caption.tokens, *caption.rope)
        latents = mx.array(given["latents"])
        return lambda: evaluated(transformer(latents, TIME, caption))
    if part == "decode":
        vae = load("vae", Vae, config.VaeConfig)
        return lambda: evaluated(vae.decode(mx.array(given["latents"])))
    if part == "picture":
        pixels, reader = mx.array(given["pixels"]), load("vae", LatentEncoder, config.VaeConfig)
        return lambda: evaluated(reader.encode(pixels)[0])
    encoder = load("text_encoder", TextEncoder, TextEncoderConfig)
    return lambda: evaluated(encoder(mx.array(given["tokens"])))


def diffusers(directory: Path, part: str, given: dict[str, Any]) -> Run:
    """Return the part of diffusers; the text encoder is that of transformers, without padding."""
    import torch
    from diffusers import AutoencoderKL, ZImageTransformer2DModel
    from transformers import Qwen3Model

    torch.set_grad_enabled(False)
    latents, features, tokens, pixels = (torch.tensor(value) for value in given.values())
    path = str(directory)
    if part == "step":
        transformer = ZImageTransformer2DModel.from_pretrained(path, subfolder="transformer").eval()
        now = torch.tensor([TIME])
        return lambda: transformer([latents[:, None]], now, [features])[0][0][:, 0]
    if part == "decode":
        vae = AutoencoderKL.from_pretrained(path, subfolder="vae").eval()
        scale, shift = vae.config.scaling_factor, vae.config.shift_factor
        return lambda: vae.decode((latents / scale + shift)[None]).sample[0].permute(1, 2, 0)
    if part == "picture":
        vae = AutoencoderKL.from_pretrained(path, subfolder="vae").eval()
        picture = pixels.permute(2, 0, 1)[None].contiguous()
        return lambda: vae.encode(picture).latent_dist.mean[0]
    encoder = Qwen3Model.from_pretrained(path, subfolder="text_encoder").eval()
    return lambda: encoder(tokens[None], output_hidden_states=True).hidden_states[-2][0]


def mflux(directory: Path, part: str, given: dict[str, Any]) -> Run:
    """Return mflux's transformer in float32; the widths of its other networks are fixed."""
    if part != "step":
        raise SystemExit(0)
    with suppress(OSError):  # MLX contains the reference BLAS
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    import mlx.core as mx
    from mflux.models.z_image.model.z_image_transformer.transformer import ZImageTransformer

    config = json.loads((directory / "transformer/config.json").read_text())
    keys = ("dim", "n_layers", "n_refiner_layers", "n_heads", "cap_feat_dim", "axes_dims")
    network: Any = ZImageTransformer(**{key: config[key] for key in keys})
    network.set_float32(True)
    (file,) = (directory / "transformer").glob("*.safetensors")
    stored = cast("dict[str, mx.array]", mx.load(str(file)))
    names = {
        "t_embedder.mlp.0": "t_embedder.linear1",
        "t_embedder.mlp.2": "t_embedder.linear2",
        "all_final_layer.2-1.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.0",
    }

    def own(key: str) -> str:
        stem, dot, last = key.rpartition(".")
        return f"{names.get(stem, stem)}{dot}{last}"

    network.load_weights([(own(key), value) for key, value in stored.items()])
    mx.eval(network.parameters())
    latents, features = (mx.array(given[key]) for key in ("latents", "features"))

    def run() -> mx.array:
        moved = network(latents[:, None], TIME, mx.zeros(1), features)
        mx.eval(moved)
        return -moved[:, 0]

    return run


def open_part(directory: Path, shape: str, part: str, tool: str) -> Run:
    """Return the part of a tool, ready to run. Exits if the tool lacks it."""
    if shape != flux2.SHAPE:
        kinds = {"aimage": aimage, BASE: diffusers, "mflux": mflux}
        return kinds[tool](directory, part, inputs(cast("Shape", shape)))
    if tool == "mflux":
        raise SystemExit(0)
    opened: Run = getattr(flux2, tool)(directory, part, flux2.inputs())
    return opened


def child(directory: Path, shape: str, part: str, tool: str) -> None:
    """Run for each line of stdin; print the seconds of a run. Write the result to that path."""
    warnings.simplefilter("ignore")
    run = open_part(directory, shape, part, tool)
    for line in sys.stdin:
        begin, count = time.perf_counter(), 0
        while not count or time.perf_counter() - begin < AT_LEAST:
            result = run()
            count += 1
        print((time.perf_counter() - begin) / count, flush=True)
        if path := line.strip():
            np.save(path, np.array(result))


# -- the comparison


class Process:
    """A tool with its times."""

    def __init__(self, directory: Path, shape: str, part: str, tool: str) -> None:
        command = [sys.executable, "-m", "benchmarks.step", "--child", tool, str(directory)]
        command += [shape, part]
        self.tool, self.times = tool, list[float]()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, output: str = "") -> bool:
        """Take a turn; return False if the tool lacks this part or failed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            print(output, file=stdin, flush=True)
            self.times.append(float(stdout.readline()))
        except (ValueError, BrokenPipeError):
            return False
        return True

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def compare(
    directory: Path, shape: str, part: str, tools: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each tool."""
    results = {tool: str(directory / f"{part}-{tool}.npy") for tool in tools}
    started = [Process(directory, shape, part, tool) for tool in tools]
    try:
        running = [each for each in started if each.run(results[each.tool])]
        for _ in range(WARM_UP - 1 + rounds):
            for each in running:
                each.run()
    finally:
        for each in started:
            each.end()
    times = {each.tool: each.times[WARM_UP:] for each in running}
    base = times.get(BASE)
    rows = []
    for tool, own in times.items():
        row: dict[str, Any] = {"part": part, "shape": shape, "tool": tool}
        for key, function in (("min", min), ("median", statistics.median)):
            row[f"{key}_s"] = round(function(own), 4)
            row[f"ratio_{key}"] = round(function(own) / function(base), 3) if base else None
        row["parity"] = None
        if base and tool != BASE:
            wanted, found = np.load(results[BASE]), np.load(results[tool])
            row["parity"] = float(f"{np.abs(found - wanted).max() / np.abs(wanted).max():.1e}")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; repeatable")
    parser.add_argument(
        "--shape", action="append", choices=[*SHAPES, flux2.SHAPE], help="as --part"
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, help="as --part")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="keep the models here")
    parser.add_argument("--json", action="store_true", help="print rows as a JSON list")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        tool, directory, shape, part = options.child
        child(Path(directory), shape, part, tool)
        return
    chosen = options.tool or TOOLS
    tools = [tool for tool in chosen if tool == "aimage" or importlib.util.find_spec(tool)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in options.shape or USUAL:
            directory = (options.directory or Path(temporary)) / shape
            (
                flux2.build(directory)
                if shape == flux2.SHAPE
                else build(directory, cast("Shape", shape))
            )
            for part in options.part or PARTS:
                rows += compare(directory, shape, part, tools, options.rounds)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"threads: {os.environ.get('OMP_NUM_THREADS', os.cpu_count())}\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[key]) for key in COLUMNS) + " |")


if __name__ == "__main__":
    main()
