"""The process of one loaded model: ``python -m clowder_aimage.engine.process``.

Commands are read from standard input and replies are written to standard output as frames. The
main thread owns MLX and does the work; a second thread reads commands, so that a cancellation is
noticed between two steps. When the worker ends, standard input is closed and this process exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.content import Lease
from clowder_aimage.engine import frame, machine
from clowder_aimage.errors import AImageError, ModelError, StuckError
from clowder_aimage.layout.completeness import find_complete
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Descriptor, Reference

_INTERVAL = 1.0  # seconds between two reports of a load
_FACTS = ("adapter", "controlnet")  # of errors, for the worker
_NO_MEMORY = ("allocate", "out of memory", "bad_alloc")  # in messages of MLX and its libraries

_log = logging.getLogger("aimage.worker")


class _PinnedStore(LayeredStore):
    """Stores in which every name resolves to one manifest, even if the tag has moved."""

    def __init__(self, roots: Sequence[Path], manifest: Descriptor) -> None:
        super().__init__(roots)
        self._manifest = manifest

    def resolve(self, _: Reference, /) -> Descriptor:
        return self._manifest


class ModelProcess:
    """One model and its requests, served one after another."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._commands: queue.Queue[frame.Message | None] = queue.Queue()
        self._cancelled: set[int] = set()
        self._is_orphaned = False  # the worker has exited
        self._is_stuck = False  # a thread runs that cannot be ended
        self._is_complete = False  # no more blobs will arrive
        self._model: Any = None
        self._lock = threading.Lock()  # guards the target
        self._leases = contextlib.ExitStack()

    def run(self) -> None:
        """Serve until standard input is closed."""
        threading.Thread(target=self._read, daemon=True).start()
        with self._leases:
            while not self._is_stuck and (command := self._commands.get()) is not None:
                self._execute(command)

    def _read(self) -> None:
        try:
            while (found := frame.read(self._source)) is not None:
                command, _ = found
                if command["do"] == "cancel":
                    self._cancelled.add(command["id"])
                else:
                    self._commands.put(command)
        finally:
            self._is_orphaned = True
            self._commands.put(None)

    def _execute(self, command: frame.Message) -> None:
        number = command.get("id")
        try:
            if command["do"] == "load":
                self._load(command)
            else:
                self._generate(command)
        except BrokenPipeError:  # the worker has exited
            raise
        except AImageError as error:
            facts = {key: error.facts[key] for key in _FACTS if key in error.facts}
            self._fail(number, type(error).__name__, error.message, error.hint, **facts)
            self._is_stuck = isinstance(error, StuckError)
        except Exception as error:  # every error is reported to the worker
            if _lacks_memory(error):
                self._fail(number, "MemoryError", "not enough memory")
                return
            _log_error("the model failed", error)
            self._fail(number, "ModelError", f"the model failed: {type(error).__name__}")
        finally:
            self._cancelled.discard(number or 0)

    def _fail(
        self, number: int | None, kind: str, message: str, hint: str | None = None, **facts: str
    ) -> None:
        self._send("error", number, kind=kind, message=message, hint=hint, facts=facts)

    def _load(self, command: frame.Message) -> None:
        generate = _needs_mlx()
        from clowder_aimage.model.memory_budget import device_memory, resident_memory
        from clowder_aimage.model.pipeline import GenerateRequest

        if device_memory() is None:  # drivers of GPUs map more than there is
            _limit_memory(machine.memory())
        manifest = Descriptor.from_json(command["manifest"], "manifest")
        store = _PinnedStore([Path(root) for root in command["roots"]], manifest)
        lease = self._leases.enter_context(store.lease())
        with self._reporting():
            found = self._find(store, manifest, command, lease)
            how = {"dtype": command.get("dtype"), "finder": self._finder(command)}
            self._model = generate.load(found.files, found.stored, **how)
            _set_memory(self._model.pipeline, command)
            if command.get("request"):  # its texts are encoded while other blobs arrive
                self._model.prepare(GenerateRequest(**command["request"]))
            usual = GenerateRequest.for_model(found.stored.aimage, "")
            memory = self._model.preload(usual)
        model = {"device": self._model.backend, "dtype": self._model.dtype}
        self._send("loaded", **model, memory=memory, bytes=resident_memory())

    def _find(
        self, store: LayeredStore, manifest: Descriptor, command: frame.Message, lease: Lease
    ) -> Any:
        """Return the AImage of a command. If it is arriving, the command has its manifest."""
        generate = _needs_mlx()
        document = command.get("document")
        if document is None:
            stored = find_complete(store, Reference.parse(command["reference"]), lease)
            return generate.FetchedAImage(stored, store)
        # the worker ends this process if the pull fails
        return generate.find_arriving(store, manifest, document.encode(), lease, self._is_over)

    def _finder(self, command: frame.Message) -> Any:
        """Return what finds adapters in the stores and the directory of a command."""
        from clowder_aimage.adapter_source import AdapterFinder

        store = LayeredStore([Path(root) for root in command["roots"]])
        lease, place = self._leases.enter_context(store.lease()), command.get("lora_dir")
        find = partial(find_complete, store, lease=lease)
        return AdapterFinder(store, find, Path(place) if place else None)

    def _is_over(self) -> bool:
        return self._is_orphaned or self._is_complete

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report this process's memory periodically: it grows while a load makes progress."""
        from clowder_aimage.model.memory_budget import resident_memory

        is_over = threading.Event()

        def report() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(_INTERVAL):
                    self._send("loading", bytes=resident_memory())

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _generate(self, command: frame.Message) -> None:
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.model.memory_budget import resident_memory
        from clowder_aimage.model.picture import encode_picture
        from clowder_aimage.model.picture_facts import stated_facts
        from clowder_aimage.model.pipeline import GenerateRequest, Image, PictureEncoding, Preview

        self._is_complete = True  # requests are sent when the AImage is in the store
        number: int = command["id"]
        request = GenerateRequest(**command["request"])
        encoding = PictureEncoding(**command["encoding"])
        name = command["reference"].partition("@")[0]  # the digest is a separate fact
        facts = describe_picture(Reference.parse(name), self._model, request)
        events = self._model.generate(request)  # raises at once if the request cannot be served
        self._send("started", number)
        with contextlib.closing(events):
            for event in self._until_cancelled(number, events):
                if isinstance(event, Image):
                    kind, quality = encoding.kind, encoding.quality
                    own = stated_facts(facts | {"seed": event.seed}, kind, quality)
                    stored = own if encoding.has_facts else None
                    data = encode_picture(event.pixels, stored, kind, quality)
                    names = ("seed", "picture", "width", "height")
                    size = {name: getattr(event, name) for name in names}
                    self._send("image", number, data, **size, facts=own)
                elif isinstance(event, Preview):
                    data = encode_picture(event.pixels, None, encoding.kind, encoding.quality)
                    self._send("preview", number, data, number=event.number, picture=event.picture)
                else:
                    self._send("step", number, **asdict(event))
        is_cancelled = number in self._cancelled or self._is_orphaned
        self._send("done", number, cancelled=is_cancelled, bytes=resident_memory())

    def _until_cancelled(self, number: int, events: Iterator[Any]) -> Iterator[Any]:
        if number in self._cancelled:
            return
        for event in events:
            yield event
            if number in self._cancelled or self._is_orphaned:
                return

    def _send(
        self, kind: str, request: int | None = None, data: bytes = b"", /, **facts: Any
    ) -> None:
        message = {"is": kind, "id": request, **facts}
        with self._lock:
            self._target.write(frame.encode(message, data))
            self._target.flush()


def _needs_mlx() -> Any:
    """Import and return the module ``generate``. Raises ModelError without the extra [mlx]."""
    try:
        from clowder_aimage import generate
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise ModelError("this worker cannot run models: it needs the extra [mlx]") from None
    return generate


def _lacks_memory(error: Exception) -> bool:
    """Return whether an allocation failed, for which MLX raises a RuntimeError."""
    text = str(error).lower()
    is_of_mlx = isinstance(error, RuntimeError) and any(word in text for word in _NO_MEMORY)
    return isinstance(error, MemoryError) or is_of_mlx


def _log_error(event: str, error: BaseException | None) -> None:
    """Log one line about an error, without its message, which may contain a prompt."""
    frames = traceback.extract_tb(error.__traceback__ if error is not None else None)
    places = ", ".join(f"{each.filename}:{each.lineno} {each.name}" for each in frames[-5:])
    _log.error("%s: %s at %s", event, type(error).__name__, places)


def _limit_memory(share: int | None) -> None:
    """Make allocations beyond the machine's memory fail, before the system ends other processes.

    ``share`` is what ``machine.memory`` returns.
    """
    if sys.platform == "linux" and share is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        total = share * 5 // 4
        soft = total if hard == resource.RLIM_INFINITY else min(total, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _set_memory(pipeline: Any, command: frame.Message) -> None:
    from clowder_aimage.model.memory_budget import AUTO, device_memory

    total = device_memory() or machine.memory()
    share = total if command["memory"] is None else command["memory"]
    share = None if share is None else share // command["models"]
    kept = command["text_encoder"]
    pipeline.set_memory(AUTO, share, total, text_encoder=kept, limit=command["memory"])


def main() -> None:
    """Run the process; redirect the output of libraries to standard error."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # of libraries, about values from models
    # One line each, for the worker's log; no errors after the worker has exited
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.raiseExceptions = False
    sys.excepthook = lambda _, error, __: _log_error("the process failed", error)
    threading.excepthook = lambda failed: _log_error("a thread failed", failed.exc_value)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        ModelProcess(source, target).run()
    os._exit(0)  # without joining threads


if __name__ == "__main__":
    main()
