"""Workers as they report themselves, and the models that a fleet has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyNotFoundError, NoKeysError

from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.fleet.fleet_link import LOST, FleetLink
from clowder_aimage.fleet.fleet_stream import CARD_TTL
from clowder_aimage.oci import Reference, read_json
from clowder_aimage.oci.reference import DEFAULT_TAG


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """A worker's report: what it has, and how busy it is.

    ``models`` are the digests of complete models by name, ``kinds`` what each digest is ("image",
    "text" or "embedder"), ``loaded`` the digests in memory, ``at_work`` those that jobs use or
    load. ``slots`` jobs run at once. ``rate`` is jobs per minute.
    """

    id: str
    version: str = ""
    address: str = ""
    slots: int = 1
    running: int = 0
    loaded: tuple[str, ...] = ()
    at_work: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    default_model: str | None = None
    default_for: tuple[str, ...] = ()
    may_pull: bool = False
    is_draining: bool = False
    done: int = 0
    failed: int = 0
    rate: float = 0.0

    def encode(self) -> bytes:
        """Return the card as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> WorkerCard:
        """Return the card in JSON; unknown fields are of a later version. Raises FormatError."""
        known = read_json(raw, "the card of a worker")
        try:
            found = {name: known[name] for name in cls.__dataclass_fields__ if name in known}
            for name in ("loaded", "at_work", "default_for"):
                found[name] = tuple(found.get(name, ()))
            return cls(**found)
        except (AttributeError, TypeError):
            raise FormatError("the card of a worker cannot be read") from None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of the fleet: its full name, and the digest that most workers have under it."""

    name: str
    digest: str
    kind: str = ""


class Roster:
    """The workers of a fleet, as their cards say; a card counts for a time after it arrived.

    The time is that of this machine alone: the clocks of workers do not matter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cards: dict[str, tuple[WorkerCard, float]] = {}
        self.revision = 0  # changes with each card

    def put(self, card: WorkerCard) -> None:
        """Take a card that arrived now."""
        self._cards[card.id] = card, self._clock()
        self.revision += 1

    def remove(self, worker: str) -> None:
        """Remove a worker that has left."""
        self._cards.pop(worker, None)
        self.revision += 1

    def cards(self) -> list[WorkerCard]:
        """Return the cards of the workers that are there, by id."""
        oldest = self._clock() - CARD_TTL
        self._cards = {key: each for key, each in self._cards.items() if each[1] >= oldest}
        return [card for _, (card, _) in sorted(self._cards.items())]

    def others(self, worker: str) -> list[WorkerCard]:
        """Return the cards of the other workers that take jobs."""
        return [card for card in self.cards() if not card.is_draining and card.id != worker]

    def on_disk_elsewhere(self, digest: str, worker: str, *past: str) -> bool:
        """Return whether another worker that takes jobs, not of ``past``, has a model on disk."""
        others = (card for card in self.others(worker) if card.id not in past)
        return any(digest in card.models.values() for card in others)

    def may_pull(self) -> bool:
        """Return whether a worker fetches models that it lacks."""
        return any(card.may_pull and not card.is_draining for card in self.cards())

    def reference(self, name: str | None) -> Reference:
        """Return the AImage to which a client's name refers. Raises UsageError."""
        cards = self.cards()
        text = (_alias(cards, name) or name) if name else _default(cards, None)
        if not text:
            raise UsageError("the request has no model, and the workers have no default model")
        return Reference.parse(text)

    def find(self, name: str | None) -> FoundModel | None:
        """Return the model that a client names; None if no worker has it.

        A name without a model means the default model. Raises UsageError for an invalid name.
        """
        cards, wanted = self.cards(), self.reference(name)
        found = _named(cards, wanted)
        is_exact = wanted.registry is not None or wanted.digest is not None
        is_literal = name is None or _alias(cards, name) is None
        default = None if is_exact and is_literal else _default(cards, name)
        if found is None and default is not None:
            found = _named(cards, Reference.parse(default))
        if found is None:
            return None
        kind = next((card.kinds[found[1]] for card in cards if found[1] in card.kinds), "")
        return FoundModel(*found, kind)

    @property
    def default_model(self) -> str | None:
        """The model of requests without one."""
        return _default(self.cards(), None)

    def names(self, *kinds: str) -> list[str]:
        """Return the names of the models of some kinds."""
        cards = self.cards()
        every = ((name, digest, card) for card in cards for name, digest in card.models.items())
        return sorted({name for name, digest, card in every if card.kinds.get(digest) in kinds})


def _named(cards: Iterable[WorkerCard], wanted: Reference) -> tuple[str, str] | None:
    """Return a name and its digest; of several digests that of most workers, then the lowest."""
    name = str(wanted)
    if wanted.digest is not None:
        digest = str(wanted.digest)
        is_here = any(digest in card.models.values() for card in cards)
        return (name, digest) if is_here else None
    counts = Counter(card.models[name] for card in cards if name in card.models)
    if not counts:
        return None
    return name, min(counts, key=lambda digest: (-counts[digest], digest))


def _alias(cards: Iterable[WorkerCard], name: str) -> str | None:
    other = name.removesuffix(f":{DEFAULT_TAG}")
    other = other if other != name else f"{name}:{DEFAULT_TAG}"
    found = (card.aliases.get(name) or card.aliases.get(other) for card in cards)
    return next(filter(None, found), None)


def _default(cards: Iterable[WorkerCard], name: str | None) -> str | None:
    """Return the default model that replaces a name that clients have built in."""
    plain = (name or "").removesuffix(f":{DEFAULT_TAG}")
    for card in cards:
        is_built_in = name is None or any(fnmatchcase(plain, one) for one in card.default_for)
        if card.default_model and is_built_in:
            return card.default_model
    return None


class RosterWatch:
    """Keeps a roster up to date: cards are messages of the bucket, which arrive when they change.

    Workers report again every few seconds, so a card that was missed is not missed for long.
    """

    def __init__(self, link: FleetLink) -> None:
        self.roster = Roster()
        self._link = link
        self._subject = f"$KV.{link.names.workers}."
        self._is_heard = False

    async def run(self) -> None:
        """Listen to the fleet once connected, and read the cards that are there."""
        while not self._is_heard:
            with contextlib.suppress(*LOST, JetStreamError):
                if self._link.is_ready:
                    await self._link.client.subscribe(f"{self._subject}*", cb=self._take)
                    self._is_heard = True
                    for card in (await read_roster(self._link)).cards():
                        self.roster.put(card)
            await asyncio.sleep(0.1)

    async def _take(self, message: Msg) -> None:
        if (message.headers or {}).get("KV-Operation") in ("DEL", "PURGE"):
            self.roster.remove(message.subject.removeprefix(self._subject))
            return
        with contextlib.suppress(FormatError):
            self.roster.put(WorkerCard.decode(message.data))


async def read_roster(link: FleetLink) -> Roster:
    """Return the workers that are there now. Raises NatsError, TimeoutError."""
    roster = Roster()
    bucket = await link.streams.key_value(link.names.workers)
    with contextlib.suppress(NoKeysError):
        for key in await bucket.keys():
            with contextlib.suppress(KeyNotFoundError, FormatError):
                roster.put(WorkerCard.decode((await bucket.get(key)).value or b""))
    return roster


async def give_order(link: FleetLink, worker: str, order: str) -> dict[str, Any]:
    """Send an order to a worker, and return its card.

    Raises NotFoundError: there is no such worker.
    """
    data = json.dumps({"order": order}).encode()
    try:
        message = await link.client.request(link.names.control(worker), data, timeout=5.0)
    except NoRespondersError:
        raise NotFoundError(f"no worker {worker!r} is in the fleet") from None
    return asdict(WorkerCard.decode(message.data))
