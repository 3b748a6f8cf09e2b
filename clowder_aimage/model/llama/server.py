"""llama.cpp's server in this process: requests as JSON, each on a thread of its own.

Source: the package ``xllamacpp``, src/xllamacpp/server.cpp; ggml-org/llama.cpp,
tools/server/README.md. The server always listens. Here it listens on a Unix socket in a directory
that only this user can enter. The directory is removed before the first request, so that no address
remains that can be connected to. Until then a random key protects the server.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import xllamacpp

from clowder_aimage.errors import ContentError, ModelError, NoMemoryError, UsageError
from clowder_aimage.model.llama.temporary_directory import create_temporary_directory
from clowder_aimage.model.text.language_model import ContextError

_SILENT, _ERRORS = -1, 1  # verbosity
# Seconds between two looks at the answers of a text, and after more than _FAST answers; a look at
# several texts costs more, so they are multiplied by their number, up to _MOST_GATHERED
GATHERED = 0.03
_FAST, _FAST_GATHERED = 1, 0.06
_MOST_GATHERED = 0.12
# The choices of an error
_UNENDED = ({"finish_reason": None},)
# Seconds that a cancelled request may take to end
_PATIENCE = 10.0
_MAX_LOG = 500
_LAST = b"exiting due to"
_REASON = "error loading model: "
_MEMORY = re.compile(r"alloc|memory|mmap", re.IGNORECASE)
_TOO_LONG = re.compile(r"input \((\d+) tokens\) is too large to process.*size: (\d+)\)")


class _News:
    """Signals of the threads of requests to the thread that reads their answers."""

    def __init__(self) -> None:
        # Some request has an answer
        self._is_new = threading.Event()
        # It is the first token of a text, or the last answer
        self._is_urgent = threading.Event()

    def announce(self, *, is_urgent: bool) -> None:
        """Announce an answer that can be taken."""
        if is_urgent:
            self._is_urgent.set()
        # Most answers come while the reader waits for the time
        if not self._is_new.is_set():
            self._is_new.set()

    def wait(self, seconds: float) -> None:
        """Wait for an urgent answer for ``seconds`` at most, then for any answer."""
        self._is_urgent.wait(max(0.0, seconds))
        self._is_new.wait()
        self._is_urgent.clear()
        self._is_new.clear()


class _Call:
    """A request in progress."""

    def __init__(self, server: Any, body: dict[str, Any], news: _News) -> None:
        self.answers = SimpleQueue[dict[str, Any] | Exception | None]()
        self.is_cancelled = self.is_ended = False
        self._server, self._body, self._news = server, body, news
        self._is_begun = False
        # A daemon thread, since llama.cpp ends a request only between two answers: the
        # interpreter must not wait for it
        self.thread = threading.Thread(target=self._run, name="aimage-llama", daemon=True)

    def _run(self) -> None:
        try:
            self._server.handle_completions(self._body, self._receive)
        except Exception as error:
            self.answers.put(error)
        finally:
            del self._server
            self.answers.put(None)
            self._news.announce(is_urgent=True)

    def _receive(self, answer: dict[str, Any]) -> bool:
        """Accept an answer; return True to end the request."""
        self.answers.put(answer)
        is_token = "prompt_progress" not in answer
        is_last = bool(answer.get("choices", _UNENDED)[0]["finish_reason"])
        self._news.announce(is_urgent=is_last or (is_token and not self._is_begun))
        self._is_begun = self._is_begun or is_token
        return self.is_cancelled

    def take(self) -> list[dict[str, Any]]:
        """Return the answers since the last call. Raises ContextError, UsageError, ModelError."""
        answers: list[dict[str, Any]] = []
        while not self.is_ended and not self.answers.empty():
            answer = self.answers.get()
            if isinstance(answer, Exception):
                raise _build_server_error(answer) from None
            if answer is None:
                self.is_ended = True
            else:
                answers.append(_check(answer))
        return answers


class LlamaServer:
    """A loaded model. Requests may be open at once; each yields answers as they arrive.

    Raises:
        ModelError: llama.cpp cannot load the model, for the reason in the message.
    """

    def __init__(self, params: xllamacpp.CommonParams) -> None:
        self.is_embedding = bool(params.embedding)
        server = [_start(params)]
        calls = weakref.WeakSet[_Call]()
        self._server, self._calls = server, calls
        self._news = _News()
        # When this thread last waited for answers, and the most that one text had then
        self._looked, self._most = 0.0, 0
        # Requests in progress
        self._open = 0
        # Without an answer since then
        self._asked = set[_Call]()
        # Also when the process exits
        self.close = weakref.finalize(self, _close, server, calls)

    def stream(self, body: dict[str, Any]) -> Generator[list[dict[str, Any]], None, None]:
        """Yield the answers to a completion, those together that came together.

        The first item is empty, once llama.cpp has the request. Later ones are empty while another
        request may have answers: all that are open are read in turns. Closing the generator ends
        the request. Answers of a fast model are gathered: a thread that wakes for each token takes
        the core on which llama.cpp computes the next one.

        Raises:
            ContextError, UsageError: The request is refused.
            ModelError: llama.cpp fails.
        """
        call = _Call(self._server[0], body, self._news)
        self._calls.add(call)
        call.thread.start()
        self._open += 1
        try:
            yield []
            while not call.is_ended:
                if call.answers.empty():
                    self._pause(call)
                answers = call.take()
                self._most = max(self._most, len(answers))
                yield answers
        finally:
            call.is_cancelled = True
            self._open -= 1
            self._asked.discard(call)

    def wake(self) -> None:
        """End a wait for answers, from any thread."""
        self._news.announce(is_urgent=True)

    def _pause(self, call: _Call) -> None:
        """Wait for answers, unless other requests have not been asked since the last wait."""
        if call in self._asked:
            seconds = _FAST_GATHERED if self._most > _FAST else GATHERED
            seconds = min(_MOST_GATHERED, seconds * self._open)
            self._news.wait(self._looked + seconds - time.monotonic())
            self._looked, self._most = time.monotonic(), 0
            self._asked.clear()
        self._asked.add(call)

    def embed(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the answer with embeddings. Raises the errors of ``stream``."""
        try:
            answer = self._server[0].handle_embeddings({"input": list(texts)})
        except Exception as error:
            raise _build_server_error(error) from None
        return _check(answer)


def _build_server_error(error: Exception) -> ModelError:
    """Return an error without the message of an exception: it may contain a prompt."""
    return ModelError(f"llama.cpp failed: {type(error).__name__}")


def _check(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that is not an error; raise its error otherwise."""
    error = answer.get("error")
    if error is None:
        return answer
    message = str(error.get("message"))
    if error.get("type") == "exceed_context_size_error":
        raise ContextError(int(error["n_prompt_tokens"]), int(error["n_ctx"]))
    if (sizes := _TOO_LONG.match(message)) is not None:
        raise ContextError(int(sizes[1]), int(sizes[2]))
    kind: type[ContentError] = UsageError if error.get("code") == 400 else ModelError
    raise kind(f"llama.cpp refuses the request: {message:.500}")


def _start(params: xllamacpp.CommonParams) -> xllamacpp.Server:
    params.verbosity = _SILENT
    params.api_keys = [secrets.token_hex(32)]
    params.endpoint_metrics = True
    try:
        with create_temporary_directory() as directory:
            params.hostnames = [f"{directory}/{_SILENT}.sock"]
            server = xllamacpp.Server(params)
    except RuntimeError:
        raise _build_load_error(_capture_reason(params)) from None
    # Wait until its loop runs: a server that is stopped before that never ends
    server.handle_metrics()
    return server


def _build_load_error(reason: str) -> ModelError:
    """Return an error of a load; without a reason of the model another load may succeed."""
    is_passing = not reason or _MEMORY.search(reason)
    kind = NoMemoryError if is_passing else ModelError
    return kind(f"llama.cpp cannot load the model: {reason or 'it states no reason'}")


def _capture_reason(params: xllamacpp.CommonParams) -> str:
    """Load the model again, and return the messages that llama.cpp writes to stderr.

    The stderr of the whole process is redirected meanwhile.
    """
    params.verbosity = _ERRORS
    with create_temporary_directory() as directory, Path(directory, "log").open("w+b") as log:
        params.hostnames = [f"{directory}/{_ERRORS}.sock"]
        stderr = os.dup(2)
        try:
            os.dup2(log.fileno(), 2)
            xllamacpp.Server(params).handle_metrics()
        except RuntimeError:
            lines = _read_log(Path(log.name))
        else:
            # It can be loaded now
            lines = []
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    # such as ``0.00.083.579 E llama_model_load: error loading model: ...``
    texts = [text for line in lines if (text := line.partition(" E ")[2].strip())]
    reasons = [text.rpartition(_REASON)[2] for text in texts if _REASON in text] or texts
    return "; ".join(reasons)[:_MAX_LOG]


def _read_log(path: Path) -> list[str]:
    """Return the lines up to the last message."""
    # A thread of llama.cpp writes them, perhaps after the error was raised
    for _ in range(100):
        if _LAST in (data := path.read_bytes()):
            break
        time.sleep(0.01)
    return data.decode(errors="replace").splitlines()


def _close(server: list[Any], calls: weakref.WeakSet[_Call]) -> None:
    """End all requests, then the server."""
    open_calls = list(calls)
    for call in open_calls:
        call.is_cancelled = True
    for call in open_calls:
        call.thread.join(_PATIENCE)
    server.clear()
