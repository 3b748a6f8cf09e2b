"""Time GGUF models in the runtime and in xllamacpp itself: ``python -m benchmarks.llama``.

Both have the same random Q8_0 model of 90 million parameters, loaded in one process, and the same
parameters and threads. They take turns, so that both meet the same disturbances; each round has a
prompt of its own, of which nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xllamacpp

from clowder_aimage.model.llama import llama_params
from clowder_aimage.model.llama.llama_model import LlamaModel, load
from clowder_aimage.model.text.language_model import Sampling, TextPiece, TextRequest
from tests.text.file_aimage import gguf_aimage
from tests.text.tiny_gguf import write_gguf
from tests.text.tiny_text import write_model

TOKENS = 128
CONTEXT = 2048
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}


def ours(model: LlamaModel, prompt: str) -> Iterator[str]:
    """Yield pieces of a text."""
    request = TextRequest(prompt=prompt, max_tokens=TOKENS, sampling=Sampling(temperature=0))
    return (one.text for one in model.generate(request) if isinstance(one, TextPiece) and one.text)


def time_text(run: Callable[[Callable[[], None]], int]) -> tuple[float, float]:
    """Return the seconds to the first piece, and the tokens per second after it."""
    times: list[float] = []
    begun = time.perf_counter()
    count = run(lambda: times.append(time.perf_counter()))
    return times[0] - begun, (count - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    llama_params.limited_cores = lambda: options.threads  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as root:
        directory = write_model(Path(root, "model"), **SHAPE)
        path = write_gguf(Path(root, "model.gguf"), directory, quantized=True)
        model = load(*gguf_aimage(path), context=CONTEXT)
        params = llama_params.make_params(path, (), context=CONTEXT, parallel=1, pooling=None)
        params.verbosity, params.hostnames = -1, [f"{root}/a.sock"]
        server = xllamacpp.Server(params)
        found: dict[str, list[tuple[float, float]]] = {"aimage": [], "xllamacpp": []}
        for number in range(options.rounds + 1):
            prompt = f"{number} " + "the red ball is on the table " * 8
            rounds = (time_ours(model, prompt), time_direct(server, prompt))
            if number:  # the first one warms up
                for values, result in zip(found.values(), rounds, strict=True):
                    values.append(result)
        report(found)


def time_ours(model: LlamaModel, prompt: str) -> tuple[float, float]:
    def run(tick: Callable[[], None]) -> int:
        for _ in ours(model, prompt):
            tick()
        return TOKENS

    return time_text(run)


def time_direct(server: xllamacpp.Server, prompt: str) -> tuple[float, float]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}

    def run(tick: Callable[[], None]) -> int:
        def receive(answer: str) -> bool:
            if json.loads(answer)["choices"][0]["text"]:
                tick()
            return False

        server.handle_completions(json.dumps(body), receive)
        return TOKENS

    return time_text(run)


def report(found: dict[str, list[tuple[float, float]]]) -> None:
    print("tool       first_ms_min first_ms_median tokens_s_max tokens_s_median")
    for tool, values in found.items():
        first, speed = ([row[at] for row in values] for at in (0, 1))
        least, middle = (1e3 * of(first) for of in (min, statistics.median))
        most, usual = max(speed), statistics.median(speed)
        print(f"{tool:10} {least:12.1f} {middle:15.1f} {most:12.1f} {usual:15.1f}")


if __name__ == "__main__":
    main()
