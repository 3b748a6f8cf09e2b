"""Time a step with an adapter, and changes of adapters: ``python -m benchmarks.adapter``.

The adapter is a LoRA on every linear layer of the transformer. Steps with and without it take
turns, in one process and on one float32 model. A change is the call that sets another strength, or
another adapter whose file was read before, until the arrays of the layers are computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.models import SHAPES, build
from clowder_aimage.adapter.adapter import Adapter, LowRank
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use
from clowder_aimage.model.adaptation import Adaptation
from clowder_aimage.model.adapted_linear import AdaptedLinear
from clowder_aimage.model.backend import mx
from clowder_aimage.model.zimage.config import TransformerConfig
from clowder_aimage.model.zimage.transformer import Transformer

TIME, TOKENS = 0.25, 64
WARM_UP = 2  # rounds
AT_LEAST = 0.3  # seconds of a round


def load(directory: Path) -> tuple[Transformer, dict[str, tuple[int, ...]]]:
    """Return the network, and the shapes of its matrices by the names of their tensors."""
    name = "transformer/config.json"
    config = TransformerConfig.parse(name, json.loads((directory / name).read_text()))
    network = Transformer(config)
    (file,) = (directory / "transformer").glob("*.safetensors")
    stored = cast("dict[str, mx.array]", mx.load(str(file)))
    network.load_weights([(network.sanitize(key), value) for key, value in stored.items()])
    mx.eval(network.parameters())
    matrices = {
        key: value.shape
        for key, value in stored.items()
        if key.endswith(".weight") and value.ndim == 2
    }
    return network, matrices


def adapter(what: str, shapes: dict[str, tuple[int, ...]], rank: int, seed: int) -> LoadedAdapter:
    """Return a random LoRA on all ``shapes``."""
    random = np.random.default_rng(seed)

    def change(rows: int, columns: int) -> LowRank:
        down = random.standard_normal((rank, columns), np.float32) / np.float32(columns**0.5)
        return LowRank(down, 0.01 * random.standard_normal((rows, 1), np.float32).repeat(rank, 1))

    changes = {f"transformer/{name}": (change(*shape),) for name, shape in shapes.items()}
    return LoadedAdapter(what, Adapter(what, changes))


def timed(run: Callable[[], Any], least: float = 0.0) -> float:
    """Return the seconds of a run: the mean of as many as take ``least`` seconds."""
    begin, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begin < least:
        run()
        count += 1
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, help="keep the model here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = build((options.directory or Path(temporary)) / options.shape, options.shape)
        network, shapes = load(directory)
    widths, random = SHAPES[options.shape], np.random.default_rng(1)
    side = widths.side // 8
    latents = mx.array(random.standard_normal((16, side, side), np.float32))
    caption = network.build_caption(
        mx.array(random.standard_normal((TOKENS, widths.text_hidden), np.float32))
    )
    mx.eval(caption.tokens, *caption.rope)
    adaptation = Adaptation("transformer", network.sanitize, network.skip, mx.float32)

    def use(*uses: Use) -> None:
        adaptation.use(uses)
        adaptation.apply(network)
        layers = [module for module in network.modules() if isinstance(module, AdaptedLinear)]
        assert bool(layers) == bool(uses)
        mx.eval([layer.pair for layer in layers])

    def step() -> None:
        mx.eval(network(latents, TIME, caption))

    one, other = (adapter(name, shapes, options.rank, seed) for seed, name in enumerate("ab"))
    first = timed(lambda: use((one, 1.0)))
    use((other, 1.0))
    times: dict[str, list[float]] = {key: [] for key in ("without", "with", "strength", "adapter")}
    for _ in range(WARM_UP + options.rounds):
        use()
        times["without"].append(timed(step, AT_LEAST))
        use((one, 1.0))
        times["with"].append(timed(step, AT_LEAST))
        times["strength"].append(timed(lambda: use((one, 0.5))))
        times["adapter"].append(timed(lambda: use((other, 0.5))))
    kept = {key: values[WARM_UP:] for key, values in times.items()}
    pairs = zip(kept["with"], kept["without"], strict=True)
    row = {
        "shape": options.shape,
        "rank": options.rank,
        "layers": len(shapes),
        "step_s": round(statistics.median(kept["without"]), 4),
        "ratio_median": round(statistics.median(a / b for a, b in pairs), 3),
        "ratio_min": round(min(kept["with"]) / min(kept["without"]), 3),
        "first_use_ms": round(1000 * first, 1),
        "strength_ms": round(1000 * statistics.median(kept["strength"]), 1),
        "adapter_ms": round(1000 * statistics.median(kept["adapter"]), 1),
    }
    if options.json:
        print(json.dumps(row))
        return
    print("| " + " | ".join(row) + " |\n" + "|---" * len(row) + "|")
    print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
