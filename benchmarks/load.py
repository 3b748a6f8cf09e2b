"""Measure the loading of a model of many tensors: ``python -m benchmarks.load``.

1,000 BF16 tensors of 512 KiB, one blob each in an image layout, and the same tensors in one file.
Each row is one way to load all of them into memory, in a separate process per round; rounds are
interleaved, the page cache is warm. The time starts after imports, reading the manifest and
initializing the device, and ends when the last array is evaluated or its pages are touched; the
peak is that of the process minus the size of the libraries. The goal of ``ModelWeights.load`` is at
most 1.0 of a single ``mx.load``.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.dialect import DEFAULT, DIALECTS
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.tensor import encode_header

NAME = Reference.parse("load:benchmark")
BIG = "big.safetensors"
COLUMNS = 1024
BASE = "mx.load, one file"


class Case:
    """Files created in ``directory`` for one way of loading."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = ImageLayout(directory / "store")
        self.aimage = read_aimage(self.store, NAME).aimage
        self.big = str(directory / BIG)
        layers = [layer for layer in self.aimage.layers if layer.is_tensor]
        self.paths = [str(self.store.find_path(layer.descriptor)) for layer in layers]

    def weights(self) -> ModelWeights:
        return ModelWeights.open(self.store, self.aimage, "net")


Way = Callable[[Case], Any]


def one_file(case: Case) -> Any:
    from clowder_aimage.model.backend import mx

    arrays = mx.load(case.big)
    mx.eval(arrays)
    return arrays


def many_files(case: Case) -> Any:
    from clowder_aimage.model.backend import mx

    arrays = [mx.load(path, format="safetensors") for path in case.paths]
    mx.eval(arrays)
    return arrays


def ours(case: Case) -> Any:
    weights = case.weights()
    weights.load()
    return weights


def ours_numpy(case: Case) -> Any:
    weights = case.weights()
    return [touched(weights.read_numpy(name)) for name in weights.keys()]  # noqa: SIM118


def ours_torch(case: Case) -> Any:
    weights = case.weights()
    names = weights.keys()
    return [touched(torch_bytes(weights.read_torch(name))) for name in names]


def safe_open_torch(case: Case) -> Any:
    from safetensors import safe_open

    with safe_open(case.big, framework="pt") as file:
        return [touched(torch_bytes(file.get_tensor(name))) for name in file.keys()]  # noqa: SIM118


def safe_open_torch_many(case: Case) -> Any:
    from safetensors import safe_open

    found = []
    for path in case.paths:
        with safe_open(path, framework="pt") as file:
            found += [touched(torch_bytes(file.get_tensor(key))) for key in file.keys()]  # noqa: SIM118
    return found


def safe_open_numpy(case: Case) -> Any:
    from safetensors import safe_open

    with safe_open(case.big, framework="np") as file:
        return [touched(file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118


WAYS: dict[str, Way] = {
    BASE: one_file,
    "mx.load, a file a tensor": many_files,
    "ModelWeights.load": ours,
    "ModelWeights.numpy (float32)": ours_numpy,
    "ModelWeights.torch": ours_torch,
    "safe_open torch, one file": safe_open_torch,
    "safe_open torch, a file a tensor": safe_open_torch_many,
    "safe_open numpy, one file": safe_open_numpy,
}


def torch_bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8).numpy()


def touched(values: Any) -> Any:
    """Read a byte of every page, to include the page faults of a view."""
    flat = values.reshape(-1)
    int(flat[:: max(4096 // flat.itemsize, 1)].sum())
    return values


def build(directory: Path, count: int, kib: int) -> None:
    """Write the same random tensors as an AImage and as one file."""
    rows = kib * 1024 // 2 // COLUMNS
    random = np.random.default_rng(0)
    store = ImageLayout(directory / "store")
    layers = [file_layer(store, "net/config.json", b"{}")]
    entries = [(f"layers.{index}.weight", "BF16", (rows, COLUMNS)) for index in range(count)]
    with (directory / BIG).open("wb") as big, store.begin_batch():
        big.write(encode_header(entries))
        for name, dtype, shape in entries:
            # small positive numbers: random bits would give sums that are infinite or NaN
            values = random.integers(0x3C00, 0x3F80, shape, np.uint16).tobytes()
            big.write(values)
            blob = encode_header([(name, dtype, shape)]) + values
            descriptor = Descriptor.of(mediatype.AIMAGE_SAFETENSORS, blob)
            store.push(descriptor, build_bytes_body(blob))
            layers.append(Layer(descriptor, f"net/{name}", dtype, shape))
        manifest, config = DIALECTS[DEFAULT].write(AImage(b'{"schemaVersion":1}', tuple(layers)))
        store.push(manifest.config, build_bytes_body(config))
        store.push(manifest.descriptor, build_bytes_body(manifest.raw), NAME)


def file_layer(store: ImageLayout, name: str, data: bytes) -> Layer:
    descriptor = Descriptor.of(mediatype.AIMAGE_FILE, data)
    store.push(descriptor, build_bytes_body(data))
    return Layer(descriptor, name)


def child(directory: Path, way: str) -> dict[str, float]:
    """Return the seconds and MiB of one way, in this process."""
    raise_limit()
    case = Case(directory)
    warm_up(way)
    before = peak()
    begun = time.perf_counter()
    kept = WAYS[way](case)
    seconds = time.perf_counter() - begun
    del kept
    return {"seconds": seconds, "mib": peak() - before}


def is_ready(way: str) -> bool:
    """Return whether the packages that the way uses are installed."""
    needs = {"safetensors": "safe_open" in way, "torch": "torch" in way}
    needs["ml_dtypes"] = way == "safe_open numpy, one file"
    return all(find_spec(name) for name, is_used in needs.items() if is_used)


def warm_up(way: str) -> None:
    """Import the modules that the way uses."""
    if "mx" in way or way == "ModelWeights.load":
        from clowder_aimage.model import array
        from clowder_aimage.model.backend import mx

        mx.eval(mx.zeros(1), array.CHUNK_BLOBS * mx.ones(1))
    if "torch" in way:
        import torch

        torch.zeros(1)
    if "safe_open" in way:
        import safetensors  # noqa: F401
    if "safe_open numpy" in way:
        import ml_dtypes  # noqa: F401  # numpy itself has no bfloat16
    time.sleep(0.2)  # the threads of a BLAS spin for a while


def raise_limit() -> None:
    """Raise the limit of open files: one file per tensor needs them all at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))


def peak() -> float:
    """Return the peak resident size of this process so far, in MiB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1024 * 1024 if sys.platform == "darwin" else 1024)


def measure(directory: Path, way: str) -> dict[str, float] | str:
    """Return the figures of a child process, or the end of its error output."""
    command = [sys.executable, "-m", "benchmarks.load", "--child", way, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2][:80]
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def table(found: dict[str, list[dict[str, float] | str]]) -> str:
    def median(way: str, key: str) -> float:
        return statistics.median(item[key] for item in found[way] if not isinstance(item, str))

    base = median(BASE, "seconds")
    lines = ["| way | median ms | ratio | peak MiB |", "|---|---|---|---|"]
    for way, items in found.items():
        if failed := [item for item in items if isinstance(item, str)]:
            lines.append(f"| {way} | {failed[0]} | | |")
            continue
        seconds, mib = median(way, "seconds"), median(way, "mib")
        lines.append(f"| {way} | {seconds * 1000:.0f} | {seconds / base:.2f} | {mib:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="keep the model here")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--kib", type=int, default=512, help="bytes of a tensor / 1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; repeatable")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.directory, options.child)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        if not (directory / BIG).exists():
            directory.mkdir(parents=True, exist_ok=True)
            build(directory, options.count, options.kib)
        chosen = options.way or WAYS
        ways = [way for way in WAYS if way == BASE or (way in chosen and is_ready(way))]
        found: dict[str, list[dict[str, float] | str]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                found[way].append(measure(directory, way))
        print(table(found))


if __name__ == "__main__":
    main()
