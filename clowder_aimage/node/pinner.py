"""Presence of models in the store, their pins and leases, and the limit on registry requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from clowder_aimage.api import model_list
from clowder_aimage.api.service import BY_NODE
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import AImageError, NoSpaceError, NotFoundError, StoreError
from clowder_aimage.http.background import aside
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, check_blobs, check_completeness
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.model_state import ModelStatus
from clowder_aimage.node.spec_store import SpecStore
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.pull import resolve_changed
from clowder_aimage.registry import ClientOptions

MAX_EACH, MAX_ALL = 8, 32  # questions at a time: to one registry, and to all of them
_log = logging.getLogger("aimage.node")


def check_model(store: ImageLayout, spec: ModelSpec, name: Reference) -> Completeness:
    """Return what the store has of a model that it calls ``name``.

    A model that cannot be read counts as missing: a pull repairs it. Raises StoreError if the index
    cannot be read; no pull repairs that.
    """
    try:
        root = model_list.entry(store, name)
    except AImageError as error:
        raise StoreError(error.message, **error.advice) from error
    if root is None:
        return Completeness()
    try:
        found = check_completeness(store, root)
        if spec.components:  # also where nothing is missing: it may not have these components
            return check_blobs(store, root, _specified(store, spec, name))
        return found
    except NotFoundError:  # it has no such component: a pull fails with that
        return Completeness(root, root.size, (root,))
    except AImageError:
        return Completeness()


def _specified(store: ImageLayout, spec: ModelSpec, name: Reference) -> list[Descriptor]:
    stored = read_aimage(store, name)
    names = LayerSelection(components=spec.components).names(stored.aimage, name)
    layers = [layer.descriptor for layer in stored.aimage.layers if layer.name in names]
    return [stored.manifest.config, *layers]


class Pinner:
    """Records, leases and pins the models that are to stay. All methods block.

    The pins are of one owner: several nodes may share a store.
    """

    def __init__(self, store: ImageLayout, records: SpecStore) -> None:
        self._store, self._records = store, records
        self._failed: set[str] = set()  # the models that could not be recorded

    def keep(self, model: ModelStatus) -> None:
        """Record, lease and pin a model, so that no other node and no eviction removes it.

        A store that cannot be written serves all the same.
        """
        spec, name, manifest = model.spec, model.state.name, model.state.manifest
        writes: tuple[Callable[[], object], ...] = (
            lambda: self.remember(spec, name),
            lambda: model.hold(self._store, manifest.digest) if manifest else None,
            lambda: self._pin(spec, index_name(name)),
        )
        failed = None
        for write in writes:
            try:
                write()
            except (StoreError, NoSpaceError) as error:
                failed = error
        if manifest is not None:
            self._store.use(manifest)
        if failed is None:
            self._failed.discard(spec.name)
            return
        if not self._failed:  # one warning for all models
            facts = {"model": spec.name, "reason": failed.message}
            _log.warning("cannot write to the store", extra=facts)
        self._failed.add(spec.name)

    def stored(self, spec: ModelSpec) -> str:
        """Return the recorded name in the store if it is another one; else an empty text."""
        try:
            return self._records.stored(spec.name)
        except StoreError:  # the model is there all the same
            return ""

    def remember(self, spec: ModelSpec, name: Reference) -> None:
        """Record a model as listed, and its name in the store. Raises StoreError, NoSpaceError."""
        self._records.remember(spec.name, str(name) if name != spec.reference else "")

    def _pin(self, spec: ModelSpec, name: str) -> None:
        """Set the specified pin, or remove this node's own; another node's stays."""
        if not spec.pin:
            unpin(self._store, name, self._records.owner)
        elif self._store.pins.get(name) is None:
            pin = {"by": BY_NODE, "owner": self._records.owner}
            self._store.pins.put(name, pin, durable=True)


def unpin(store: ImageLayout, name: str, owner: str) -> None:
    """Remove the pin that the node of ``owner`` set. Raises StoreError."""
    known = store.pins.get(name)
    if known is not None and is_own_pin(known, owner):
        store.pins.remove(name)


def is_own_pin(pin: Mapping[str, object], owner: str) -> bool:
    """Return whether the node of ``owner`` set a pin."""
    return pin.get("by") == BY_NODE and pin.get("owner") == owner


class CrowdedError(Exception):
    """The registry has too many questions under way: ask later."""


class RegistryLimiter:
    """Asks registries what tags mean, a limited number of questions at a time.

    A registry that does not answer occupies a few threads, never one for each tag, and none of
    another registry's.
    """

    def __init__(self, connection: ClientOptions) -> None:
        self._connection = connection
        self._each: dict[str | None, asyncio.Semaphore] = {}
        self._all = asyncio.Semaphore(MAX_ALL)

    async def ask(
        self, reference: Reference, known: Digest | None, timeout: float | None = None
    ) -> tuple[Descriptor, Descriptor] | None:
        """Resolve as ``resolve_changed``. Raises CrowdedError after ``timeout`` seconds in line."""
        each = self._each.setdefault(reference.registry, asyncio.Semaphore(MAX_EACH))

        async def resolve() -> tuple[Descriptor, Descriptor] | None:
            try:
                return await aside(lambda: resolve_changed(reference, self._connection, known))
            finally:
                self._all.release()
                each.release()

        try:
            async with asyncio.timeout(timeout):
                await each.acquire()  # first: a silent registry must not occupy the places of all
                try:
                    await self._all.acquire()
                except BaseException:
                    each.release()
                    raise
        except TimeoutError:
            raise CrowdedError from None
        question = asyncio.ensure_future(resolve())
        question.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(question)  # its thread goes on if the caller is cancelled


def credentials(connection: ClientOptions) -> tuple[tuple[Path, float], ...]:
    """Return the files with credentials and when each was changed last."""
    found = []
    for path in connection.auth_files:
        with contextlib.suppress(OSError):
            found.append((path, path.stat().st_mtime))
    return tuple(found)
