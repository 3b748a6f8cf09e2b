"""The decision about content that is read, which a policy of the user may demand.

The layout and the registry client ask before they give out a manifest: no weight is found without
one. Who asks, and what is demanded, is decided above them (``trust/gate.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Protocol

from clowder_aimage.content.store import Source
from clowder_aimage.oci import Descriptor, Digest, Reference


class Gate(Protocol):
    """A policy. The methods raise PolicyError: it does not accept the content."""

    def admit_remote(
        self,
        repository: Source,
        reference: Reference,
        content: Descriptor,
        raw: bytes,
        source: Source | None = None,
    ) -> None:
        """Decide about a manifest of a registry, before any of its blobs is fetched.

        ``source`` has its config, if the repository does not.
        """

    def check_blob(self, name: str, content: Descriptor) -> None:
        """Decide about a blob of the repository ``name``: a manifest with it must be admitted."""

    def admit_stored(self, store: Source, content: Descriptor) -> None:
        """Decide about a manifest in a store, by the names that it came from."""

    def admit_named(
        self, store: Source, content: Descriptor, references: Sequence[Reference]
    ) -> None:
        """Decide about a stored manifest by names that it is to get, or came by."""

    def admit_asked(self, store: Source, content: Descriptor, reference: Reference) -> None:
        """Decide about a stored manifest, also by the name that it is asked by."""

    def demands(self, reference: Reference) -> bool:
        """Return True if manifests of a repository are refused without a signature."""

    def record(self, store: Source, content: Descriptor, reference: Reference) -> None:
        """Record that a manifest in a store has a name, and why it was admitted."""

    def has_admitted(self, digest: Digest) -> bool:
        """Return False for a blob of no admitted manifest, if manifests are decided about."""


# Returns the gate of this process; set once by the user's configuration.
GATES: list[Callable[[], Gate | None]] = []
# The gate that a block asks in place of that, which may be none
_CHOSEN: ContextVar[tuple[Gate | None, ...]] = ContextVar("chosen_gate", default=())
# Seconds for which a gate counts for the blobs of one copy, of which there are hundreds a second
_MAX_AGE = 0.1


def find_gate() -> Gate | None:
    """Return the gate, None without a policy. Raises UsageError: the policy cannot be used."""
    if chosen := _CHOSEN.get():
        return chosen[0]
    return GATES[0]() if GATES else None


class RecentGate:
    """The gate for blobs of a manifest that it has admitted: it looks at its files now and then."""

    def __init__(self) -> None:
        self._found: tuple[float, Gate | None] | None = None

    def find(self) -> Gate | None:
        """Return the gate, as ``find_gate`` did at most _MAX_AGE ago."""
        if chosen := _CHOSEN.get():
            return chosen[0]
        now, found = time.monotonic(), self._found
        if found is None or now - found[0] > _MAX_AGE:
            # A thread that finds it at the same time finds the same, or a newer one.
            found = self._found = now, find_gate()
        return found[1]


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Ask no gate in this block: it names, lists or removes content, or decides about it."""
    with _choose(None):
        yield


@contextlib.contextmanager
def decided_by(gate: Gate) -> Iterator[None]:
    """Ask this gate in this block, also in one that is unchecked."""
    with _choose(gate):
        yield


@contextlib.contextmanager
def _choose(gate: Gate | None) -> Iterator[None]:
    token = _CHOSEN.set((gate,))
    try:
        yield
    finally:
        _CHOSEN.reset(token)
