"""An AImage for this process: from the store, leased, or from its registry while it is pulled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from clowder_aimage.content import ContentStore, Lease, OnEvent
from clowder_aimage.content.arriving_files import ArrivingFiles
from clowder_aimage.content.copy_option import CopyEvent, ignore
from clowder_aimage.content.store import BlobFiles
from clowder_aimage.content.telemetry import bind_context
from clowder_aimage.dialect import AImage
from clowder_aimage.dialect.packing import has_packed_layers
from clowder_aimage.errors import AImageError, ModelError, NotFoundError
from clowder_aimage.formats.diffusers import MAIN_PIPELINES
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import IncompleteError, lease_aimage
from clowder_aimage.layout.stored_aimage import StoredAImage, interpret, read_aimage
from clowder_aimage.model.adapter_source import is_adapter, is_controlnet
from clowder_aimage.model.pipeline import COMPONENTS
from clowder_aimage.model.runnable import describe, open_runnable
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.oci import Descriptor, Manifest, Reference

if TYPE_CHECKING:
    from clowder_aimage.pull import PullOptions
    from clowder_aimage.registry import ClientOptions

Check = Callable[[Reference, AImage], None]
# Seconds for a pull to stop
_GRACE = 2.0


@dataclass(frozen=True, slots=True)
class FetchedAImage:
    """A leased AImage and its blobs; they may still be arriving by ``pull``."""

    stored: StoredAImage
    files: BlobFiles
    pull: BackgroundPull | None = None

    @property
    def is_arriving(self) -> bool:
        """Return True if blobs may be missing. Raises the error of a failed pull."""
        return self.pull is not None and not self.pull.is_over()

    def end(self) -> None:
        """Wait until the AImage is complete and named in the store. Raises as ``pull``."""
        if self.pull is not None:
            self.pull.result.result()


class BackgroundPull:
    """A pull in a separate thread. It is stopped when the context ends.

    ``arriving`` becomes the AImage, leased, before its blobs are fetched, or None if it cannot be
    used before the end; ``result`` becomes its manifest, or the error of the pull.
    """

    def __init__(
        self, work: Callable[[PullOptions], Descriptor], lease: Lease, on_event: OnEvent
    ) -> None:
        self.arriving: Future[StoredAImage | None] = Future()
        self.result: Future[Descriptor] = Future()
        self._work, self._lease, self._on_event = work, lease, on_event
        self._is_stopped = False
        self._thread = threading.Thread(
            target=bind_context(self._run), daemon=True, name="aimage-pull"
        )

    def __enter__(self) -> BackgroundPull:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        # With a timeout: the thread may hang on an unresponsive registry
        self._thread.join(_GRACE)

    def is_over(self) -> bool:
        """Return True if the pull has ended. Raises its error."""
        if is_done := self.result.done():
            self.result.result()
        return is_done

    def _run(self) -> None:
        from clowder_aimage.pull import PullOptions

        try:
            self.result.set_result(self._work(PullOptions(on_event=self._watch, begin=self._begin)))
        except BaseException as error:
            self.result.set_exception(error)
        finally:
            if not self.arriving.done():
                self.arriving.set_result(None)

    def _begin(self, stored: StoredAImage) -> tuple[str, ...]:
        lease_aimage(stored, self._lease)
        self.arriving.set_result(stored)
        return COMPONENTS

    def _watch(self, event: CopyEvent) -> None:
        # Between two chunks: partial blobs stay in the store for the next pull
        if self._is_stopped and event.kind in ("plan", "progress"):
            raise AImageError("the pull was cancelled")
        self._on_event(event)


@contextmanager
def fetch(
    store: ImageLayout,
    reference: Reference,
    connect: Callable[[], ClientOptions],
    lease: Lease,
    *,
    on_event: OnEvent = ignore,
    check: Check | None = None,
) -> Iterator[FetchedAImage]:
    """Yield a leased AImage from the store, or one that is being pulled from its registry.

    Its networks can be loaded while it arrives. If the block ends before the pull, the pull is
    stopped: no tag is set, and partial blobs stay for the next pull. ``connect`` is called for a
    pull only. ``check`` raises an error for an AImage of an unsuitable kind, before its weights
    are fetched; by default ``check_pipeline``.

    Raises:
        NotFoundError: it is missing or partial in the store, and its name has no registry, or the
            registry does not have it. Also raises the errors of ``pull``.
        ModelError: it is not of the kind.
    """
    check = check or check_pipeline
    try:
        existing = read_aimage(store, reference)
    except NotFoundError:
        pass
    else:
        # What is packed is known once it is unpacked
        if not has_packed_layers(existing.aimage):
            check(reference, describe(store, existing).aimage)
    try:
        fetched = FetchedAImage(open_runnable(store, reference, lease), store)
    except NotFoundError as missing:
        connection = connect()
        if connection.expand(reference).registry is None:
            raise
        work = partial(_pull, store, reference, connection, missing)
    else:
        check(reference, fetched.stored.aimage)
        yield fetched
        return
    # Imported here, as the import takes 70 ms and models are usually in the store
    from clowder_aimage.pull import resolve_stored_name

    with BackgroundPull(work, lease, on_event) as pulling:
        stored = pulling.arriving.result()
        if stored is None:
            name = resolve_stored_name(reference, pulling.result.result())
            stored = open_runnable(store, name, lease)
            check(reference, stored.aimage)
            yield FetchedAImage(stored, store)
            return
        check(reference, stored.aimage)
        stored.aimage.validate()
        yield FetchedAImage(stored, ArrivingFiles(store, pulling.is_over), pulling)


def _pull(
    store: ContentStore,
    reference: Reference,
    connection: ClientOptions,
    missing: NotFoundError,
    options: PullOptions,
) -> Descriptor:
    from clowder_aimage.pull import pull

    suffix = ""
    # Complete the stored manifest, even if the tag has moved in the registry
    if isinstance(missing, IncompleteError):
        reference, suffix = replace(reference, digest=missing.digest), f"; {missing.message}"
    try:
        return pull(reference, store, connection, options).root
    except AImageError as error:
        error.message += suffix
        raise


def check_language_model(reference: Reference, aimage: AImage) -> None:
    """Raise ModelError for an AImage that is not a language model."""
    if find_runtime(aimage) is None:
        raise ModelError(
            f"{reference} is not a language model", remedy="use_encoder", model=str(reference)
        )


def check_pipeline(reference: Reference, aimage: AImage) -> None:
    """Raise ModelError for an AImage that is not a pipeline."""
    if find_runtime(aimage) is not None:
        raise ModelError(f"{reference} is a language model, which does not generate pictures")
    if is_adapter(aimage):
        message = f"{reference} is an adapter, not a model"
        raise ModelError(message, remedy="use_adapter", reference=reference)
    if is_controlnet(aimage):
        message = f"{reference} is a ControlNet, not a model"
        raise ModelError(message, remedy="use_controlnet", reference=reference)
    kind = aimage.properties.get("format")
    if kind == "diffusers":
        name = aimage.properties.get("pipeline") or aimage.properties.get("architecture")
        raise ModelError(
            f"only {' and '.join(MAIN_PIPELINES)} can be run; {reference} is {str(name)[:80]}",
            remedy="export_to_run",
            library=kind,
            reference=reference,
        )
    if kind != "files" and any(layer.name == "model_index.json" for layer in aimage.layers):
        return
    if not kind and not any(layer.name.endswith(".tar") for layer in aimage.layers):
        # The loader reports missing files
        return
    is_files = kind in (None, "files")
    reason = f"has the format {str(kind)[:60]!r}" if kind else "is packed as tar files"
    raise ModelError(
        f"{reference} {reason}, which cannot be run",
        remedy="export_to_pack" if is_files else "export_files",
        reference=reference,
    )


def find_arriving(
    store: ContentStore,
    descriptor: Descriptor,
    document: bytes,
    lease: Lease,
    is_over: Callable[[], bool],
) -> FetchedAImage:
    """Return the AImage of a manifest whose blobs another process fetches, and lease it."""
    files, manifest = ArrivingFiles(store, is_over), Manifest.parse(document, descriptor.media_type)
    stored = interpret(files, descriptor, manifest)
    lease_aimage(stored, lease)
    stored.aimage.validate()
    return FetchedAImage(stored, files)
