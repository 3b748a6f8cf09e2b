"""One wanted model: seen to be here, fetched where it is not, looked after while its tag moves."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial

from clowder_aimage.content.fetch import RESERVE
from clowder_aimage.engine.backoff import (
    CHANGE,
    NEVER_FETCHED,
    SPACE,
    STORE,
    TIME,
    WRONG,
    Backoff,
    again,
    whole,
)
from clowder_aimage.engine.engine_error import StoppedError
from clowder_aimage.engine.event_log import EventLog
from clowder_aimage.engine.limits import ALWAYS, NEVER
from clowder_aimage.engine.metric import Metrics
from clowder_aimage.engine.transfer_queue import DESIRED, PREFETCH, TransferQueue
from clowder_aimage.errors import AImageError, NoSpaceError, StoreError, VerificationError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, CompletenessCache
from clowder_aimage.node.model_status import FAILED, PRESENT, PULLING, UNKNOWN, WAITING, ModelStatus
from clowder_aimage.node.pinner import CrowdedError, Pinner, RegistryLimiter, check_model
from clowder_aimage.node.spec_store import SpecStore
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.pull import stored_name
from clowder_aimage.registry import ClientOptions

LOCAL = 10.0  # seconds between two looks at what is in the store
ROOM = 60.0  # seconds, at most, between two tries to make room for what had none
STEP = 1024 * 1024  # bytes more, before a pull that had no room is tried again
_log = logging.getLogger("aimage.node")


class Reconciler:
    """Does for one model at a time what is due. ``clock`` is monotonic: a wall clock that jumps
    changes nothing. ``relieve`` makes room on the disk, if it can."""

    def __init__(
        self,
        store: ImageLayout,
        connection: ClientOptions,
        transfers: TransferQueue,
        news: EventLog,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        relieve: Callable[[int], object],
        records: SpecStore,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._store, self._connection, self._transfers = store, connection, transfers
        self._news, self._clock, self._chance, self._relieve = news, clock, chance, relieve
        self._completeness = CompletenessCache(store, clock=clock, chance=chance)
        self._questions, self._keeper = RegistryLimiter(connection), Pinner(store, records)

    async def tend(self, one: ModelStatus) -> None:
        """Bring it nearer to what is wanted. Raises nothing but what is a mistake of ours."""
        try:
            found = await self._look(one)
        except AImageError as error:
            await self._unreadable(one, error)
            return
        try:
            if found.is_complete:
                await self._present(one, found)
                if one.want.policy == NEVER or not await self._has_moved(one, found):
                    return
            elif one.want.policy == NEVER:
                await self._forbidden(one)
                return
            elif not await self._may_try(one):
                one.rest(self._clock(), LOCAL)
                return
            await self._pull(one)
        except CrowdedError:
            one.due = self._clock()  # it has waited; by now the store may be another
        except StoppedError as error:
            one.turn(PRESENT if found.is_complete else WAITING, error.message)
            one.due = self._clock() + 1.0
        except AImageError as error:
            await self._failed(one, error, is_here=found.is_complete)

    async def _look(self, one: ModelStatus) -> Completeness:
        try:
            found = await asyncio.to_thread(self._found, one)
        except Exception:
            one.is_here = False  # it cannot be known; while it is looked at it is what it was
            raise
        one.digest, one.is_here = found.digest, found.is_complete
        return found

    def _found(self, one: ModelStatus) -> Completeness:
        """Return what is here of it, remembered while nothing comes to the store or goes.

        Hundreds of models would else read the whole index, and look for all of their blobs.
        """
        if one.state == UNKNOWN and (known := self._keeper.stored(one)):
            one.name = Reference.parse(known)
        want, name = one.want, one.name
        version = want, name, one.forced
        check = partial(check_model, self._store, want, name)
        return self._completeness.find(want.name, check, version)

    async def _unreadable(self, one: ModelStatus, error: AImageError) -> None:
        """Nobody knows what is here. No registry mends that: the store is looked at again soon."""
        if one.reason != error.message:
            _log.warning(
                "the store cannot be read", extra={"model": one.want.name, "reason": error.message}
            )
        now = self._clock()
        one.again, one.root = Backoff(STORE, TIME, LOCAL), None
        one.turn(WAITING, error.message)
        one.ask_at = one.due = now + LOCAL

    async def _forbidden(self, one: ModelStatus) -> None:
        one.again, one.ask_at = Backoff(NEVER_FETCHED, CHANGE, LOCAL), math.inf
        await self._turn(one, FAILED, "it is not here, and may not be fetched")
        one.due = self._clock() + LOCAL

    async def _turn(self, one: ModelStatus, state: str, reason: str | None = None) -> None:
        """Enter a state, and say so where it is news."""
        if one.turn(state, reason) and state in (PRESENT, FAILED):
            facts = {"reason": reason} if reason else {}
            await self._news.tell(state, model=one.want.name, **facts)

    # -- here

    async def _present(self, one: ModelStatus, found: Completeness) -> None:
        now = self._clock()
        if one.state != PRESENT:
            one.attempts, one.again, one.root = 0, None, None
            one.rooms, one.room_at = 0, math.inf
            one.ask_at = min(one.ask_at, now + one.want.refresh)
        await self._turn(one, PRESENT, one.reason if one.state == PRESENT else None)
        await asyncio.to_thread(self._keeper.keep, one, found)
        one.due = now + LOCAL
        if one.is_moving and one.want.policy != NEVER:
            one.rest(now, LOCAL)

    async def _has_moved(self, one: ModelStatus, found: Completeness) -> bool:
        """Whether the tag means something else now that is to be fetched. Asks the registry where
        that is due: one conditional request for a manifest."""
        now = self._clock()
        if not one.is_moving:
            return False
        is_short = one.again is not None and one.again.after == SPACE
        if now < one.next_question:
            return is_short and one.drift is not None and await self._has_space(one)
        is_whole = now >= one.whole_at
        seen = await self._checked(one, found)
        one.ask_at = now + one.want.refresh
        if seen is not None:
            one.root = seen[0].digest
            await self._note_drift(one, found, seen[1].digest)
        is_to_come = one.drift is not None and one.want.policy == ALWAYS
        is_wrong = is_to_come and one.wrong is not None and one.wrong[0] == one.root
        if not is_wrong:
            one.forgive()
        one.rest(now, LOCAL)
        if is_to_come and seen is None and is_short:
            return await self._has_space(one)
        one.again, one.reason = None, None
        if one.wrong is not None and not is_whole:
            one.again, one.reason = Backoff(WRONG, CHANGE, one.want.refresh), one.wrong[1]
            return False
        if not is_to_come or seen is not None:
            one.attempts = 0
        return is_to_come  # also where it could not be had the last time

    async def _note_drift(self, one: ModelStatus, found: Completeness, chosen: Digest) -> None:
        if chosen == found.digest:
            one.drift = None
        elif one.drift != chosen:
            one.drift = chosen
            await self._news.tell(
                "drift", model=one.want.name, here=str(found.digest), there=str(chosen)
            )

    async def _ask(
        self, one: ModelStatus, known: Digest | None
    ) -> tuple[Descriptor, Descriptor] | None:
        return await self._questions.ask(one.want.reference, known, LOCAL)

    async def _checked(
        self, one: ModelStatus, found: Completeness
    ) -> tuple[Descriptor, Descriptor] | None:
        """What the tag of a model that is here means; what came of the question is counted."""
        registry = one.want.reference.registry or ""
        try:
            seen = await self._ask(one, one.root or found.digest)
        except StoppedError:
            raise
        except AImageError as error:
            is_silent = again(error, 1, 0.0, 0.0).after == TIME
            self._metrics.tag_checked(registry, "failed" if is_silent else "refused")
            raise
        is_same = seen is None or seen[1].digest == found.digest
        self._metrics.tag_checked(registry, "unchanged" if is_same else "moved")
        return seen

    # -- not here

    async def _may_try(self, one: ModelStatus) -> bool:
        """Whether what the last failure waits for has come."""
        if one.state == PRESENT:
            one.lose()
        if one.again is not None and one.again.after == SPACE:
            return await self._has_space(one)
        now = self._clock()
        if now < one.next_question:
            return False
        if one.wrong is None:
            return True  # a tag may be there by now: its manifest is asked for first
        wrong, why = one.wrong
        if (seen := await self._ask(one, None if now >= one.whole_at else wrong)) is not None:
            one.root = seen[0].digest
            if one.root != wrong:
                one.forgive()
            return True
        one.again = Backoff(WRONG, CHANGE, one.want.refresh)  # what was wrong is what it means
        one.ask_at = now + one.want.refresh
        await self._turn(one, FAILED, why)
        return False

    async def _has_space(self, one: ModelStatus) -> bool:
        """Whether there is more than when there was too little. Makes room now and then: what
        could not go then may go by now."""
        free = await asyncio.to_thread(self._store.free)
        if free < min(one.free, one.room) and self._clock() >= one.room_at:
            await self._relieve_for(one)
            free = await asyncio.to_thread(self._store.free)
        return free >= one.free

    async def _pull(self, one: ModelStatus) -> None:
        want = one.want
        one.turn(PULLING)
        await asyncio.to_thread(self._keeper.remember, one)
        with self._transfers.pull(
            want.reference,
            components=want.components,
            urgency=DESIRED if want.priority >= 0 else PREFETCH,
            priority=want.priority,
        ) as transfer:
            one.transfer = transfer
            try:
                root = await transfer.end()
                one.sources = dict(transfer.sources)
            finally:
                came = (count for source, count in transfer.sources.items() if source != "cache")
                one.has_begun, one.needed = any(came), transfer.total
                one.transfer = None
        one.name = stored_name(want.reference, root)
        one.root, one.drift = None, None
        one.forgive()
        one.look_anew()
        found = await self._look(one)
        if not found.is_complete:
            raise StoreError(f"{want.name} was fetched, and is not here in full: who removed it?")
        one.ask_at = self._clock() + want.refresh
        await self._present(one, found)

    async def _failed(self, one: ModelStatus, error: AImageError, *, is_here: bool) -> None:
        one.attempts += 1
        if isinstance(error, NoSpaceError):
            await self._make_room(one, error.missing_size)
        one.again = again(error, one.attempts, self._chance(), one.want.refresh)
        delay = one.again.delay
        if isinstance(error, VerificationError):
            await self._note_wrong(one, error)
        one.wait(self._clock(), delay, is_here=is_here)
        one.rest(self._clock(), LOCAL)
        _log.warning(
            "cannot fetch", extra={"model": one.want.name, "reason": error.message, "again": delay}
        )
        if is_here:  # what is here serves on
            if one.reason != error.message and one.again.after != TIME:
                await self._news.tell("failed", model=one.want.name, reason=error.message)
            one.turn(PRESENT, error.message)
            return
        waits = one.again.after == TIME
        await self._turn(one, WAITING if waits else FAILED, error.message)

    async def _note_wrong(self, one: ModelStatus, error: VerificationError) -> None:
        """What came is not what it should be. It comes again when the tag means something else, or
        after a long pause."""
        known = one.wrong[0] if one.wrong else None
        one.root = one.root or await self._root(one)
        one.wrongs = one.wrongs + 1 if known == one.root else 1
        one.wrong = (one.root, error.message) if one.root else None
        pause = whole(one.wrongs, self._chance()) if one.root else math.inf
        one.whole_at = self._clock() + pause

    async def _make_room(self, one: ModelStatus, missing_size: int) -> None:
        """Let others go, and note how much there has to be for another try: where not a byte had
        come, that costs little."""
        free = await asyncio.to_thread(self._store.free)
        one.free = free + (RESERVE if one.has_begun else STEP)
        one.room = free + missing_size if missing_size else one.needed + RESERVE
        await self._relieve_for(one)

    async def _relieve_for(self, one: ModelStatus) -> None:
        one.rooms += 1
        one.room_at = self._clock() + min(ROOM, LOCAL * 2.0 ** min(one.rooms - 1, 10))
        await asyncio.to_thread(self._relieve, one.room)

    async def _root(self, one: ModelStatus) -> Digest | None:
        """What the tag means that turned out to be wrong."""
        try:
            seen = await self._questions.ask(one.want.reference, None)
        except AImageError:
            return None
        return seen[0].digest if seen else None
