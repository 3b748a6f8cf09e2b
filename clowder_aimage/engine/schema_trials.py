"""The trials of JSON Schemas: the places of each caller, and its budget of refused ones.

A schema is tried before its request takes a place of the model, as a trial may take seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from clowder_aimage.engine.admission import CallerBusyError
from clowder_aimage.errors import UsageError

# Trials of one caller at once: half of those that a model process does at once
PLACES = 2
# Seconds of refused trials that a caller may have in a period, which has seconds, too
BUDGET, PERIOD = 10.0, 60.0


class SchemaBudgetError(CallerBusyError):
    """Refused schemas of one caller took too much time."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(0, retry_after)
        self.message = "refused JSON Schemas of this client took too much time"


@dataclass(slots=True)
class _Account:
    places: asyncio.Semaphore
    # The times and the durations of refused trials
    refused: list[tuple[float, float]] = field(default_factory=list)


class SchemaTrials:
    """The trials of all callers; "" is that of servers which do not tell callers apart."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @contextlib.asynccontextmanager
    async def hold(self, caller: str) -> AsyncGenerator[None, None]:
        """Hold a place, in order of arrival. Raises SchemaBudgetError."""
        if (account := self._accounts.get(caller)) is None:
            places = asyncio.Semaphore(PLACES if caller else 2 * PLACES)
            account = self._accounts[caller] = _Account(places)
        async with account.places:
            if caller:
                self._check_budget(account)
            yield

    @contextlib.contextmanager
    def charge(self, caller: str) -> Iterator[None]:
        """Charge the caller, who holds a place, for a trial that is refused."""
        begun = self._clock()
        try:
            yield
        except UsageError:
            now = self._clock()
            self._accounts[caller].refused.append((now, now - begun))
            raise

    def _check_budget(self, account: _Account) -> None:
        now = self._clock()
        account.refused = [trial for trial in account.refused if trial[0] + PERIOD > now]
        if sum(seconds for _, seconds in account.refused) >= BUDGET:
            raise SchemaBudgetError(math.ceil(account.refused[0][0] + PERIOD - now))
