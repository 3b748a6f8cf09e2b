"""Whether a wanted model is here, what keeps it here, and what the registry says that it is now."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path

from clowder_aimage.api import model_list
from clowder_aimage.api.readiness import BY_NODE
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import AImageError, NoSpaceError, NotFoundError, StoreError
from clowder_aimage.http.background import aside
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, check_blobs, check_completeness
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.node.model_status import ModelStatus
from clowder_aimage.node.spec_store import SpecStore
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.pull import resolve_changed
from clowder_aimage.registry import ClientOptions

EACH, ALL = 8, 32  # questions at a time: to one registry, and to all of them
PIN = {"by": BY_NODE}  # what a pin says that the node has set
_log = logging.getLogger("aimage.node")


def check_model(store: ImageLayout, want: ModelSpec, reference: Reference) -> Completeness:
    """Return what is here of a model; ``reference`` is its name in the store.

    What cannot be read counts as missing: a pull mends it.

    Raises:
        StoreError: the index cannot be read; no pull mends that.
    """
    try:
        root = model_list.entry(store, reference)
    except AImageError as error:
        raise StoreError(error.message, **error.advice) from error
    if root is None:
        return Completeness()
    try:
        found = check_completeness(store, root)
        if want.components:  # also where nothing is missing: the AImage may have none of them
            return check_blobs(store, root, _wanted(store, want, reference))
        return found
    except NotFoundError:  # it has no such component: a pull will say so
        return Completeness(root, root.size, (root,))
    except AImageError:
        return Completeness()


def _wanted(store: ImageLayout, want: ModelSpec, reference: Reference) -> list[Descriptor]:
    """Return the blobs of the components that are wanted."""
    stored = read_aimage(store, reference)
    names = LayerSelection(components=want.components).names(stored.aimage, reference)
    wanted = [layer.descriptor for layer in stored.aimage.layers if layer.name in names]
    return [stored.manifest.config, *wanted]


class Pinner:
    """Writes down what is to stay. Its pins are those of ``owner``: several nodes may have one
    store. All of it blocks."""

    def __init__(self, store: ImageLayout, records: SpecStore) -> None:
        self._store, self._records, self._owner = store, records, records.owner
        self._unnoted: set[str] = set()  # the models of which nothing can be written down

    def keep(self, one: ModelStatus, found: Completeness) -> None:
        """Remember that it is wanted, and lease it: no other node on this store, and nobody who
        makes room, is to take it. A store that cannot be written serves all the same."""
        name, failed = one.want.name, None
        for note in (self.remember, self._lease, self._pin):
            try:
                note(one, found)
            except (StoreError, NoSpaceError) as error:
                failed = error
        if found.root is not None:
            self._store.use(found.root)
        if failed is None:
            self._unnoted.discard(name)
            return
        if not self._unnoted:  # one warning, however many models there are, and looks at them
            _log.warning(
                "the store cannot be written", extra={"model": name, "reason": failed.message}
            )
        self._unnoted.add(name)

    def stored(self, one: ModelStatus) -> str:
        """What the store calls it, where that is known to be another name; else an empty text."""
        try:
            return self._records.stored(one.want.name)
        except StoreError:  # what is here is here, whatever was written down of it
            return ""

    def remember(self, one: ModelStatus, _: Completeness | None = None) -> None:
        """That it is wanted, and what the store calls it. Raises StoreError or NoSpaceError."""
        other = str(one.name) if one.name != one.want.reference else ""
        self._records.remember(one.want.name, other)

    def _lease(self, one: ModelStatus, found: Completeness) -> None:
        if found.digest is not None:
            one.hold(self._store, found.digest)

    def _pin(self, one: ModelStatus, _: Completeness) -> None:
        """Set the pin that is wanted; let one of ours go that is not. Another node's stays."""
        name, pins = index_name(one.name), self._store.pins
        known = pins.get(name)
        if one.want.pin and known is None:
            pins.put(name, PIN | {"owner": self._owner}, durable=True)
        if one.want.pin or known is None:
            return
        is_ours = known.get("owner", self._owner) == self._owner  # without one it is of old
        if known.get("by") == PIN["by"] and is_ours:
            pins.remove(name)


class CrowdedError(Exception):
    """So many questions are under way that this one was not put: ask later."""


class RegistryLimiter:
    """Asks registries what tags mean. One that does not answer keeps a few threads waiting, never
    one for each tag, and none of another registry's."""

    def __init__(self, connection: ClientOptions) -> None:
        self._connection = connection
        self._each: dict[str | None, asyncio.Semaphore] = {}
        self._all = asyncio.Semaphore(ALL)

    async def ask(
        self, reference: Reference, known: Digest | None, patience: float | None = None
    ) -> tuple[Descriptor, Descriptor] | None:
        """Resolve as ``resolve_changed`` does.

        Raises:
            CrowdedError: its turn has not come for ``patience`` seconds.
        """
        each = self._each.setdefault(reference.registry, asyncio.Semaphore(EACH))
        try:
            async with asyncio.timeout(patience):
                await self._enter(each)
        except TimeoutError:
            raise CrowdedError from None
        question = asyncio.ensure_future(
            aside(lambda: resolve_changed(reference, self._connection, known))
        )

        def ended(question: asyncio.Future[tuple[Descriptor, Descriptor] | None]) -> None:
            self._all.release()
            each.release()
            if not question.cancelled():
                question.exception()  # nobody may be waiting for it any more

        question.add_done_callback(ended)
        return await asyncio.shield(question)  # its thread goes on, whoever stops waiting

    async def _enter(self, each: asyncio.Semaphore) -> None:
        """Wait for one's turn; a registry's own first: who waits for that keeps nobody else."""
        await each.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            each.release()
            raise


def credentials(connection: ClientOptions) -> tuple[tuple[Path, float], ...]:
    """When the files with credentials changed last."""

    def changed(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return -math.inf

    return tuple((path, changed(path)) for path in connection.auth_files)
