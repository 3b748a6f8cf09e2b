"""The marks of a job: the attempt that counts, and the end of the job.

All marks of a job are in one stream, and have a MAC by its ticket. Every reader decides alike, from
their order in the stream:

- Of several attempts that have begun, the last one counts. The other marks count only if they are
  of that attempt.
- After a mark of LAST none counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from clowder_aimage.fleet.frame import BEGIN, ENDS, LAST, Frame
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.ticket import JobTicket


@dataclass(slots=True)
class MarkChain:
    """The marks that count of the job of a ticket.

    ``begin`` is that of the last attempt, which is running if ``is_running``. ``last`` is the last
    mark that counts.
    """

    ticket: JobTicket
    begin: Frame | None = None
    last: Frame | None = None
    is_running: bool = False

    @property
    def is_over(self) -> bool:
        """True if the job has ended."""
        return self.last is not None and self.last.kind in LAST

    def add_all(self, frames: Iterable[Frame]) -> MarkChain:
        """Take the marks of a job in the order of the stream; return this chain."""
        for frame in frames:
            self.add(frame)
        return self

    def add(self, frame: Frame) -> bool:
        """Take the next mark; return True if it counts."""
        if self.is_over or not self._counts(frame) or not self.ticket.has_proven(frame):
            return False
        if frame.kind == BEGIN:
            self.begin = frame
        self.is_running, self.last = frame.kind == BEGIN, frame
        return True

    def _counts(self, frame: Frame) -> bool:
        if frame.kind == BEGIN:
            return frame != self.begin
        is_current = self.is_running and self.begin is not None and frame.is_of(self.begin)
        return is_current and frame.kind in ENDS


async def read_chain(link: FleetLink, ticket: JobTicket) -> MarkChain:
    """Return the marks that count of the job of a ticket. Raises NatsError, TimeoutError."""
    return MarkChain(ticket).add_all(frame for _, frame in await link.read_marks(ticket.job))
