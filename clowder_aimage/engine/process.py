"""The process of one loaded model: ``python -m clowder_aimage.engine.process``.

Commands are read from standard input and replies are written to standard output as frames. The
main thread owns MLX and does the work; a second thread reads commands, so that a cancellation is
noticed between two steps, and a third one encodes and sends pictures while the next request is
computed. When the worker ends, standard input is closed and this process exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from clowder_aimage.config.user_directory import use_store_settings
from clowder_aimage.engine import frame, local_fetch, machine
from clowder_aimage.engine.frame_writer import FrameWriter
from clowder_aimage.engine.picture_sender import PictureSender
from clowder_aimage.errors import AImageError, ModelError, StuckError, UsageError, needs
from clowder_aimage.layout.compiled import open_compiled
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.library_choice import parse_library_options
from clowder_aimage.model.process_memory import read_resident_memory
from clowder_aimage.model.refusal import refuse_unrunnable
from clowder_aimage.model.runnable import open_runnable
from clowder_aimage.model.text.language_model import (
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextEvent,
    TextNotice,
    TextRequest,
    join_embeddings,
)
from clowder_aimage.model.text.runtime import find_runtime, load_language_model
from clowder_aimage.oci import Descriptor, Reference

# Seconds between two reports of a load
_INTERVAL = 1.0
# AImages of the same base that stay open
_MAX_VARIANTS = 32
# Facts of errors that the worker needs
_FACTS = ("adapter", "controlnet", "field", "tokens", "context")

_Text = TextEvent | Embeddings
_log = logging.getLogger("aimage.worker")


class _PinnedStore(LayeredStore):
    """Stores that resolve every name to the same manifest, even if the tag has moved."""

    def __init__(self, roots: Sequence[Path], manifest: Descriptor) -> None:
        super().__init__(roots)
        self._manifest = manifest

    def resolve(self, _: Reference, /) -> Descriptor:
        return self._manifest


@dataclass(frozen=True, slots=True, eq=False)
class _OpenPictures:
    """The pictures of a request that are being made; ``send`` encodes and sends one.

    adapters: those that change weights.
    """

    events: Generator[Any, None, None]
    send: Callable[[Any], None]
    adapters: tuple[Any, ...] = ()


class ModelProcess:
    """One model and its requests, in turns, or one after another."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._frames = source, FrameWriter(target)
        self._commands: queue.Queue[frame.Message | None] = queue.Queue()
        self._cancelled: set[int] = set()
        # The worker has exited
        self._is_orphaned = False
        # A thread of a library does not end: the process must exit
        self._is_stuck = False
        # No more blobs will arrive
        self._is_complete = False
        # Of the files of pictures
        self._is_marked = True
        self._signer: Any = None
        self._model: Any = None
        # Of a pipeline: the request that its memory is planned for
        self._defaults: Any = None
        # Of a pipeline: other AImages of its base by digest, with their leases
        self._variants: dict[str, tuple[Any, contextlib.ExitStack]] = {}
        self._roots: list[Path] = []
        # Bytes for all models; None if unknown, and in the process of a language model
        self._memory: int | None = None
        # Served in turns, an event each
        self._texts: dict[int, Generator[_Text, None, None]] = {}
        # Served in turns, a step each
        self._pictures: dict[int, _OpenPictures] = {}
        self._leases = contextlib.ExitStack()
        self._sender = PictureSender(self._reporting_errors)

    def run(self) -> None:
        """Serve until standard input is closed."""
        for work in (self._read, self._frames.write_in_time):
            threading.Thread(target=work, daemon=True).start()
        with self._leases:
            while not self._is_stuck and (command := self._take_command()) is not None:
                self._execute(command)

    def _take_command(self) -> frame.Message | None:
        """Return the next command, after turns of the open requests; None at the end."""
        while self._is_busy and not self._is_stuck and self._commands.empty():
            self._take_turns()
        if self._commands.empty():
            self._measure_batches()
        return self._commands.get()

    def _measure_batches(self) -> None:
        """Measure how many passes are computed at once, if that is due.

        A request that arrives meanwhile waits for seconds, once for a model and a device.
        """
        # Only of a pipeline
        if self._defaults is None:
            return
        try:
            if self._model.pipeline.measure_batches():
                self._send("batches", batches=self._model.batches.to_json())
        except BrokenPipeError:
            raise
        except Exception as error:
            # Pictures can be computed alone
            _log_error("batches cannot be measured", error)

    @property
    def _is_busy(self) -> bool:
        return bool(self._texts or self._pictures)

    def _take_turns(self) -> None:
        """Send the next event of each open text, and those of a step of all open pictures."""
        self._take_step()
        for request_id, events in [*self._texts.items()]:
            with self._reporting_errors(request_id):
                self._advance(request_id, events)
        self._frames.flush()

    def _read(self) -> None:
        try:
            while (received := frame.read(self._source)) is not None:
                command, _ = received
                if command["do"] == "cancel":
                    self._cancelled.add(command["id"])
                    self._wake()
                elif command["do"] == "try":
                    threading.Thread(target=self._try_schema, args=(command,), daemon=True).start()
                elif command["do"] == "write" and command["request"].get("schema") is not None:
                    threading.Thread(target=self._prepare, args=(command,), daemon=True).start()
                else:
                    self._put(command)
        finally:
            self._is_orphaned = True
            self._put(None)

    def _put(self, command: frame.Message | None) -> None:
        self._commands.put(command)
        self._wake()

    def _wake(self) -> None:
        """End a wait of open texts for their tokens."""
        if self._texts:
            self._model.wake()

    def _try_schema(self, command: frame.Message) -> None:
        """Try the schema of a request while others are served."""
        request_id: int = command["id"]
        with self._reporting_errors(request_id):
            request = TextRequest.from_json(command["request"])
            self._model.try_schema(request, partial(self._is_cancelled, request_id))
            self._end(request_id)

    def _prepare(self, command: frame.Message) -> None:
        """Prepare a request while others are served, then queue it."""
        request_id: int = command["id"]
        with self._reporting_errors(request_id):
            request = TextRequest.from_json(command["request"])
            self._model.prepare(request, partial(self._is_cancelled, request_id))
            self._put(command)

    def _execute(self, command: frame.Message) -> None:
        request_id = command.get("id")
        work = {
            "load": self._load,
            "reserve": self._reserve,
            "sleep": self._sleep,
            "wake": self._wake_up,
            "embed": self._write,
            "write": self._write,
        }
        with self._reporting_errors(request_id):
            work.get(command["do"], self._generate)(command)
        if command["do"] != "generate" and request_id not in self._texts:
            self._cancelled.discard(request_id or 0)

    @contextlib.contextmanager
    def _reporting_errors(self, request_id: int | None) -> Iterator[None]:
        """Report the error of a request to the worker."""
        try:
            yield
        except BrokenPipeError:
            # The worker has exited
            raise
        except AImageError as error:
            facts = {key: error.facts[key] for key in _FACTS if key in error.facts}
            self._fail(request_id, type(error).__name__, error.message, error.hint, **facts)
            self._is_stuck = isinstance(error, StuckError)
        except Exception as error:
            # Every error is reported to the worker
            if machine.lacks_memory(error):
                self._fail(request_id, "NoMemoryError", "not enough memory")
                return
            _log_error("the model failed", error)
            self._fail(request_id, "ModelError", f"the model failed: {type(error).__name__}")

    def _fail(
        self, request_id: int | None, kind: str, message: str, hint: str | None = None, **facts: str
    ) -> None:
        self._cancelled.discard(request_id or 0)
        self._send("error", request_id, kind=kind, message=message, hint=hint, facts=facts)

    def _load(self, command: frame.Message) -> None:
        manifest = Descriptor.from_json(command["manifest"], "manifest")
        self._roots = [Path(root) for root in command["roots"]]
        store = _PinnedStore(self._roots, manifest)
        lease = self._leases.enter_context(store.lease())
        with self._reporting():
            if "document" not in command:
                reference = Reference.parse(command["reference"])
                stored = open_runnable(store, reference, lease)
                if find_runtime(stored.aimage) is not None:
                    self._load_text(store, stored, command)
                else:
                    self._load_pipeline(local_fetch.FetchedAImage(stored, store), command)
                return
            # The worker ends this process if the pull fails
            arrival = store, manifest, command["document"].encode(), lease, self._is_over
            self._load_pipeline(local_fetch.find_arriving(*arrival), command)

    def _load_text(self, store: LayeredStore, stored: StoredAImage, command: frame.Message) -> None:
        """Load a language model."""
        names = ("dtype", "context", "parallel", "memory", "reserved")
        options = {name: command[name] for name in names if command.get(name) is not None}
        self._model = model = load_language_model(store, stored.aimage, **options)
        for warning in model.warnings:
            _log.warning("%s", warning)
        # Not with a GPU: its driver maps more than the machine's memory
        if model.device.startswith("cpu"):
            machine.limit_memory(machine.read_memory_limit())
        fields = {"parallel": model.parallel, "context": model.context}
        plan = f"a context of {model.context} tokens for each of {model.parallel} requests"
        self._report_loaded(model.device, model.dtype, plan, **fields)

    def _load_pipeline(self, fetched: Any, command: frame.Message) -> None:
        """Load an image model. Its blobs may be arriving."""
        from clowder_aimage.generation.request import GenerateRequest

        content, finder = (fetched.files, fetched.stored), self._make_finder(command)
        library = command.get("library", {})
        options = parse_library_options(library, partial(open_compiled, self._roots[0]))
        self._model = _load_model(options, *content, finder=finder)
        if self._model.warning:
            _log.warning("%s", self._model.warning)
        # Not with a GPU: its driver maps more than the machine's memory
        if self._model.device_memory is None:
            machine.limit_memory(machine.read_memory_limit())
        self._set_marking(command)
        self._set_memory(command)
        # The texts of a waiting request are encoded while other blobs arrive
        if command.get("request"):
            self._model.prepare(GenerateRequest.of(**command["request"]))
        self._defaults = GenerateRequest.draft().apply_defaults(fetched.stored.aimage)
        self._preload()

    def _preload(self) -> None:
        """Load the networks of a pipeline, and report them."""
        model = self._model
        plan, total = model.preload(self._defaults), model.device_memory or 0
        facts: dict[str, Any] = {"total": total, "discrete": model.memory.is_discrete}
        facts |= {"batches": model.batches.to_json()}
        self._report_loaded(model.backend, model.dtype, plan, **facts)

    def _sleep(self, command: frame.Message) -> None:
        """Leave the device to other models; then copy weights to the machine's memory."""
        pipeline = self._model.pipeline
        pipeline.sleep()
        self._send("asleep", bytes=self._measure_memory())
        # Without the copies, the model is loaded from its blobs
        with contextlib.suppress(AImageError):
            pipeline.copy_to_host(command["room"], lambda: not self._commands.empty())

    def _wake_up(self, command: frame.Message) -> None:
        """Load the networks again."""
        self._reserve(command)
        with self._reporting():
            self._preload()

    def _set_marking(self, command: frame.Message) -> None:
        from clowder_aimage.pictures.provenance.signer import PictureSigner
        from clowder_aimage.pictures.provenance.signing_settings import SigningSettings

        self._is_marked = command["mark"]
        if command.get("signing"):
            settings = SigningSettings.of_json(command["signing"])
            self._signer = PictureSigner.open(settings, partial(_log.warning, "%s"))

    def _set_memory(self, command: frame.Message) -> None:
        from clowder_aimage.model.flow.memory_budget import AUTO

        limit = command["memory"]
        total = self._model.device_memory or machine.read_memory_limit()
        self._memory = total if limit is None else limit
        share, text_encoder = self._compute_share(command), command["text_encoder"]
        self._model.pipeline.set_memory(AUTO, share, total, text_encoder=text_encoder, limit=limit)

    def _reserve(self, command: frame.Message) -> None:
        """Leave memory to other models; the caches of a language model stay as they are."""
        if self._memory is not None:
            self._model.pipeline.set_share(self._compute_share(command))

    def _compute_share(self, command: frame.Message) -> int | None:
        """Return the memory without that of other models."""
        return None if self._memory is None else max(1, self._memory - command["reserved"])

    def _report_loaded(self, device: str, dtype: str, memory: str, **fields: Any) -> None:
        size = self._measure_memory()
        self._send("loaded", device=device, dtype=dtype, memory=memory, bytes=size, **fields)

    def _measure_memory(self) -> int:
        """Return the bytes that admission counts: of a discrete GPU if one computes."""
        # A language model takes that of the machine
        if self._memory is not None and self._model.memory.is_discrete:
            size: int = self._model.memory.occupied
            return size
        return read_resident_memory()

    def _make_finder(self, command: frame.Message) -> Any:
        """Return a finder of adapters in the stores and the directory of a command."""
        from clowder_aimage.model.adapter_source import AdapterFinder

        store = LayeredStore(self._roots)
        lease, lora_dir = self._leases.enter_context(store.lease()), command.get("lora_dir")
        find = partial(open_runnable, store, lease=lease)
        return AdapterFinder(store, find, Path(lora_dir) if lora_dir else None)

    def _is_over(self) -> bool:
        return self._is_orphaned or self._is_complete

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report memory periodically: it grows while a load makes progress."""
        is_over = threading.Event()

        def report() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(_INTERVAL):
                    progress = read_resident_memory() + self._measure_memory()
                    self._send("loading", bytes=progress)

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _generate(self, command: frame.Message) -> None:
        """Open the pictures of a request; steps are taken in turns with those of others."""
        # They would load the networks of each other again
        while self._pictures and self._model.batches.largest == 1:
            self._take_step()
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.generation.encoding import PictureEncoding
        from clowder_aimage.generation.request import GenerateRequest

        # The worker sends requests only once the AImage is complete in the store
        self._is_complete = True
        request_id: int = command["id"]
        # If the process ends before "started", it is because of this request
        self._send("opening", request_id)
        request = GenerateRequest.of(**command["request"])
        encoding = PictureEncoding(**command["encoding"])
        # Metadata has the digest in a separate field
        name = command["reference"].partition("@")[0]
        model = self._open_variant(command)
        marking = model.plan_marking(request, self._signer, is_marked=self._is_marked)
        metadata = describe_picture(Reference.parse(name), model, request, marking)
        # Raises here, not on the first iteration, if the request cannot be served
        events = model.open(request)
        adapters = self._model.pipeline.fixed_adapters
        self._send("started", request_id, warnings=metadata.get("warnings", []))
        send = partial(
            self._send_picture,
            request_id,
            metadata=metadata,
            encoding=encoding,
            marking=marking,
        )
        self._open_pictures(request_id, _OpenPictures(events, send, adapters))

    def _open_pictures(self, request_id: int, opened: _OpenPictures) -> None:
        """Take turns with other pictures from now on; those with other weights end before."""
        while any(each.adapters != opened.adapters for each in self._pictures.values()):
            self._take_step()
        self._pictures[request_id] = opened

    def _take_step(self) -> None:
        """Let all open pictures go on to their next forward passes, and compute these at once."""
        steps = []
        for request_id in [*self._pictures]:
            with self._reporting_errors(request_id):
                steps += self._advance_pictures(request_id)
        if steps:
            self._model.pipeline.compute(steps)

    def _advance_pictures(self, request_id: int) -> list[Any]:
        """Send the events of a request up to its next passes, and return them; none at its end."""
        from clowder_aimage.model.flow.forward_pass import StepPasses
        from clowder_aimage.model.pipeline import Step

        opened = self._pictures[request_id]
        try:
            while not (self._is_cancelled(request_id) or self._sender.has_failed(request_id)):
                event = next(opened.events, None)
                if isinstance(event, StepPasses):
                    return [event]
                if event is None:
                    break
                if isinstance(event, Step):
                    self._send("step", request_id, **asdict(event))
                else:
                    self._sender.put(request_id, partial(opened.send, event))
        except BaseException:
            del self._pictures[request_id]
            # Pictures that are finished come before the error
            self._sender.wait(request_id)
            raise
        del self._pictures[request_id]
        opened.events.close()
        # The worker sends the next request
        self._send("computed", request_id)
        # Its end is sent after the last picture is encoded
        self._sender.put(request_id, partial(self._end, request_id), is_last=True)
        return []

    def _send_picture(
        self,
        request_id: int,
        event: Any,
        *,
        metadata: dict[str, Any],
        encoding: Any,
        marking: Any,
    ) -> None:
        """Encode, sign and send a picture, or a preview, unless its request was cancelled."""
        from clowder_aimage.model.picture import encode_picture
        from clowder_aimage.model.pipeline import Image
        from clowder_aimage.pictures.generated_picture import encode_image

        if self._is_cancelled(request_id):
            return
        if isinstance(event, Image):
            encoded = encode_image(event, metadata, encoding, marking)
            names = ("seed", "picture", "width", "height")
            size = {name: getattr(event, name) for name in names}
            self._send("image", request_id, encoded.data, **size, facts=encoded.facts)
        else:
            kind, quality = encoding.kind, encoding.quality
            data = encode_picture(event.pixels, None, kind, quality, marking.mark)
            self._send("preview", request_id, data, number=event.number, picture=event.picture)

    def _open_variant(self, command: frame.Message) -> Any:
        """Return the model of a request's AImage: the loaded networks with its own adapters."""
        manifest = Descriptor.from_json(command["manifest"], "manifest")
        if manifest.digest == self._model.stored.descriptor.digest:
            return self._model
        key = str(manifest.digest)
        if (entry := self._variants.pop(key, None)) is None:
            entry = self._lease_variant(manifest, Reference.parse(command["reference"]))
        while len(self._variants) >= _MAX_VARIANTS:
            _, leases = self._variants.pop(next(iter(self._variants)))
            leases.close()
        # The last entry is the most recently used
        self._variants[key] = entry
        return entry[0]

    def _lease_variant(
        self, manifest: Descriptor, reference: Reference
    ) -> tuple[Any, contextlib.ExitStack]:
        store = _PinnedStore(self._roots, manifest)
        with contextlib.ExitStack() as leases:
            stored = open_runnable(store, reference, leases.enter_context(store.lease()))
            return self._model.open_variant(stored), leases.pop_all()

    def _write(self, command: frame.Message) -> None:
        """Open the text, or the embeddings, of a request; open requests are served in turns."""
        request_id: int = command["id"]
        if request_id not in self._cancelled:
            # If the process ends before "started", it is because of this request
            self._send("opening", request_id)
            events: Generator[_Text, None, None]
            if command["do"] == "embed":
                events = self._embed(EmbeddingRequest.from_json(command["request"]))
            else:
                # Raises here, not on the first iteration, if the request cannot be served
                events = self._model.generate(TextRequest.from_json(command["request"]))
            self._send("started", request_id)
            self._texts[request_id] = events
        else:
            self._end(request_id)

    def _embed(self, request: EmbeddingRequest) -> Generator[_Text, None, None]:
        """Yield the embeddings, after a turn of the other requests for each batch of texts."""
        results: list[Embeddings] = []
        for batch in request.iter_batches():
            results.append(self._model.embed(batch))
            yield TextDelta("")
        yield join_embeddings(results)

    def _advance(self, request_id: int, events: Generator[_Text, None, None]) -> None:
        """Send the next event of a text."""
        try:
            event = None if self._is_cancelled(request_id) else next(events, None)
        except BaseException:
            self._close(request_id)
            raise
        if event is None:
            self._close(request_id)
            self._end(request_id)
        elif isinstance(event, TextDelta):
            if event.text or event.tokens:
                self._frames.hold(request_id, event)
        elif isinstance(event, Embeddings):
            facts = {"tokens": event.tokens, "cut": event.cut, "limit": event.limit}
            self._send("vectors", request_id, event.pack(), count=len(event.vectors), **facts)
        else:
            kinds = {TextEnd: "end", TextNotice: "notice"}
            self._send(kinds.get(type(event), "call"), request_id, **asdict(event))

    def _close(self, request_id: int) -> None:
        # An error of a library at the end of a text does not matter
        with contextlib.suppress(Exception):
            self._texts.pop(request_id).close()

    def _is_cancelled(self, request_id: int) -> bool:
        return request_id in self._cancelled or self._is_orphaned

    def _end(self, request_id: int) -> None:
        """Report the end of a request."""
        is_cancelled = self._is_cancelled(request_id)
        self._cancelled.discard(request_id)
        self._send("done", request_id, cancelled=is_cancelled, bytes=self._measure_memory())

    def _send(
        self, kind: str, request: int | None = None, data: bytes = b"", /, **fields: Any
    ) -> None:
        self._frames.write({"is": kind, "id": request, **fields}, data)


def _load_model(options: dict[str, Any], *content: Any, finder: Any) -> Any:
    """Load a model with the options of the worker's settings.

    Raises ModelError: the library is not installed, or does not support the options.
    """
    try:
        with needs("running a model", "mlx"):
            from clowder_aimage import generate

            with refuse_unrunnable():
                return generate.load(*content, **options, finder=finder)
    except UsageError as error:
        # Clients see messages only
        advice = f" ({error.hint})" if error.hint else ""
        message = f"this worker cannot run models: {error.message}{advice}"
        raise ModelError(message) from None


def _log_error(event: str, error: BaseException | None) -> None:
    """Log one line about an error, without its message: it may contain a prompt."""
    frames = traceback.extract_tb(error.__traceback__ if error is not None else None)
    calls = ", ".join(f"{call.filename}:{call.lineno} {call.name}" for call in frames[-5:])
    _log.error("%s: %s at %s", event, type(error).__name__, calls)


def main() -> None:
    """Run the process; redirect the output of libraries to standard error."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Libraries warn of values from models, such as overflows
    warnings.simplefilter("ignore")
    # One line each, for the worker's log; no errors after the worker has exited
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.raiseExceptions = False
    use_store_settings()
    sys.excepthook = lambda _, error, __: _log_error("the process failed", error)
    threading.excepthook = lambda failed: _log_error("a thread failed", failed.exc_value)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        ModelProcess(source, target).run()
    # Exit at once, without joining the threads of libraries
    os._exit(0)


if __name__ == "__main__":
    main()
