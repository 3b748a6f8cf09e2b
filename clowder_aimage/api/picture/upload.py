"""Pictures of requests: checked, and stored until the request ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clowder_aimage.api.picture import source as picture_source
from clowder_aimage.api.picture.body import PictureBody
from clowder_aimage.api.picture.source import (
    CONTROL,
    IMAGE,
    IMAGES,
    MASK,
    Sources,
)
from clowder_aimage.api.request_body import build_field_error
from clowder_aimage.api.service import Service
from clowder_aimage.content import Lease
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.admission import CallerSemaphore, PlaceCounter
from clowder_aimage.engine.executor import run_decoding, run_io, run_locking
from clowder_aimage.errors import (
    AImageError,
    ForbiddenError,
    NoPictureError,
    NotFoundError,
    UsageError,
)
from clowder_aimage.formats.diffusers import find_reference_limit
from clowder_aimage.generation.request import ALPHA, MAX_REFERENCES, GenerateRequest
from clowder_aimage.http.api_error import ApiError, convert_error, convert_registry_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN
from clowder_aimage.layout.gc import Collector
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.pictures.input_file import InputFile
from clowder_aimage.pictures.input_kind import check_role

# Limit of pictures being decoded, and of bodies being parsed
_AT_ONCE = 2
# Requests with pictures while the wait is short
_BODIES = 16

_log = logging.getLogger("aimage.worker")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredPictures:
    """The pictures of a request in the store; ``mask`` is a digest, or "alpha".

    ``is_mask_implied``: the request has none, but its image is cut out.
    """

    images: tuple[InputFile, ...] = ()
    mask: str | None = None
    control: InputFile | None = None
    is_mask_implied: bool = False

    @property
    def first(self) -> InputFile:
        """The first image, else the control picture."""
        return next(picture for picture in (*self.images, self.control) if picture is not None)

    def list_digests(self, model: AImage | None) -> dict[str, Any]:
        """Return the digests by the parameter of a generation; several images are references.

        An implied mask is left out for a model that takes none.
        """
        is_edit = model is not None and bool(find_reference_limit(model.properties))
        mask = None if self.is_mask_implied and is_edit else self.mask
        images = tuple(str(picture.descriptor.digest) for picture in self.images)
        control = None if self.control is None else str(self.control.descriptor.digest)
        several, picture = (images, None) if images[1:] else ((), images[0] if images else None)
        return {"image": picture, "references": several, "control": control, "mask": mask}

    def list_warnings(self, request: GenerateRequest) -> list[str]:
        """Return sentences about the pictures of a request."""
        mask = request.input.mask
        hint = "" if request.input.references else "the mask alpha paints them"
        named = [(IMAGE, image) for image in self.images]
        named += [] if self.control is None else [(CONTROL, self.control)]
        sentences = [
            f"{name} {sentence}"
            for name, picture in named
            for sentence in picture.list_warnings(
                mask if name == IMAGE else None, hint=hint if name == IMAGE else ""
            )
        ]
        if self.is_mask_implied and mask == ALPHA:
            sentences.append(f"{IMAGE} has transparent parts, which are painted: it has no mask")
        return [*dict.fromkeys(sentences)]


class PictureUploads:
    """The admission of requests with pictures, whose pictures leave the store at their end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.busy = CallerSemaphore(_AT_ONCE)
        self._places = PlaceCounter()
        # Blobs that requests of this worker added to the store
        self._added: set[Digest] = set()
        # Guards changes of _added
        self._lock = threading.Lock()
        self._endings: set[asyncio.Task[None]] = set()

    def open(self, request: Request) -> PictureUpload:
        """Return the upload of a request; its pictures are in the store until its context ends."""
        return PictureUpload(self, PictureBody(request, self), self.service.store.lease())

    def enter(self) -> None:
        """Count a request with pictures. Raises BusyError, StoppedError."""
        engine = self.service.engine
        engine.check_room()
        places = engine.limits.queue + engine.capacity
        if engine.may_wait():
            places = max(places, _BODIES)
        self._places.enter(places, engine.refuse)

    def keep(self, lease: Lease, data: bytes, label: str) -> InputFile:
        """Put a picture into the store, leased. Raises as ``pictures.input.keep``."""
        # Imported here, as it imports numpy
        from clowder_aimage.pictures.input import keep

        store = self.service.store
        content = Descriptor("", Digest.of(data), len(data))
        # Leased before the check: another request may remove it
        lease.add(content.digest)
        is_new = not store.exists(content)
        stored = keep(store, lease, data, label)
        with self._lock:
            if is_new:
                self._added.add(content.digest)
        return stored

    async def close(self, upload: PictureUpload) -> None:
        """End a request, also if this task is cancelled meanwhile, as by a disconnection."""
        if upload.body.is_counted:
            ending = asyncio.create_task(self._close(upload))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await asyncio.shield(ending)

    async def _close(self, upload: PictureUpload) -> None:
        """Wait for the threads of a request, then end it."""
        if upload.work:
            await asyncio.gather(*upload.work, return_exceptions=True)
        try:
            await run_locking(self._end, upload)
        finally:
            self._places.leave()

    def _end(self, upload: PictureUpload) -> None:
        """End the lease of a request, and remove its pictures unless others need them."""
        store = self.service.store
        try:
            upload.lease.__exit__(None, None, None)
            if added := [
                descriptor for descriptor in upload.stored if descriptor.digest in self._added
            ]:
                Collector(store, grace=0.0).remove(added)
                with self._lock:
                    self._added -= {
                        descriptor.digest for descriptor in added if not store.exists(descriptor)
                    }
        except AImageError as error:
            _log.warning("pictures of a request were not removed", extra={"reason": error.message})


@dataclass(slots=True, eq=False)
class PictureUpload:
    """The body of a request, and its pictures in the store.

    ``work`` uses the lease, and goes on if the request is cancelled.
    """

    uploads: PictureUploads
    body: PictureBody
    lease: Lease
    stored: list[Descriptor] = field(default_factory=list)
    work: list[asyncio.Task[Any]] = field(default_factory=list)

    # Not a generator: the end of a server would close one that still waits for its threads
    async def __aenter__(self) -> PictureUpload:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.uploads.close(self)

    async def keep(
        self,
        sources: Sources,
        painted: str = "auto",
        model: AImage | None = None,
        *,
        implies_mask: bool = False,
    ) -> StoredPictures | None:
        """Put the pictures of a request into the store. Raises ApiError, BusyError, StoreError.

        ``sources`` is emptied, so that the bytes are freed one picture after the other.

        painted: the painted part of a mask, as for ``whiten_mask``. model: that of the request, if
        it is known. implies_mask: without a mask, the clear parts of a cut-out image are painted.
        """
        if not sources:
            return None
        for name, values in sources.items():
            limit = MAX_REFERENCES if name in (IMAGE, IMAGES) else 1
            if len(values) > limit:
                count = f"at most {limit} pictures" if limit > 1 else "one picture"
                message = f"must be {count}, not {len(values)}"
                raise build_field_error(name, message, "unsupported_value")
        if model is not None:
            _check_role(model, sources)
        if MASK in sources and not sources.keys() & {IMAGE, IMAGES}:
            raise build_field_error(MASK, "requires an image")
        self.body.enter()
        images = await self._keep_all(sources, IMAGES if IMAGES in sources else IMAGE)
        control = next(iter(await self._keep_all(sources, CONTROL)), None)
        if not images or MASK not in sources:
            is_implied = implies_mask and len(images) == 1 and images[0].is_cut_out
            return StoredPictures(images, ALPHA if is_implied else None, control, is_implied)
        is_alpha = sources[MASK] == [ALPHA]
        mask = None if is_alpha else (await self._keep_all(sources, MASK, painted))[0]
        try:
            async with self.uploads.busy:
                await self._finish(run_decoding(self._check_mask, images[0], mask))
        except AImageError as error:
            raise _convert_error(error, MASK) from None
        return StoredPictures(images, str(mask.descriptor.digest) if mask else ALPHA, control)

    async def _keep_all(
        self, sources: Sources, name: str, painted: str = "white"
    ) -> tuple[InputFile, ...]:
        """Put the pictures of a field into the store, and remove them from ``sources``."""
        values, stored = sources.pop(name, []), list[InputFile]()
        while values:
            stored.append(await self._keep(name, values.pop(0), painted))
        return tuple(stored)

    async def _keep(self, name: str, value: str | bytes, painted: str) -> InputFile:
        try:
            if isinstance(value, str):
                value = await self._finish(run_io(self._read, name, value))
            async with self.uploads.busy:
                return await self._finish(run_decoding(self._store, name, value, painted))
        except AImageError as error:
            raise _convert_error(error, name) from None

    async def _finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(work)
        self.work.append(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The turn of a client that has left is over when its thread ends
            await asyncio.wait([task])
            raise

    def _read(self, name: str, text: str) -> bytes:
        if isinstance(text, picture_source.BareBase64):
            return text.decode(name)
        kind = picture_source.parse_declared_type(text)
        picture_source.check_type(name, kind)
        may_pull = self.body.request.get("scope") == ADMIN
        data = self.uploads.service.build_input_source(may_pull=may_pull).read(text, name)
        picture_source.check_content(name, kind, data)
        return data

    def _check_mask(self, image: InputFile, mask: InputFile | None) -> None:
        # Imported here, as it imports numpy
        from clowder_aimage.pictures.input import check_mask

        path = self.uploads.service.store.find_path
        painted = path(mask.descriptor).read_bytes() if mask else None
        check_mask(path(image.descriptor).read_bytes(), painted)

    def _store(self, name: str, data: bytes, painted: str) -> InputFile:
        # Imported here, as it imports numpy
        from clowder_aimage.pictures.input import whiten_mask

        data = data if painted == "white" else whiten_mask(data, name, painted)
        stored = self.uploads.keep(self.lease, data, name)
        self.stored.append(stored.descriptor)
        return stored


def _check_role(model: AImage, sources: Sources) -> None:
    """Refuse pictures that the model does not take. Raises ApiError."""
    name = IMAGES if IMAGES in sources else IMAGE
    try:
        check_role(model, len(sources.get(name, ())), {MASK} & sources.keys())
    except UsageError as error:
        word, _, message = error.message.partition(" ")
        name = MASK if word == MASK else name
        raise ApiError(422, f"{name} {message}", code="unsupported_value", param=name) from None


def _convert_error(error: AImageError, name: str) -> AImageError:
    """Return the response to a picture that cannot be used, with its field."""
    if isinstance(error, ApiError):
        return error
    is_own = isinstance(error, ForbiddenError | NoPictureError)
    api_failure = convert_error(error if is_own else convert_registry_error(error))
    code = "invalid_image" if api_failure.code == "invalid_value" else api_failure.code
    code = "image_not_found" if isinstance(error, NotFoundError) else code
    message = (
        api_failure.message
        if api_failure.message.startswith(name)
        else f"{name}: {api_failure.message}"
    )
    return ApiError(api_failure.status, message, code=code, param=name, headers=api_failure.headers)
