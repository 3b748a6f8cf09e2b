"""Pictures of requests: checked, and kept in the store until the request ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clowder_aimage.api.picture import source as picture_source
from clowder_aimage.api.picture.body import PictureBody
from clowder_aimage.api.picture.source import (
    CONTROL,
    IMAGE,
    IMAGES,
    MASK,
    Given,
)
from clowder_aimage.api.request_body import wrong
from clowder_aimage.api.service import Service
from clowder_aimage.content import Lease
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.errors import (
    AImageError,
    ForbiddenError,
    NoPictureError,
    NotFoundError,
    UsageError,
)
from clowder_aimage.generation.request import ALPHA, MAX_REFERENCES
from clowder_aimage.http.api_error import ApiError, api_error, registry_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import ADMIN
from clowder_aimage.layout.gc import Collector
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.pictures.input_file import InputFile
from clowder_aimage.pictures.input_kind import check_role

_AT_ONCE = 2  # pictures that are decoded, and bodies that are parsed

_log = logging.getLogger("aimage.worker")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KeptPictures:
    """The pictures of a request in the store; ``mask`` is a digest, or "alpha"."""

    images: tuple[InputFile, ...] = ()
    mask: str | None = None
    control: InputFile | None = None

    @property
    def first(self) -> InputFile:
        """The first image, else the control picture."""
        return next(one for one in (*self.images, self.control) if one is not None)

    @property
    def digests(self) -> dict[str, Any]:
        """The digests by the parameter of a generation; several images are references."""
        images = tuple(str(one.descriptor.digest) for one in self.images)
        control = None if self.control is None else str(self.control.descriptor.digest)
        several, one = (images, None) if images[1:] else ((), images[0] if images else None)
        return {"image": one, "references": several, "control": control, "mask": self.mask}


class PictureUploads:
    """The requests of a service that have pictures."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.busy = asyncio.Semaphore(_AT_ONCE)
        self._count = 0
        self._added: set[Digest] = set()  # to the store, by requests of this worker
        self._lock = threading.Lock()  # guards _added
        self._endings: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[PictureUpload]:
        """Yield the body of a request; its pictures are in the store until the context ends."""
        upload = PictureUpload(self, PictureBody(request, self), self.service.store.lease())
        try:
            yield upload
        finally:
            if upload.body.is_counted:  # also if the client has disconnected, which cancels this
                ending = asyncio.create_task(self._close(upload))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)
                await asyncio.shield(ending)

    def enter(self) -> None:
        """Count a request with pictures. Raises BusyError, StoppedError."""
        engine = self.service.engine
        engine.check_room()
        if self._count >= engine.limits.queue + engine.limits.models:
            raise engine.refuse(self._count)
        self._count += 1

    def keep(self, lease: Lease, data: bytes, what: str) -> InputFile:
        """Put a picture into the store, leased. Raises as ``pictures.picture_input.keep``."""
        from clowder_aimage.pictures.input import keep  # late: it imports numpy

        store = self.service.store
        content = Descriptor("", Digest.of(data), len(data))
        lease.add(content.digest)  # before the check: another request may remove it
        is_new = not store.exists(content)
        found = keep(store, lease, data, what)
        with self._lock:
            if is_new:
                self._added.add(content.digest)
        return found

    async def _close(self, upload: PictureUpload) -> None:
        """Wait for the threads of a request, then end it."""
        if upload.work:
            await asyncio.gather(*upload.work, return_exceptions=True)
        try:
            await run_locking(self._end, upload)
        finally:
            self._count -= 1

    def _end(self, upload: PictureUpload) -> None:
        """End the lease of a request, and remove its pictures unless others need them."""
        store = self.service.store
        try:
            upload.lease.__exit__(None, None, None)
            if ours := [one for one in upload.kept if one.digest in self._added]:
                Collector(store, grace=0.0).remove(ours)
                with self._lock:
                    self._added -= {one.digest for one in ours if not store.exists(one)}
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
    kept: list[Descriptor] = field(default_factory=list)
    work: list[asyncio.Task[Any]] = field(default_factory=list)

    async def keep(
        self, given: Given, painted: str = "auto", model: AImage | None = None
    ) -> KeptPictures | None:
        """Put the pictures of a request into the store. Raises ApiError, BusyError, StoreError.

        painted: what of a mask is painted, as for ``white_mask``. model: that of the request, if
        it is known.
        """
        if not given:
            return None
        for name, values in given.items():
            most = MAX_REFERENCES if name in (IMAGE, IMAGES) else 1
            if len(values) > most:
                what = f"at most {most} pictures" if most > 1 else "one picture"
                message = f"must be {what}, not {len(values)}"
                raise wrong(name, message, "unsupported_value")
        if model is not None:
            _check_role(model, given)
        if MASK in given and not given.keys() & {IMAGE, IMAGES}:
            raise wrong(MASK, "requires an image")
        self.body.enter()
        images = await self._keep_all(given, IMAGES if IMAGES in given else IMAGE)
        control = next(iter(await self._keep_all(given, CONTROL)), None)
        if not images or MASK not in given:
            return KeptPictures(images, None, control)
        is_alpha = given[MASK] == [ALPHA]
        mask = None if is_alpha else (await self._keep_all(given, MASK, painted))[0]
        try:
            async with self.uploads.busy:
                await self._finish(run_io(self._check_mask, images[0], mask))
        except AImageError as error:
            raise _refusal(error, MASK) from None
        return KeptPictures(images, str(mask.descriptor.digest) if mask else ALPHA, control)

    async def _keep_all(
        self, given: Given, name: str, painted: str = "white"
    ) -> tuple[InputFile, ...]:
        """Put the pictures of a field into the store, and remove them from ``given``."""
        values, found = given.pop(name, []), list[InputFile]()
        while values:
            found.append(await self._keep(name, values.pop(0), painted))
        return tuple(found)

    async def _keep(self, name: str, value: str | bytes, painted: str) -> InputFile:
        try:
            if isinstance(value, str):
                value = await self._finish(run_io(self._read, name, value))
            async with self.uploads.busy:
                return await self._finish(run_locking(self._store, name, value, painted))
        except AImageError as error:
            raise _refusal(error, name) from None

    async def _finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.create_task(work)
        self.work.append(task)
        return await asyncio.shield(task)

    def _read(self, name: str, text: str) -> bytes:
        if isinstance(text, picture_source.BareBase64):
            return text.decode(name)
        kind = picture_source.declared_type(text)
        picture_source.check_type(name, kind)
        may_pull = self.body.request.get("scope") == ADMIN
        data = self.uploads.service.inputs(may_pull=may_pull).read(text, name)
        picture_source.check_content(name, kind, data)
        return data

    def _check_mask(self, image: InputFile, mask: InputFile | None) -> None:
        from clowder_aimage.pictures.input import check_mask  # late: it imports numpy

        path = self.uploads.service.store.path
        painted = path(mask.descriptor).read_bytes() if mask else None
        check_mask(path(image.descriptor).read_bytes(), painted)

    def _store(self, name: str, data: bytes, painted: str) -> InputFile:
        from clowder_aimage.pictures.input import white_mask  # late: it imports numpy

        data = data if painted == "white" else white_mask(data, name, painted)
        found = self.uploads.keep(self.lease, data, name)
        self.kept.append(found.descriptor)
        return found


def _check_role(model: AImage, given: Given) -> None:
    """Refuse pictures that the model does not take. Raises ApiError."""
    name = IMAGES if IMAGES in given else IMAGE
    try:
        check_role(model, len(given.get(name, ())), {MASK} & given.keys())
    except UsageError as error:
        word, _, message = error.message.partition(" ")
        name = MASK if word == MASK else name
        raise ApiError(422, f"{name} {message}", code="unsupported_value", param=name) from None


def _refusal(error: AImageError, name: str) -> AImageError:
    """Return the response to a picture that cannot be used, with its field."""
    if isinstance(error, ApiError):
        return error
    is_own = isinstance(error, ForbiddenError | NoPictureError)
    found = api_error(error if is_own else registry_error(error))
    code = "invalid_image" if found.code == "invalid_value" else found.code
    code = "image_not_found" if isinstance(error, NotFoundError) else code
    message = found.message if found.message.startswith(name) else f"{name}: {found.message}"
    return ApiError(found.status, message, code=code, param=name, headers=found.headers)
