"""The process of one job: ``python -m clowder_aimage.engine.job_process``.

A command is read from standard input; progress and the result are written to standard output as
frames. The process has a low priority, so that models are not slowed down much, and may use the
memory that is available when it begins. When the worker ends, standard input is closed and this
process exits; complete blobs stay in the store, for gc.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.config.user_directory import use_store_settings
from clowder_aimage.engine import frame, machine
from clowder_aimage.errors import AImageError
from clowder_aimage.importer import PackedModel, Recipe
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.runnable import open_runnable
from clowder_aimage.oci import Reference

# Seconds between two reports
_INTERVAL = 0.2
# Added to the nice value
_NICE = 10
# Share of the available memory for the process
_SHARE = 0.8
# A thread for each two cores
_CORES = 2
_log = logging.getLogger("aimage.worker")


@dataclass(slots=True)
class JobReport:
    """The frames of a job. Thread-safe.

    ``stage`` is "reading" while values are examined, then "writing"; bytes are counted in each.
    """

    target: BinaryIO
    stage: str = ""
    completed: int = 0
    total: int = 0
    _sent: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, stage: str, total: int) -> None:
        """Begin a stage of ``total`` bytes."""
        with self._lock:
            self.stage, self.completed, self.total = stage, 0, total
            self._send_progress()

    def advance(self, count: int) -> None:
        """Count ``count`` bytes; report them if the last report is old."""
        with self._lock:
            self.completed += count
            if self.completed >= self.total or time.monotonic() - self._sent > _INTERVAL:
                self._send_progress()

    def send(self, event: str, /, **facts: Any) -> None:
        """Write a frame."""
        self.target.write(frame.encode({"is": event, **facts}))
        self.target.flush()

    def build_callbacks(self) -> dict[str, Any]:
        """Return the callbacks of writing."""
        return {
            "on_plan": lambda plan: self.begin("writing", plan.size),
            "on_written": lambda written: self.advance(written.layer.descriptor.size),
        }

    def _send_progress(self) -> None:
        self._sent = time.monotonic()
        self.send("progress", stage=self.stage, completed=self.completed, total=self.total)


def perform(command: frame.Message, report: JobReport) -> None:
    """Execute a command; report its progress and the result or the error."""
    try:
        packed, remark = _change(command, report)
    except BrokenPipeError:
        # The worker has exited
        raise
    except AImageError as error:
        report.send("error", kind=type(error).__name__, message=error.message, hint=error.hint)
    except Exception as error:
        # Every error is reported to the worker
        if machine.lacks_memory(error):
            hint = "unload models, then try again"
            report.send("error", kind="NoMemoryError", message="not enough memory", hint=hint)
            return
        _log.error("a job failed: %s", type(error).__name__)
        message = f"the job failed: {type(error).__name__}"
        report.send("error", kind="ModelError", message=message, hint=None)
    else:
        size = sum(packed_layer.layer.descriptor.size for packed_layer in packed.layers)
        new = sum(
            packed_layer.layer.descriptor.size
            for packed_layer in packed.layers
            if not packed_layer.existed
        )
        digest = str(packed.descriptor.digest)
        report.send("done", digest=digest, size=size, new=new, remark=remark)


def _change(command: frame.Message, report: JobReport) -> tuple[PackedModel, str]:
    store = LayeredStore([Path(root) for root in command["roots"]])
    source, target = Reference.parse(command["model"]), Reference.parse(command["target"])
    threads = max(1, (os.cpu_count() or 1) // _CORES)
    if command["kind"] == "fuse":
        return _fuse(command, report, store, source, target, threads)
    from clowder_aimage.create import convert

    survey = {"on_survey": partial(report.begin, "reading"), "on_surveyed": report.advance}
    recipe = Recipe.parse(**command["recipe"])
    options = {
        "is_attached": command["attach"],
        "threads": threads,
        **survey,
        **report.build_callbacks(),
    }
    return convert(store, source, target, recipe, **options), ""


def _fuse(
    command: frame.Message,
    report: JobReport,
    store: LayeredStore,
    source: Reference,
    target: Reference,
    threads: int,
) -> tuple[PackedModel, str]:
    from clowder_aimage.adapt import fuse
    from clowder_aimage.generation.request import LoraUse
    from clowder_aimage.model.adapter_source import AdapterFinder

    directory = Path(command["lora_dir"]) if command["lora_dir"] else None
    with store.lease() as lease:
        finder = AdapterFinder(store, partial(open_runnable, store, lease=lease), directory)
        requested = [LoraUse(**use) for use in command["loras"]]
        uses = [
            (adapter := finder.find(use), adapter.resolve_strength(use.strength))
            for use in requested
        ]
        result = fuse(store, source, target, uses, threads=threads, **report.build_callbacks())
    return result.packed, result.remark


def _await_end(source: BinaryIO) -> None:
    """Exit when the worker has exited: its end of the pipe is closed then."""
    source.read()
    os._exit(1)


def main() -> None:
    """Run the process; redirect the output of libraries to standard error."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Libraries warn of values from models, such as overflows
    warnings.simplefilter("ignore")
    logging.raiseExceptions = False
    os.nice(_NICE)
    use_store_settings()
    if (received := frame.read(source)) is None:
        return
    threading.Thread(target=_await_end, args=(source,), daemon=True).start()
    free = machine.read_available_memory()
    machine.limit_memory(None if free is None else int(free * _SHARE))
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        perform(received[0], JobReport(target))
    sys.stderr.flush()
    # Exit at once, without joining the threads of libraries
    os._exit(0)


if __name__ == "__main__":
    main()
