"""The progress, speed and remaining time of a transfer."""

from __future__ import annotations

import math

from clowder_aimage.cli.console.output import format_count, format_duration, format_size
from clowder_aimage.content.buffer import LARGEST_READ
from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.oci.mediatype import NAME

# Approximate number of seconds for a change of speed to show in full.
_SMOOTH = 5.0
_TITLE = "org.opencontainers.image.title"


class Speed:
    """A smoothed count per second. It falls to zero while nothing is counted."""

    def __init__(self, time: float) -> None:
        self._now = time
        self._count = 0
        self._sum = self._weight = 0.0

    def sample(self, count: int, time: float) -> None:
        """Record that the count is ``count`` at ``time``."""
        passed = time - self._now
        if passed <= 0:
            return
        decay = math.exp(-passed / _SMOOTH)
        self._sum = self._sum * decay + (count - self._count) / passed * (1 - decay)
        self._weight = self._weight * decay + 1 - decay
        self._now, self._count = time, count

    @property
    def value(self) -> float:
        # The weight corrects the bias of the first samples towards zero.
        return self._sum / self._weight if self._weight else 0.0


class BlobProgress:
    """A blob being transferred."""

    def __init__(self, content: Descriptor, time: float) -> None:
        self.label = name_of(content) or content.digest.encoded[:12]
        self.total = content.size
        self.begun = time
        self.done = self.moved = 0
        self.speed = Speed(time)

    @property
    def shown(self) -> int:
        """The bytes transferred; a retry may repeat some."""
        return max(0, min(self.done, self.total))

    @property
    def figures(self) -> dict[str, str]:
        """The position and the rate, formatted."""
        return _format_figures(self.shown, self.total, self.speed.value, "")


def _format_figures(done: int, total: int, rate: float, eta: str) -> dict[str, str]:
    position = f"{format_size(done):>7} of {format_size(total):>7}"
    return {"position": position, "rate": f"{format_size(rate)}/s", "eta": eta}


class Meter:
    """Counts of bytes or steps. Callers must hold a lock."""

    def __init__(self, task: str, subject: str = "", *, stepwise: bool = False) -> None:
        self.task = task
        self.subject = subject
        self.stepwise = stepwise
        # Blobs in the order of their start.
        self.active: dict[Digest, BlobProgress] = {}
        self.begin(0, 0.0)

    def begin(self, total: int, time: float, blobs: int = 0) -> None:
        """Set the total. A second call starts over."""
        self.total, self.blobs = total, blobs
        self.begun = self.now = time
        self.done = self.skipped = self.finished = 0
        self._moved = self._most = 0
        self._speed = Speed(time)
        self.active.clear()

    def advance(self, count: int, *, moved: bool = True) -> None:
        """Add to the count; a negative count must be repeated."""
        self.done += count
        self._most = max(self._most, self.done)
        if moved and count > 0:
            self._moved += count

    def watch(self, event: CopyEvent, time: float) -> bool:
        """Count an event of a copy; return False if it only reports received bytes."""
        content = event.content
        if event.kind == "plan":
            self.begin(event.count, time, event.blobs)
        elif content is None:
            return False
        elif event.kind == "progress":
            self._record_progress(self.active.get(content.digest), event.count)
            return event.count < 0
        elif event.kind == "start":
            self.active[content.digest] = BlobProgress(content, time)
        elif event.kind in ("skip", "done"):
            blob = self.active.pop(content.digest, None)
            if event.kind == "skip":
                self.skipped += 1
            elif blob is None:
                # It was mounted and has been counted.
                return False
            self.finished += 1
            self.advance(content.size - (blob.done if blob else 0), moved=False)
        return True

    def _record_progress(self, blob: BlobProgress | None, count: int) -> None:
        # More than one read returns is content of an earlier run, which is not part of the speed.
        moved = count <= LARGEST_READ
        self.advance(count, moved=moved)
        if blob is not None:
            blob.done += count
            if moved and count > 0:
                blob.moved += count

    def sample(self, time: float) -> None:
        """Update the speeds; call this at intervals."""
        self.now = time
        self._speed.sample(self._moved, time)
        for blob in self.active.values():
            blob.speed.sample(blob.moved, time)

    @property
    def shown(self) -> int:
        """The bytes or steps done; it does not decrease during a retry."""
        return min(self._most, self.total)

    @property
    def elapsed(self) -> float:
        """The seconds from the start to the last sample."""
        return self.now - self.begun

    @property
    def rate(self) -> float:
        """The count per second; for steps the average, as they are few and similar."""
        if self.stepwise:
            return self.done / self.elapsed if self.elapsed > 0 else 0.0
        return self._speed.value

    @property
    def eta(self) -> float | None:
        """The remaining seconds; None if the rate is zero."""
        left = max(0, self.total - self.done)
        rate = self.rate
        # Below these rates the transfer has stalled.
        return left / rate if rate >= (1e-6 if self.stepwise else 1) else None

    @property
    def figures(self) -> dict[str, str]:
        """The formatted position, rate and remaining time."""
        eta = f"ETA {format_duration(self.eta)}"
        if not self.stepwise:
            return _format_figures(self.shown, self.total, self.rate, eta)
        rate = f"{1 / self.rate:.3g} s/step" if 0 < self.rate < 1 else f"{self.rate:.3g} steps/s"
        position = f"{self.shown:>{len(str(self.total))}} of {format_count(self.total, 'step')}"
        return {"position": position, "rate": rate, "eta": eta}


def name_of(content: Descriptor) -> str | None:
    """Return the name in a descriptor: its title, its AImage name, or ollama's."""
    names = (
        content.annotations.get(_TITLE),
        content.annotations.get(NAME),
        content.extra.get("name"),
    )
    return next((name for name in names if isinstance(name, str) and name), None)
