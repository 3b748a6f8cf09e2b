"""Time texts of a language model and those of its library alone: ``python -m benchmarks.text``.

Each row is a process of its own with the same random weights: float32 for mlx-lm, Q8_0 for
llama.cpp. They take turns, so that all of them meet the same disturbances. The first token is that
of a prompt which no cache knows. The rate is that of the tokens after it, until the end of the
answer: each row is timed by its reader in the same way, and the library counts the tokens. The
ratio is to the library alone, by the median: a worker's pieces may arrive together, so its best
turn says little. CPU is the processor time of a token, prompts included, with all processes of the
row and the client of a worker; it is the figure that other programs disturb least.

``--clients N`` compares one client of a worker with N at once instead: the rate is then that of all
tokens until the last answer has ended, prompts included. With ``--whole`` it compares the N clients
of a worker with as many of llama.cpp's own server, of the same library and parameters, in that way.

The first row of a runtime in ROWS is the library alone. A row is a function from the path of the
model to a function from a prompt and a number of tokens to the seconds until the first token, and
the tokens per second after it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONTEXT = 1024
# Requests at once, as the worker's default
PARALLEL = 16
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "medium": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "large": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
WORDS = "the red ball is on the table and the blue cube is under the chair "
Write = Callable[[str, int], tuple[float, float]]


def aimage(path: Path) -> Write:
    from clowder_aimage.create import create
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.model.text.language_model import (
        Sampling,
        TextDelta,
        TextEnd,
        TextRequest,
    )
    from clowder_aimage.model.text.runtime import load_language_model
    from clowder_aimage.oci import Reference

    layout = ImageLayout(Path(tempfile.mkdtemp()))
    made = create(layout, Reference.parse("m"), path).aimage
    model = load_language_model(layout, made, context=CONTEXT)

    def write(prompt: str, count: int) -> tuple[float, float]:
        request = TextRequest(prompt=prompt, max_tokens=count, sampling=Sampling(temperature=0))
        begun, first, tokens = time.perf_counter(), 0.0, 0
        for event in model.generate(request):
            if isinstance(event, TextEnd):
                tokens = event.tokens
            elif not first and isinstance(event, TextDelta) and event.text:
                first = time.perf_counter()
        return first - begun, (tokens - 1) / (time.perf_counter() - first)

    return write


def mlx_lm(path: Path) -> Write:
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(path))[:2]

    def write(prompt: str, count: int) -> tuple[float, float]:
        begun = time.perf_counter()
        texts = stream_generate(model, tokenizer, prompt, max_tokens=count)
        times = [time.perf_counter() for _ in texts]
        return times[0] - begun, (len(times) - 1) / (times[-1] - times[0])

    return write


def serve_llama(path: Path, hostnames: list[str], parallel: int = 1, threads: int = 1) -> Any:
    """Return llama.cpp's server with the parameters of the worker's runtime."""
    import xllamacpp

    from clowder_aimage.model.llama.params import make_params

    size = {"weights": path.stat().st_size, "context": CONTEXT, "parallel": parallel}
    params = make_params(path, (), **size, pooling=None)
    params.verbosity, params.hostnames, params.n_threads_http = -1, hostnames, threads
    with socket.create_server(("127.0.0.1", 0)) as free:
        params.port = free.getsockname()[1]
    started = xllamacpp.Server(params)
    started.handle_metrics()
    return started


def server(path: Path) -> Write:
    """Time the client of llama.cpp's own server, which streams its text over HTTP."""
    started = serve_llama(path, ["127.0.0.1"], PARALLEL, PARALLEL + 2)

    def write(prompt: str, count: int) -> tuple[float, float]:
        # The server ends with its object
        address: str = started.listening_address
        return read_over_http(address.removeprefix("http://"))(prompt, count)

    return write


def llama(path: Path) -> Write:
    """Time xllamacpp, with the parameters of the worker's runtime."""
    server = serve_llama(path, [f"{tempfile.mkdtemp()}/a.sock"])

    def write(prompt: str, count: int) -> tuple[float, float]:
        times, tokens = list[float](), 0

        def receive(answer: dict[str, Any]) -> bool:
            nonlocal tokens
            choice = answer["choices"][0]
            if choice["text"] or choice["finish_reason"]:
                times.append(time.perf_counter())
            if choice["finish_reason"]:
                tokens = answer["timings"]["predicted_n"]
            return False

        begun = time.perf_counter()
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "stream": True}
        server.handle_completions(body, receive)
        return times[0] - begun, (tokens - 1) / (times[-1] - times[0])

    return write


def worker(path: Path) -> Write:
    """Time the client of a worker, which streams its text over HTTP."""
    from clowder_aimage.create import create
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.oci import Reference

    store = Path(tempfile.mkdtemp())
    create(ImageLayout(store), Reference.parse("m"), path)
    command = [sys.executable, "-m", "clowder_aimage.cli", "serve", "--addr", "127.0.0.1:0"]
    command += ["--store", str(store), "--context", str(CONTEXT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    atexit.register(process.kill)
    assert process.stdout is not None
    return read_over_http(process.stdout.readline().decode().strip().removeprefix("http://"))


def read_over_http(host: str) -> Write:
    """Return a client of a server."""
    import http.client

    def write(prompt: str, count: int) -> tuple[float, float]:
        body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(host)
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body))
        times, tokens = list[float](), 0
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            times.append(time.perf_counter())
            if usage := json.loads(line[6:]).get("usage"):
                tokens = usage["completion_tokens"]
        connection.close()
        return times[0] - begun, (tokens - 1) / (times[-1] - times[0])

    return write


OURS = {"aimage": aimage, "worker": worker}
SERVERS = {"server": server, "worker": worker}
ROWS: dict[str, dict[str, Callable[[Path], Write]]] = {
    "mlx-lm": {"mlx-lm": mlx_lm, **OURS},
    "llama.cpp": {"xllamacpp": llama, **OURS},
}


def serve(write: Write) -> None:
    """Time one text for each line of standard input."""
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        clients = order["clients"]
        before = processor_time()
        if clients:
            first, rate = write_at_once(write, order["prompt"], order["count"], clients)
        else:
            first, rate = write(order["prompt"], order["count"])
        spent = (processor_time() - before) / order["count"] / max(1, clients)
        print(json.dumps({"first": first, "rate": rate, "spent": spent}), flush=True)


def write_at_once(write: Write, prompt: str, count: int, clients: int) -> tuple[float, float]:
    """Return the seconds of the last first token, and the tokens per second of all clients."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        ends = [pool.submit(write, f"{client} {prompt}", count) for client in range(clients)]
        first = max(end.result()[0] for end in ends)
    return first, clients * count / (time.perf_counter() - begun)


def processor_time() -> float:
    """Return the seconds of this process and of its descendants, which Linux counts in 10 ms."""
    parents: dict[int, tuple[int, int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    while more := {pid for pid, (parent, _) in parents.items() if parent in family} - family:
        family |= more
    ticks = sum(parents[pid][1] for pid in family if pid in parents)
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(
    runtime: str, path: Path, rows: dict[str, tuple[str, int]], rounds: int, count: int, length: int
) -> dict[str, list[Any]]:
    """Return the times of each row. rows: the kind and the number of clients, 0 for one text."""
    command = [sys.executable, "-m", "benchmarks.text", "--runtime", runtime]
    command += ["--model", str(path), "--row"]
    children = {
        row: subprocess.Popen(
            [*command, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for row, (kind, _) in rows.items()
    }
    times: dict[str, list[Any]] = {row: [] for row in children}
    try:
        for child in children.values():
            assert child.stdout and child.stdout.readline() == "ready\n"
        for turn in range(rounds + 1):
            prompt = f"{turn} " + WORDS * length  # differs from the first token on
            for row, child in children.items():
                assert child.stdin and child.stdout
                order = {"prompt": prompt, "count": count, "clients": rows[row][1]}
                child.stdin.write(json.dumps(order) + "\n")
                child.stdin.flush()
                found = json.loads(child.stdout.readline())
                if turn:  # the first one warms up
                    times[row].append(found)
    finally:
        for child in children.values():
            assert child.stdin
            child.stdin.close()  # its own children end with it
            child.wait()
    return times


def make_model(place: Path, runtime: str, shape: str) -> Path:
    """Write a directory of Transformers, or a GGUF file."""
    from tests.text.tiny_gguf import write_gguf
    from tests.text.tiny_text import write_model

    fields = {"max_position_embeddings": CONTEXT, **SHAPES[shape]}
    directory = write_model(place / "model", "qwen3", **fields)
    if runtime == "mlx-lm":
        return directory
    return write_gguf(place / "model.gguf", directory, quantized=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--runtime", choices=ROWS, default="mlx-lm")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=2, help="sentences of the prompt")
    parser.add_argument("--clients", type=int, default=0, help="of a worker, at once")
    parser.add_argument("--whole", action="store_true", help="llama.cpp's server and a worker")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        serve({**ROWS[given.runtime], **SERVERS}[given.row](given.model))
        return
    if given.whole and given.runtime != "llama.cpp":
        parser.error("--whole is for llama.cpp")
    rows = {row: (row, 0) for row in ROWS[given.runtime]}
    if given.whole:
        rows = {row: (row, max(1, given.clients)) for row in SERVERS}
    elif given.clients:
        many = f"{given.clients} clients"
        rows = {"one client": ("worker", 1), many: ("worker", given.clients)}
    with tempfile.TemporaryDirectory() as place:
        path = make_model(Path(place), given.runtime, given.shape)
        size = given.rounds, given.tokens, given.length
        times = measure(given.runtime, path, rows, *size)
    base = statistics.median(one["rate"] for one in next(iter(times.values())))
    print("| row | tokens/s, best | median | ratio | first token, best | median | CPU |")
    print("|---|---|---|---|---|---|---|")
    for row, found in times.items():
        rates, firsts = ([one[key] for one in found] for key in ("rate", "first"))
        spent = statistics.mean(one["spent"] for one in found)
        print(
            f"| {row} | {max(rates):.1f} | {statistics.median(rates):.1f} "
            f"| {statistics.median(rates) / base:.2f} | {min(firsts) * 1000:.0f} ms "
            f"| {statistics.median(firsts) * 1000:.0f} ms | {spent * 1000:.2f} ms |"
        )


if __name__ == "__main__":
    main()
