"""Workers with language models: the tiny ones of the tests, and a scripted one in their place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.process import Aimage
from tests.text.tiny_text import add_pooling, write_model

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker

ROOT = Path(__file__).parents[2]
SCRIPTED = (sys.executable, "-m", "tests.worker.scripted_language_model")


def add_models(aimage: Aimage, directory: Path) -> None:
    """Create ``words`` (with tools and thinking), ``plain`` (no template) and ``vectors``."""
    embedder: dict[str, Any] = {"architectures": ["BertModel"]}
    for name, kind in ("words", "qwen3"), ("plain", "qwen2"), ("vectors", "qwen2"):
        path = write_model(directory / name, kind, **(embedder if name == "vectors" else {}))
        if name == "plain":
            texts = path / "tokenizer_config.json"
            known = json.loads(texts.read_text("utf-8"))
            del known["chat_template"]
            texts.write_text(json.dumps(known))
        if name == "vectors":
            add_pooling(path)
        aimage("create", "-q", name, path)


@contextmanager
def scripted_worker(here: Aimage, *arguments: object) -> Iterator[LocalWorker]:
    """Yield a worker in this process, whose language models are scripted."""
    from clowder_aimage.engine import runner
    from tests.worker.conftest import LocalWorker

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_COMMAND", SCRIPTED)
        patch.setenv("PYTHONPATH", str(ROOT))
        worker = LocalWorker(here, *arguments)
        try:
            yield worker
        finally:
            worker.end()


def events_of(body: bytes) -> list[Any]:
    """Return the data of the events of a stream without its comments; "[DONE]" as text."""
    found = []
    for block in body.decode().split("\n\n"):
        lines = [line.removeprefix("data: ") for line in block.splitlines() if line[:1] == "d"]
        if lines:
            text = "\n".join(lines)
            found.append(text if text == "[DONE]" else json.loads(text))
    return found
