"""What this node gives its neighbours: word that it lives, and ranges of blobs.

``GET /v1/neighbour`` answers with our id. ``GET /v1/neighbour/blobs/DIGEST`` with ``registry``,
``repository``, ``size`` and ``range`` (its number) answers with the bytes of that range and their
``Content-Digest`` (RFC 9530). With ``here=1`` only what is here, or on its way here, counts; with
``look=1`` only a word whether it is; with ``held=HEX`` only what has that SHA-256. A node that has
enough to do answers 503, with the ids of those that got the range from it; one that has nothing,
but knows who has, 404 with their ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.http.background import aside
from clowder_aimage.http.body_stream import send_file
from clowder_aimage.http.route import NODE, Route
from clowder_aimage.node.peer_state import LIFE, Peers
from clowder_aimage.node.peer_upstream import OnBytes
from clowder_aimage.node.piece import Piece
from clowder_aimage.node.range_owner import HERE, LOOK, Homes
from clowder_aimage.node.range_store import Ranges
from clowder_aimage.node.rendezvous import BlobRange
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.registry.peer import ASKER
from clowder_aimage.registry.peer_response import (
    ELSEWHERE,
    ID,
    NO_PART,
    NOT_HERE,
    UNKNOWN,
    content_digest_header,
)

UPLOADS = 3  # ranges that are sent at once: each is sent soon, and others can then have it there
WAITING = 64  # requests that are looked after at once
_TURN = 2.0  # seconds that a request waits for its turn to be sent
_COMING = 8.0  # seconds that one waits for the registry before it hears how far that is
_SENDING = 120.0  # seconds that one range may take
_STALL = 10.0  # seconds in which a block must be taken: who takes none keeps others from their turn
_HOLDERS, _NAMED = 16, 4  # per range: nodes that are remembered, and of those named at a time
_RANGES = 8192  # ranges whose holders are remembered
_BLOCK = 1024 * 1024
_NUMBER = re.compile(r"[0-9]{1,16}")
_T = TypeVar("_T")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class _Question:
    """What a neighbour wants: a range, in which repository, and where it may come from."""

    reference: Reference
    part: BlobRange
    word: bytes | None
    is_local: bool
    is_look: bool
    asker: str | None

    @classmethod
    def of(cls, request: web.Request) -> _Question:
        """Raises FormatError, UsageError."""
        query = request.query
        digest = Digest.parse(request.match_info["digest"])
        name = f"{query.get('registry', '')}/{query.get('repository', '')}"
        reference = Reference.parse(f"{name}@{digest}")
        if reference.name != name or reference.registry is None or reference.tag is not None:
            raise UsageError("no repository of a registry is named")
        size, number = query.get("size", ""), query.get("range", "")
        if not _NUMBER.fullmatch(size) or not _NUMBER.fullmatch(number):
            raise UsageError("size and range are numbers")
        held = query.get("held")
        if held is not None and not _SHA256.fullmatch(held):
            raise UsageError("held is a SHA-256")
        asker = request.headers.get(ASKER, "")
        return cls(
            reference,
            BlobRange(digest, int(size), int(number)),
            bytes.fromhex(held) if held else None,
            held is not None or HERE in query or LOOK in query or request.method == "HEAD",
            LOOK in query,
            asker if ID.fullmatch(asker) else None,
        )


class PeerRoutes:
    """The routes, over the ranges of this node, whose id is ``node``.

    ``takes_part(reference)`` says whether we ask the registry for what is in a repository,
    ``homes`` which of the ``neighbours`` have what we do not; ``on_traffic`` hears how many bytes
    were "sent".
    """

    def __init__(
        self,
        node: str,
        ranges: Ranges,
        takes_part: Callable[[Reference], bool],
        neighbours: Peers,
        homes: Homes,
        on_traffic: OnBytes,
        *,
        uploads: int = UPLOADS,
    ) -> None:
        self._node, self._ranges, self._takes_part = node, ranges, takes_part
        self._neighbours, self._homes, self._on_traffic = neighbours, homes, on_traffic
        self._sending, self._uploads, self._inside = 0, uploads, 0
        self._threads = 0  # that look after questions, though whoever asked may have hung up
        self._turns: deque[asyncio.Future[None]] = deque()
        self._holders: OrderedDict[BlobRange, deque[str]] = OrderedDict()

    def routes(self) -> list[Route]:
        """What the worker's application adds to its own."""
        return [
            Route("GET", LIFE, self.life, NODE),
            Route("GET", f"{LIFE}/blobs/{{digest}}", self.blob, NODE),
        ]

    async def life(self, _: web.Request) -> web.Response:
        """That this node lives, and who it is."""
        return web.json_response({"id": self._node})

    async def blob(self, request: web.Request) -> web.StreamResponse:
        """A range of a blob."""
        try:
            question = _Question.of(request)
        except (FormatError, UsageError) as error:
            return web.json_response({"code": "invalid", "message": error.message}, status=400)
        if question.asker is not None:
            self._neighbours.takes_part(question.asker, question.reference.name)
        holders = self._named(question)
        is_full = self._sending >= self._uploads and (holders or len(self._turns) >= WAITING // 2)
        if (is_full and not question.is_look) or max(self._inside, self._threads) >= WAITING:
            return self._busy(question, holders)
        self._inside += 1
        try:
            return await self._answer(request, question)
        finally:
            self._inside -= 1

    async def _answer(self, request: web.Request, question: _Question) -> web.StreamResponse:
        piece: Piece | int | None = await self._aside(lambda: self._here(question))
        if piece is None:
            if question.word is not None:
                return _without(404, NOT_HERE)
            if (giver := self._ranges.giver(question.part)) not in (None, question.asker):
                return _elsewhere([giver])
            if not await asyncio.to_thread(self._takes_part, question.reference):
                return _without(404, NO_PART)
            if question.is_local:
                return _without(404, NOT_HERE)
            found = await self._fetched(question)
            if isinstance(found, web.Response):
                return found
            piece = found
        if question.is_look:
            if isinstance(piece, Piece):
                piece.close()
            return web.json_response({"code": HERE})
        if isinstance(piece, int):
            return self._busy(question, [], come=piece)
        with contextlib.closing(piece):
            if not await self._has_turn():
                return self._busy(question, self._named(question))
            try:
                return await self._send(request, question, piece)
            finally:
                self._next()

    def _here(self, question: _Question) -> Piece | int | None:
        """What is here, or on its way here from the registry."""
        piece = self._ranges.find(question.part, question.word)
        if piece is not None or question.word is not None:
            return piece
        return self._ranges.coming(question.part, 0.0 if question.is_look else _COMING)

    async def _fetched(self, question: _Question) -> Piece | int | web.Response:
        """A range that is not here: from the registry, unless another node has it from there."""
        reference, part = question.reference, question.part
        who_has = self._homes.who_has
        if others := await self._aside(lambda: who_has(reference, part, question.asker)):
            return _elsewhere(others)
        try:
            return await self._aside(lambda: self._ranges.fetch(reference, part, _COMING))
        except NotFoundError:
            return _without(404, UNKNOWN)
        except AImageError:
            return _without(502, "upstream")

    async def _aside(self, call: Callable[[], _T]) -> _T:
        """``call()`` in a thread, which counts until it ends."""
        loop = asyncio.get_running_loop()
        self._threads += 1

        def ended() -> None:
            self._threads -= 1

        def work() -> _T:
            try:
                return call()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(ended)

        return await aside(work)

    async def _send(
        self, request: web.Request, question: _Question, piece: Piece
    ) -> web.StreamResponse:
        answer = web.StreamResponse(
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Digest": content_digest_header(piece.digest),
            }
        )
        answer.content_length = piece.length
        await answer.prepare(request)
        if request.method == "HEAD":
            return answer
        try:
            async with asyncio.timeout(_SENDING):
                if piece.file is not None:
                    at, count = piece.offset, piece.length
                    await send_file(request, piece.file, at, count, piece=_BLOCK, timeout=_STALL)
                else:
                    view = memoryview(piece.data)
                    for at in range(0, piece.length, _BLOCK):
                        async with asyncio.timeout(_STALL):
                            await answer.write(bytes(view[at : at + _BLOCK]))
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return answer
        except ConnectionError:
            return answer  # it has hung up, and hears no more
        self._on_traffic("sent", piece.length)
        self._note(question)
        return answer

    # -- turns

    async def _has_turn(self) -> bool:
        """Wait until it may be sent; whether that came to be."""
        if self._sending < self._uploads:
            self._sending += 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            async with asyncio.timeout(_TURN):
                await turn
        except TimeoutError:
            with contextlib.suppress(ValueError):
                self._turns.remove(turn)
            return turn.done() and not turn.cancelled()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise
        return True

    def _next(self) -> None:
        """One was sent: the next one's turn, if there is one."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._sending -= 1

    # -- who has what

    def _note(self, question: _Question) -> None:
        """A node has got a range from us."""
        if question.asker is None:
            return
        found = self._holders.setdefault(question.part, deque(maxlen=_HOLDERS))
        if question.asker not in found:
            found.append(question.asker)
        self._holders.move_to_end(question.part)
        while len(self._holders) > _RANGES:
            self._holders.popitem(last=False)

    def _named(self, question: _Question) -> list[str]:
        """Nodes that have the range from us, and that we know to live."""
        found = self._holders.get(question.part)
        if not found or self._word(question) is None:
            return []
        live = self._neighbours.live()
        known = [one for one in found if one in live and one != question.asker]
        return random.sample(known, min(_NAMED, len(known)))

    def _word(self, question: _Question) -> bytes | None:
        """What those have who got the range from us: what is asked for, or what we answer for."""
        return question.word or self._ranges.word(question.part)

    def _busy(self, question: _Question, holders: list[str], *, come: int = 0) -> web.Response:
        value: dict[str, object] = {"code": "busy", "come": come}
        word = self._word(question)
        if holders and word is not None:
            value |= {"holders": holders, "digest": f"sha256:{word.hex()}"}
        return web.json_response(value, status=503, headers={"Retry-After": "1"})


def _elsewhere(holders: Sequence[str | None]) -> web.Response:
    return web.json_response({"code": ELSEWHERE, "holders": holders}, status=404)


def _without(status: int, code: str) -> web.Response:
    return web.json_response({"code": code}, status=status)
