"""The process of one loaded model: ``python -m clowder_aimage.worker.process``.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.errors import AImageError
from clowder_aimage.layout.stores import Stores
from clowder_aimage.oci import Reference
from clowder_aimage.worker import frame

_log = logging.getLogger(__name__)


class Process:
    """One model, and the requests that it serves one after another."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._commands: queue.Queue[frame.Message | None] = queue.Queue()
        self._cancelled: set[int] = set()
        self._is_alone = False  # the worker is gone
        self._model: Any = None
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
        except AImageError as error:
            said = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            self._say({"is": "error", "id": number, "code": error.exit_code, **said})
        except MemoryError:
            self._say(
                {
                    "is": "error",
                    "id": number,
                    "code": 1,
                    "kind": "MemoryError",
                    "message": "there is not enough memory for this",
                    "hint": None,
                }
            )
        except Exception as error:  # whatever it is, the worker must hear of it
            _log.exception("the model process failed")
            text = f"the model failed: {type(error).__name__}"
            self._say(
                {
                    "is": "error",
                    "id": number,
                    "code": 1,
                    "kind": "Exception",
                    "message": text,
                    "hint": None,
                }
            )

    def _load(self, command: frame.Message) -> None:
        from clowder_aimage import generate

        begun = time.monotonic()
        store = Stores([Path(root) for root in command["roots"]])
        lease = self._leases.enter_context(store.lease())
        stored = generate.find(store, Reference.parse(command["reference"]), lease)
        self._model = generate.load(store, stored, dtype=command.get("dtype"))
        self._say(
            {
                "is": "loaded",
                "device": self._model.backend,
                "dtype": self._model.dtype,
                "bytes": _resident(),
                "seconds": time.monotonic() - begun,
            }
        )

    def _generate(self, command: frame.Message) -> None:
        from clowder_aimage.generate import make_request
        from clowder_aimage.model.picture import encode_picture
        from clowder_aimage.model.pipeline import Image, Preview

        number: int = command["id"]
        prompt, wishes = command["prompt"], command["wishes"]
        request = make_request(self._model.stored.aimage, prompt, **wishes)
        facts = self._facts(command, request)
        events = self._model.generate(request)  # which refuses at once what it cannot make
        self._say({"is": "begun", "id": number})
        with contextlib.closing(events):
            for event in self._until_cancelled(number, events):
                if isinstance(event, Image):
                    own = facts | {"seed": event.seed}
                    data = encode_picture(event.pixels, own, **command.get("encoding", {}))
                    said = {"seed": event.seed, "picture": event.picture}
                    size = {"width": event.width, "height": event.height}
                    self._say({"is": "image", "id": number, **said, **size}, data)
                elif isinstance(event, Preview):
                    data = encode_picture(event.pixels, None, **command.get("encoding", {}))
                    at = {"number": event.number, "picture": event.picture}
                    self._say({"is": "preview", "id": number, **at}, data)
                else:
                    at = {"index": event.index, "total": event.total, "picture": event.picture}
                    self._say({"is": "step", "id": number, **at})
        is_cut = number in self._cancelled or self._is_alone
        self._say({"is": "done", "id": number, "cancelled": is_cut})
        self._cancelled.discard(number)

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
        self._target.write(frame.encode(message, data))
        self._target.flush()


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
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        Process(source, target).run()
    os._exit(0)  # at once: nothing here is worth waiting for


if __name__ == "__main__":
    main()
