"""The bounds of a caller on files and memory, so that others always have room.

What is kept is counted from the records of its owner, by each server alike; what is occupied, such
as the bytes of bodies that arrive, is counted here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clowder_aimage.http.api_error import ApiError

if TYPE_CHECKING:
    # A registry does without pydantic.
    from clowder_aimage.engine.settings import CallerSettings

# Seconds in which a batch counts as open even if it has ended
RECENT = 60


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit of a quantity.

    ``retry_after`` are the seconds until a caller may have less of it; None: it has to delete some.
    """

    name: str
    limit: int
    status: int
    retry_after: int | None = None

    def check(self, used: int) -> None:
        """Raise ApiError if a caller would have more than the limit."""
        if used <= self.limit:
            return
        advice = "delete some" if self.retry_after is None else "try again later"
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        message = f"this client may have {self.limit} {self.name} at most; {advice}"
        code = f"too_many_{self.name.replace(' ', '_')}"
        raise ApiError(self.status, message, code=code, headers=headers)


@dataclass(frozen=True, slots=True)
class CallerBounds:
    """The bounds of each caller of a server."""

    max_bytes: int = 10 << 30
    max_batches: int = 100
    max_body_bytes: int = 256 << 20
    max_files: int = 1000

    @classmethod
    def of(cls, settings: CallerSettings) -> CallerBounds:
        """Return the bounds in the settings of a server."""
        return cls(settings.caller_bytes, settings.caller_batches, settings.caller_body_bytes)

    @property
    def stored_bytes(self) -> Bound:
        """The bytes of files, and of the answers of batches."""
        return Bound("bytes in files", self.max_bytes, 413)

    @property
    def files(self) -> Bound:
        """The files."""
        return Bound("files", self.max_files, 429)

    @property
    def batches(self) -> Bound:
        """The batches that are open, or were created in the last minute."""
        return Bound("open batches", self.max_batches, 429, RECENT)

    @property
    def body_bytes(self) -> Bound:
        """The bytes of bodies of requests that are in progress."""
        return Bound("bytes in requests in progress", self.max_body_bytes, 429, 5)


@dataclass(slots=True)
class Hold:
    """An amount of a bounded quantity that a caller occupies beside the ``stored`` one."""

    bound: Bound
    key: tuple[str, str]
    amounts: Counter[tuple[str, str]]
    stored: int = 0
    amount: int = 0

    def add(self, count: int) -> None:
        """Occupy more. Raises ApiError if the caller would have too much."""
        self.bound.check(self.stored + self.amounts[self.key] + count)
        self.amounts[self.key] += count
        self.amount += count


@dataclass(slots=True)
class CallerLedger:
    """The amounts that callers occupy now, and their bounds."""

    bounds: CallerBounds = CallerBounds()
    _amounts: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextlib.contextmanager
    def hold(self, bound: Bound, caller: str, stored: int = 0) -> Iterator[Hold]:
        """Yield the amount of a bound that a caller occupies until the context ends."""
        key = (bound.name, caller)
        hold = Hold(bound, key, self._amounts, stored)
        try:
            yield hold
        finally:
            self._amounts[key] -= hold.amount
            if not self._amounts[key]:
                del self._amounts[key]
