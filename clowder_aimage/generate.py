"""generate: render pictures from a prompt with an AImage, pulling it first if it is missing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clowder_aimage.content import ContentStore, Lease, OnEvent
from clowder_aimage.content.copy_option import ignore
from clowder_aimage.errors import AImageError, ModelError, NotFoundError
from clowder_aimage.layout.completeness import IncompleteError, require_complete
from clowder_aimage.layout.stored_aimage import StoredAImage, hold, inflate, read_aimage
from clowder_aimage.model.backend import describe, dtype_name
from clowder_aimage.model.loader import PIPELINES, load_pipeline
from clowder_aimage.model.pipeline import PARAMETERS, GenerateRequest, Pipeline, PipelineEvent
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions


@dataclass(frozen=True, slots=True)
class RunnableModel:
    """A loaded AImage. Only the thread that loaded it may use it."""

    stored: StoredAImage
    pipeline: Pipeline
    dtype: str

    @property
    def backend(self) -> str:
        """Return the device and, on a CPU, the BLAS."""
        return describe()

    def preload(self, request: GenerateRequest) -> str:
        """Load what can stay in memory for such requests; return it in words. Raises ModelError."""
        with _computing():
            return self.pipeline.preload(request)

    def generate(self, request: GenerateRequest) -> Generator[PipelineEvent, None, None]:
        """Yield steps, previews and pictures; closing the generator cancels.

        Raises ModelError: the model's numbers cannot be computed with.
        """
        with _computing():
            events = self.pipeline.generate(request)
        return _guarded(events)


def fetch(
    store: ContentStore,
    reference: Reference,
    connect: Callable[[], ClientOptions],
    lease: Lease,
    *,
    on_event: OnEvent = ignore,
) -> StoredAImage:
    """Return a leased AImage from the store, or pull it from its registry.

    ``connect`` is called for a pull only.

    Raises:
        NotFoundError: it is missing or partial in the store, and its name has no registry, or the
            registry does not have it. Also raises the errors of ``pull``.
    """
    _check_kind(store, reference)
    try:
        return find(store, reference, lease)
    except NotFoundError as missing:
        connection = connect()
        if connection.expand(reference).registry is None:
            raise
        from clowder_aimage.pull import PullOptions, pull, stored_name  # late: it takes 70 ms

        meant, words = reference, ""
        if isinstance(missing, IncompleteError):  # even if the tag has moved in the registry
            meant, words = replace(reference, digest=missing.digest), f"; {missing.message}"
        try:
            root = pull(meant, store, connection, PullOptions(on_event=on_event)).root
        except AImageError as error:
            error.message += words
            raise
    return find(store, stored_name(reference, root), lease)


def _check_kind(store: ContentStore, reference: Reference) -> None:
    """Raise ModelError for an AImage that is not a pipeline, before its weights are fetched."""
    try:
        aimage = read_aimage(store, reference).aimage
    except NotFoundError:
        return
    kind = aimage.properties.get("format")
    if kind == "diffusers":
        name = aimage.properties.get("pipeline") or aimage.properties.get("architecture")
        raise ModelError(
            f"only {', '.join(PIPELINES)} can be run; {reference} is {str(name)[:80]}",
            remedy="export_to_run",
            library=kind,
            reference=reference,
        )
    if kind != "files" and any(layer.name == "model_index.json" for layer in aimage.layers):
        return
    if not kind and not any(layer.name.endswith(".tar") for layer in aimage.layers):
        return  # the loader reports missing files
    what = f"has the format {str(kind)[:60]!r}" if kind else "is packed as tar files"
    raise ModelError(
        f"{reference} {what}, which cannot be run",
        remedy="export_files" if kind else "export_to_pack",
        reference=reference,
    )


def find(store: ContentStore, reference: Reference, lease: Lease) -> StoredAImage:
    """Return the AImage if it is complete in the store, and lease it. Raises NotFoundError."""
    hold(store, reference, lease)
    stored = read_aimage(store, reference)
    lease.add(
        stored.descriptor.digest,
        *(blob.digest for blob in stored.manifest.children),
        *(layer.descriptor.digest for layer in stored.aimage.layers),  # decompressed ones
    )
    stored.aimage.validate()
    require_complete(store, reference, stored)
    inflate(store, stored)
    store.use(stored.descriptor)
    return stored


def load(
    store: ContentStore,
    stored: StoredAImage,
    *,
    dtype: str | None = None,
    request: GenerateRequest | None = None,
) -> RunnableModel:
    """Open the model on the calling thread; check the sides of the first ``request`` before.

    Weights are read by ``preload`` or when they are used.

    Raises ModelError, UsageError, AccessError.
    """
    chosen = dtype_name(dtype)
    with _computing():
        pipeline = load_pipeline(store, stored.aimage, dtype=chosen, request=request)
    return RunnableModel(stored, pipeline, chosen)


def _guarded(events: Generator[PipelineEvent, None, None]) -> Generator[PipelineEvent, None, None]:
    with _computing():
        yield from events


@contextmanager
def _computing() -> Iterator[None]:
    """Turn errors of arithmetic, numpy and MLX into a ModelError without their text.

    The text could hold a part of the prompt.
    """
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        kind = type(error).__name__
        raise ModelError(f"the model's numbers cannot be computed with ({kind})") from error


def describe_picture(
    reference: Reference, model: RunnableModel, request: GenerateRequest
) -> dict[str, Any]:
    """Return the parameters to render a request's pictures again, without their own seeds."""
    return {
        "reference": str(reference),
        "digest": str(model.stored.descriptor.digest),
        **{key: getattr(request, key) for key in PARAMETERS},
        "dtype": model.dtype,
        "backend": model.backend,
    }
