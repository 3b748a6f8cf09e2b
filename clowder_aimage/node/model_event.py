"""The events and the actions of a model's state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from clowder_aimage.errors import AImageError
from clowder_aimage.node.model_spec import ModelSpec
from clowder_aimage.oci import Descriptor, Digest, Reference

# -- events


class Signal(Enum):
    """Events without facts."""

    RETRIED = "a retry was requested, or credentials have changed"
    STORE_CHANGED = "something was removed from the store"
    POSTPONED = "the registry has too many requests under way"
    CRASHED = "the node failed; its log has the error"


@dataclass(frozen=True, slots=True)
class Specified:
    """The desired state was read: this is the model's spec now."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class StoreRead:
    """The store was read: what it calls the model, the manifest there, and whether all is there."""

    name: Reference
    manifest: Descriptor | None = None
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class StoreUnreadable:
    """The store could not be read: it is unknown what it has."""

    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The registry answered what the tag means; ``root`` is None where that is what was known.

    ``chosen`` is the manifest for this machine where ``root`` is an index.
    """

    root: Digest | None = None
    chosen: Digest | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The free space of the store's file system, in bytes."""

    free: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull ended, and the store was read after it; ``sources`` are the bytes from each."""

    read: StoreRead
    sources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """An action failed.

    For lack of space: ``free`` bytes there are, ``needed`` by the pull, and whether it ``began``
    to write. For content that failed verification: the ``root`` that the tag means.
    """

    error: AImageError
    free: int = 0
    needed: int = 0
    began: bool = False
    root: Digest | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """A transfer was stopped from outside."""

    reason: str


Event = (
    Signal
    | Specified
    | StoreRead
    | StoreUnreadable
    | Checked
    | Measured
    | Pulled
    | Failed
    | Stopped
)

# -- actions


class Work(Enum):
    """Actions without parameters."""

    KEEP = "record, lease and pin the model in the store"
    MEASURE = "measure the free space: Measured"
    PULL = "pull the model: Pulled"


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish an event of the node."""

    kind: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """Ask the registry what the tag means, on condition that it is not ``known``: Checked."""

    known: Digest | None


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict other models until ``room`` bytes are free."""

    room: int


Action = Work | Announce | Check | Evict
