"""Errors of requests that a worker refuses or ends."""

from __future__ import annotations

from clowder_aimage.errors import AImageError


class BusyError(AImageError):
    """Too many requests wait already; ``retry_after`` is in seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{waiting} requests wait already", hint=f"try again in {retry_after} seconds"
        )
        self.retry_after = retry_after


class DeadlineError(AImageError):
    """A request took longer than the worker allows."""


class StoppedError(AImageError):
    """A model or a transfer was stopped, or the worker is about to end."""


def ending() -> StoppedError:
    """Return the error of requests to a worker that ends."""
    return StoppedError("the worker is about to end", hint="ask another one")
