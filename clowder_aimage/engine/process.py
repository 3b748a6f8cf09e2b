"""The process of one loaded model: ``python -m clowder_aimage.engine.process``.

Commands come on standard input, answers go to standard output, both as frames. The first thread
owns MLX and does the work; a second one reads commands, so that a cancel is heard between two
steps. When the worker is gone, standard input ends, and so does this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.engine import frame
from clowder_aimage.errors import AImageError, ModelError
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Descriptor, Reference

_EVERY = 1.0  # seconds between two words on a load
_NO_MEMORY = ("allocate", "out of memory", "bad_alloc")  # as MLX says it, and what it stands on

_log = logging.getLogger(__name__)


class _Known(LayeredStore):
    """Stores in which every name means one manifest: the one that was found for a request, though
    its tag may mean another one by now."""

    def __init__(self, roots: Sequence[Path], manifest: Descriptor) -> None:
        super().__init__(roots)
        self._manifest = manifest

    def resolve(self, _: Reference, /) -> Descriptor:
        return self._manifest


class ModelProcess:
    """One model, and the requests that it serves one after another."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._commands: queue.Queue[frame.Message | None] = queue.Queue()
        self._cancelled: set[int] = set()
        self._is_alone = False  # the worker is gone
        self._model: Any = None
        self._turn = threading.Lock()  # of whoever writes a frame
        self._leases = contextlib.ExitStack()

    def run(self) -> None:
        """Serve until standard input ends."""
        threading.Thread(target=self._listen, daemon=True).start()
        with self._leases:
            while (command := self._commands.get()) is not None:
                self._obey(command)

    def _listen(self) -> None:
        try:
            while (found := frame.read(self._source)) is not None:
                command, _ = found
                if command["do"] == "cancel":
                    self._cancelled.add(command["id"])
                else:
                    self._commands.put(command)
        finally:
            self._is_alone = True
            self._commands.put(None)

    def _obey(self, command: frame.Message) -> None:
        number = command.get("id")
        try:
            if command["do"] == "load":
                self._load(command)
            else:
                self._generate(command)
        except BrokenPipeError:  # the worker is gone, and nobody hears of anything
            raise
        except AImageError as error:
            kind = type(error).__name__
            self._fail(number, kind, error.message, hint=error.hint, code=error.exit_code)
        except Exception as error:  # whatever it is, the worker must hear of it
            if _lacks_memory(error):
                self._fail(number, "MemoryError", "there is not enough memory for this")
                return
            # on one line, and without its text, which may hold a prompt
            _log.error("the model failed: %s at %s", type(error).__name__, _places(error))
            self._fail(number, "Exception", f"the model failed: {type(error).__name__}")
        finally:
            self._cancelled.discard(number or 0)

    def _fail(
        self, number: int | None, kind: str, message: str, *, hint: str | None = None, code: int = 1
    ) -> None:
        said = {"kind": kind, "message": message, "hint": hint}
        self._say({"is": "error", "id": number, "code": code, **said})

    def _load(self, command: frame.Message) -> None:
        generate = _needs_mlx()
        begun = time.monotonic()
        store = _Known(
            [Path(root) for root in command["roots"]],
            Descriptor.from_json(command["manifest"], "manifest"),
        )
        lease = self._leases.enter_context(store.lease())
        with self._telling_size():
            stored = generate.find(store, Reference.parse(command["reference"]), lease)
            self._model = generate.load(store, stored, dtype=command.get("dtype"))
            _make_room(self._model.pipeline, command["keep"])
        self._say(
            {
                "is": "loaded",
                "device": self._model.backend,
                "dtype": self._model.dtype,
                "bytes": _resident(),
                "seconds": time.monotonic() - begun,
            }
        )

    @contextlib.contextmanager
    def _telling_size(self) -> Iterator[None]:
        """Tell meanwhile how much memory this process has: while that grows, a load moves."""
        is_over = threading.Event()

        def tell() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(_EVERY):
                    self._say({"is": "loading", "bytes": _resident()})

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _generate(self, command: frame.Message) -> None:
        from clowder_aimage.generate import make_request
        from clowder_aimage.model.picture import encode_picture
        from clowder_aimage.model.pipeline import Image, Preview

        number: int = command["id"]
        prompt, wishes = command["prompt"], command["wishes"]
        request = make_request(self._model.stored.aimage, prompt, **wishes)
        facts = self._facts(command, request)
        encoding = dict(command["encoding"])
        remembers = encoding.pop("facts", True)
        events = self._model.generate(request)  # which refuses at once what it cannot make
        self._say({"is": "begun", "id": number})
        with contextlib.closing(events):
            for event in self._until_cancelled(number, events):
                if isinstance(event, Image):
                    own = facts | {"seed": event.seed} if remembers else None
                    data = encode_picture(event.pixels, own, **encoding)
                    said = {"seed": event.seed, "picture": event.picture}
                    size = {"width": event.width, "height": event.height}
                    self._say({"is": "image", "id": number, **said, **size}, data)
                elif isinstance(event, Preview):
                    data = encode_picture(event.pixels, None, **encoding)
                    at = {"number": event.number, "picture": event.picture}
                    self._say({"is": "preview", "id": number, **at}, data)
                else:
                    at = {"index": event.index, "total": event.total, "picture": event.picture}
                    self._say({"is": "step", "id": number, **at})
        is_cut = number in self._cancelled or self._is_alone
        self._say({"is": "done", "id": number, "cancelled": is_cut})

    def _until_cancelled(self, number: int, events: Iterator[Any]) -> Iterator[Any]:
        if number in self._cancelled:
            return
        for event in events:
            yield event
            if number in self._cancelled or self._is_alone:
                return

    def _facts(self, command: frame.Message, request: Any) -> dict[str, Any]:
        from clowder_aimage.generate import describe_picture

        name = command["reference"].partition("@")[0]  # the digest is a fact of its own
        return describe_picture(Reference.parse(name), self._model, request)

    def _say(self, message: frame.Message, data: bytes = b"") -> None:
        with self._turn:
            self._target.write(frame.encode(message, data))
            self._target.flush()


def _needs_mlx() -> Any:
    """The module ``generate``. Raises ModelError where the extra [mlx] is not installed."""
    try:
        from clowder_aimage import generate
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise ModelError(
            f"this worker keeps models and runs none: {error.name} is not installed "
            "(pip install 'clowder-aimage[mlx]')"  # in the message: a 5xx tells no hint
        ) from None
    return generate


def _lacks_memory(error: Exception) -> bool:
    """Whether it is for want of memory; MLX raises a RuntimeError then."""
    said = str(error).lower()
    is_said = isinstance(error, RuntimeError) and any(word in said for word in _NO_MEMORY)
    return isinstance(error, MemoryError) or is_said


def _places(error: Exception) -> str:
    """Where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return ", ".join(f"{each.filename}:{each.lineno} {each.name}" for each in frames[-5:])


def _make_room(pipeline: Any, keep: Mapping[str, Any]) -> None:
    """Tell the pipeline its share of the memory."""
    from clowder_aimage.engine import machine
    from clowder_aimage.model.memory_budget import device_memory

    there = device_memory() or machine.memory()
    share = there if keep["memory"] is None else keep["memory"]
    share = None if share is None else share // keep["models"]
    pipeline.make_room(keep["text_encoder"], share, there)


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used if sys.platform == "darwin" else used * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Keep standard output for frames: what a library prints goes to standard error."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # One line each: the worker takes them into its own log. Where it is gone, nobody reads them.
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.raiseExceptions = False
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        ModelProcess(source, target).run()
    os._exit(0)  # at once: nothing here is worth waiting for


if __name__ == "__main__":
    main()
