"""A model process with a scripted language model, run as a module.

It answers with the words of the last message, one in each turn. Some words have effects: ``fail``
raises an error, ``crash`` ends the process, ``bye`` does so after the text, ``slow`` takes a while,
``wait`` has no piece while others are open, ``process`` is another text in each process, ``hang``
at the beginning never ends, nor does ``stall`` later; ``notice`` there gives NOTICE. The first word
of each text that is begun, and ``stall``, is written to the file SCRIPTED_LOG.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from clowder_aimage.engine import process
from clowder_aimage.errors import UsageError
from clowder_aimage.model.text.language_model import (
    CHAT,
    EMBEDDING,
    LENGTH,
    STOP,
    ContextError,
    DrawnTokens,
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextEvent,
    TextNotice,
    TextRequest,
    Token,
    ToolCall,
)

CONTEXT = 512
NOTICE = TextNotice(("the template leaves out Ä",), ("reasoning_effort",))


class ScriptedLanguageModel:
    """Implement LanguageModel without a network."""

    capabilities = frozenset({CHAT, EMBEDDING})
    warnings: tuple[str, ...] = ()
    context, device, dtype = CONTEXT, "none", "float32"

    def __init__(self, parallel: int = 1) -> None:
        self.parallel = parallel
        self.open = 0
        self.embedded: list[int] = []  # the numbers of texts

    def prepare(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Return at once."""

    def try_schema(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Accept the schema of true; refuse others once another text has begun."""
        if request.schema == {"const": True}:
            return
        _log("try")
        while len(_read_log()) < 2:
            if is_cancelled():
                _log("cancelled")
                break
            time.sleep(0.001)
        raise UsageError("the JSON Schema cannot be used", field="response_format")

    def wake(self) -> None:
        """Return at once: a text waits for a short time only."""

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        words = str(request.messages[-1]["content"]).split() if request.messages else []
        words = words or (request.prompt or "").split()
        if len(words) > CONTEXT:
            raise ContextError(len(words), CONTEXT)
        _log(words[0])
        if words[0] == "hang":
            time.sleep(100)
        return self._events(words, request)

    def _events(self, words: Sequence[str], request: TextRequest) -> Any:
        self.open += 1
        begun = request.begun.count
        if words[0] == "notice":
            yield NOTICE
        try:
            for number, word in enumerate(words[: request.max_tokens]):
                if number < begun:
                    continue
                drawn = DrawnTokens((number,), 1)
                _take_effect(word)
                if word == "process":
                    word = str(os.getpid())
                while word == "wait" and self.open > 1:
                    yield TextDelta("")
                    time.sleep(0.001)
                if word == "call":
                    yield ToolCall("look", '{"at": 1}', drawn)
                    continue
                tokens = () if request.alternatives is None else (_token(word),)
                kind = "thinking" if word == "hm" else "content"
                yield TextDelta(word + " ", kind, tokens, drawn)
            is_cut = request.max_tokens is not None and len(words) > request.max_tokens
            reason = LENGTH if is_cut else STOP
            yield TextEnd(reason, 7 + begun, len(words) - begun, 3, 0.5, 0.25)
            if "bye" in words:
                os._exit(3)
        finally:
            self.open -= 1

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        self.embedded.append(len(request.texts))
        vectors = tuple((float(len(text)), 0.5) for text in request.texts)
        if request.prompt not in (None, "query"):
            raise UsageError("no such prompt", field="prompt_name")
        cut = sum("cut" in text for text in request.texts)
        return Embeddings(
            vectors, sum(len(text.split()) for text in request.texts), cut, 9 if cut else 0
        )


def _take_effect(word: str) -> None:
    if word == "fail":
        raise ValueError("a secret word")
    if word == "crash":
        os._exit(3)
    if word == "stall":
        _log(word)
        time.sleep(100)
    if word == "slow":
        time.sleep(0.02)


def _read_log() -> list[str]:
    return Path(os.environ["SCRIPTED_LOG"]).read_text().split()


def _log(word: str) -> None:
    if log := os.environ.get("SCRIPTED_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{word}\n")


def _token(word: str) -> Token:
    other = Token("other", (1, 2), -2.5)
    return Token(word, tuple(word.encode()), -0.5, (other,))


def main() -> None:
    """Run the process of a model with a scripted language model in its place."""

    def load(*_: object, parallel: int = 1, **__: object) -> ScriptedLanguageModel:
        return ScriptedLanguageModel(parallel)

    vars(process).update(find_runtime=lambda _: "scripted", load_language_model=load)
    process.main()


if __name__ == "__main__":
    main()
