"""A program with the public interface for mypy, which finds its wrong arguments, and no others.

It is not run: ``make check`` reports an ignore that is not needed, and an error without one.
"""

from __future__ import annotations

import asyncio

from clowder_aimage import Answer, Picture, Registry, Store, Worker, create, load, pull, push


def move() -> list[str]:
    """Return the digests of a model that is packed and moved."""
    return [
        create("x", "model", base="y", loras=["a", ("b", 0.5)], annotations={"k": "v"}),
        push("x", progress=True),
        pull("x", store=Store(), registry=Registry("host:1"), progress=lambda done, total: None),
    ]


def use() -> tuple[Answer, list[tuple[float, ...]], tuple[int, int]]:
    """Return results of a model and of a worker."""
    with load("x", progress=False) as model:
        pictures: list[Picture] = model.generate("y", size="64x64", n=2, image=b"", fit="pad")
        answer = model.chat([{"role": "user", "content": "x"}], top_k=3, stop=["x"])
        vectors = model.embed(["a"])
    worker = Worker("http://gpu:11434", token="t", model="x")
    (more,) = asyncio.run(worker.agenerate("y", control=pictures[0]))
    return answer, vectors, more.image.size


def make_mistakes(worker: Worker) -> None:
    """Call with an unknown name, and with wrong types."""
    worker.generate("x", wide=1)  # type: ignore[call-arg]
    worker.chat("x", temperature="hot")  # type: ignore[arg-type]
    load("x").generate("x", n="two")  # type: ignore[arg-type]
