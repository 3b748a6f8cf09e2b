"""Persistent records of the desired state, presence checks, and pins of models.

The records are small files in the store. For each name, they hold the directories whose files ever
listed it; only such names are pruned. For each directory, they hold its last valid specs. Nodes
with a common store share the records.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path

from clowder_aimage.api.service import BY_NODE
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import AImageError, NoSpaceError, NotFoundError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, check_blobs, check_completeness
from clowder_aimage.layout.layout import PINS, index_name
from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.layout.snapshot import StoreSnapshot
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.node.model_spec import ModelSpec, parse_specs
from clowder_aimage.node.model_state import ModelStatus
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions

_KIND = "wanted"
# Names contain no spaces.
_EVER, _LAST = "ever ", "last "
# Seconds between two records of a use, and between two reads of times of change
_USE_INTERVAL, _STAMP_AGE = 30.0, 0.25
# Nanoseconds after which a change has another time than the one before, on any file system
_SETTLED = 5 * 10**9
_log = logging.getLogger("aimage.node")


def _read_change(root: Path, kind: str) -> int:
    """Return the time of change of a private directory of a store, in ns; 0 if unknown."""
    try:
        return (root / PRIVATE / kind).stat().st_mtime_ns
    except OSError:
        return 0


class SpecStore:
    """The records in the store at ``root``, for a node that reads the files of ``directory``.

    Methods that write raise StoreError or NoSpaceError; methods that read raise StoreError.
    """

    def __init__(self, root: Path, directory: Path | None = None) -> None:
        self._root = root
        self.owner = "nobody"
        if directory is not None:
            self.owner = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:32]
        # Of the keys of this directory's names.
        self._prefix = f"{_EVER}{self.owner} "
        self._records = MetadataFiles(root, _KIND)

    def put_last(self, directory: Path, specs: Iterable[ModelSpec]) -> None:
        """Record the valid specs of a directory durably."""
        key = f"{_LAST}{directory.absolute()}"
        value = {"wants": [spec.to_json() for spec in specs]}
        record = self._records.get(key)
        if record is None or record.get("wants") != value["wants"]:
            self._records.put(key, value, durable=True)

    def read_last(self, directory: Path) -> tuple[ModelSpec, ...] | None:
        """Return the last valid specs of a directory; None if there is no readable record."""
        try:
            record = self._records.get(f"{_LAST}{directory.absolute()}")
            return None if record is None else parse_specs(record.get("wants"), str(directory))
        except AImageError:
            return None

    def stamp(self) -> int:
        """Return a number that changes whenever a record may have changed."""
        return _read_change(self._root, _KIND)

    def remember(self, name: str, stored: str = "") -> None:
        """Record durably that the files list ``name``.

        ``stored`` is the name in the store if it differs: a name with the digest of an index is
        stored with the digest of the chosen manifest.
        """
        key = self._prefix + name
        record = self._records.get(key)
        new_record = {"stored": stored} if stored else {}
        if record is None or (stored and record.get("stored") != stored):
            self._records.put(key, new_record, durable=True)

    def get_stored_name(self, name: str) -> str:
        """Return the recorded name in the store if it differs, else an empty string."""
        return str((self._records.get(self._prefix + name) or {}).get("stored", ""))

    def read_own_names(self) -> dict[str, str]:
        """Map the names that this directory ever listed to their names in the store."""
        return {name: stored for owner, name, stored in self._iter_names() if owner == self.owner}

    def read_other_names(self) -> dict[str, str]:
        """Map the names that other nodes' directories ever listed, as ``ours``."""
        return {name: stored for owner, name, stored in self._iter_names() if owner != self.owner}

    def forget(self, name: str) -> None:
        """Remove the record that this directory listed ``name``."""
        self._records.remove(self._prefix + name)

    def is_damaged(self) -> bool:
        """Return True if a record cannot be parsed; another node may then list any name."""
        directory = self._root / PRIVATE / _KIND
        damaged = (name for name in self._records.list_names() if self._records.read(name) is None)
        return any(os.path.lexists(directory / name) for name in damaged)

    def _iter_names(self) -> Iterator[tuple[str, str, str]]:
        for key, value in self._records.iter_items():
            if key.startswith(_EVER):
                owner, _, name = key.removeprefix(_EVER).partition(" ")
                yield owner, name, str(value.get("stored", name))


def check_model(snapshot: StoreSnapshot, spec: ModelSpec, name: Reference) -> Completeness:
    """Return the completeness of a model that the store has under ``name``.

    An unreadable model counts as missing, since a pull repairs it. Raises StoreError if the index
    cannot be read: no pull repairs that.
    """
    store, root = snapshot.store, snapshot.find(name)
    if root is None:
        return Completeness()
    try:
        completeness = check_completeness(store, root, snapshot.exists)
        # Checked for complete models too: the components may not exist.
        if spec.components:
            blobs = _list_required_blobs(store, spec, name)
            return check_blobs(store, root, blobs, snapshot.exists)
        return completeness
    except NotFoundError:
        # No such component: the pull reports the error.
        return Completeness(root, root.size, (root,))
    except AImageError:
        return Completeness()


def _list_required_blobs(store: ImageLayout, spec: ModelSpec, name: Reference) -> list[Descriptor]:
    stored = read_aimage(store, name)
    names = LayerSelection(components=spec.components).list_names(stored.aimage, name)
    layers = [layer.descriptor for layer in stored.aimage.layers if layer.name in names]
    return [stored.manifest.config, *layers]


class Pinner:
    """Records, leases and pins the models to keep. All methods block.

    Pins belong to one owner, as several nodes may share a store. What is recorded and pinned is not
    read again while the directories of records and pins are unchanged.
    """

    def __init__(self, store: ImageLayout, records: SpecStore) -> None:
        self._store, self._records = store, records
        # Models that could not be recorded.
        self._failed: set[str] = set()
        # The models that are kept, by name, with what was kept and the state of the directories
        self._kept: dict[str, tuple[Hashable, Hashable]] = {}
        self._stamp: Hashable = None
        self._stamped_at = -math.inf
        # When the uses of models were recorded
        self._used: dict[str, float] = {}
        # Of _failed: models are kept in several threads.
        self._lock = threading.Lock()

    def keep(self, model: ModelStatus) -> None:
        """Record, lease and pin a model to protect it from other nodes and from eviction.

        A failure to write to the store is logged and does not fail the model.
        """
        spec, name, manifest = model.spec, model.state.name, model.state.manifest
        values, stamp = (spec, name), self.read_stamp()
        writes: list[Callable[[], object]] = []
        if manifest is not None:
            writes.append(lambda: model.hold(self._store, manifest.digest))
        if stamp is None or self._kept.get(spec.name) != (values, stamp):
            writes.append(lambda: self.remember(spec, name))
            writes.append(lambda: self._pin(spec, index_name(name)))
        failed = None
        for write in writes:
            try:
                write()
            except (StoreError, NoSpaceError) as error:
                failed = error
        if failed is None:
            self._kept[spec.name] = values, stamp
        self.record_uses((model,))
        with self._lock:
            is_first = not self._failed
            (self._failed.discard if failed is None else self._failed.add)(spec.name)
        # Log one warning for all models.
        if failed is not None and is_first:
            facts = {"model": spec.name, "reason": failed.message}
            _log.warning("cannot write to the store", extra=facts)

    def record_uses(self, models: Iterable[ModelStatus]) -> None:
        """Record that models are used, some time after the last record. Raises no error."""
        for model in models:
            manifest = model.state.manifest
            if manifest is not None and not self.is_used(model):
                self._used[model.spec.name] = time.monotonic() + _USE_INTERVAL
                self._store.use(manifest)

    def is_used(self, model: ModelStatus) -> bool:
        """Return True if the use of a model was recorded recently. Does no I/O."""
        return time.monotonic() <= self._used.get(model.spec.name, 0.0)

    def is_kept(self, model: ModelStatus) -> bool:
        """Return True if a model is recorded, leased and pinned as far as ``keep`` does that.

        As of the last ``read_stamp``. Does no I/O.
        """
        spec, name, manifest = model.spec, model.state.name, model.state.manifest
        if self._stamp is None or self._kept.get(spec.name) != ((spec, name), self._stamp):
            return False
        return manifest is not None and model.holds(manifest.digest)

    def read_stamp(self) -> Hashable:
        """Return the times of change of records and pins; None if they may be changing now."""
        if (timestamp := time.monotonic()) - self._stamped_at > _STAMP_AGE:
            stamps = self._records.stamp(), _read_change(self._store.root, PINS)
            is_settled = time.time_ns() - max(stamps) > _SETTLED
            self._stamp, self._stamped_at = stamps if is_settled else None, timestamp
        return self._stamp

    def get_stored_name(self, spec: ModelSpec) -> str:
        """Return the recorded name in the store if it differs, else an empty string."""
        try:
            return self._records.get_stored_name(spec.name)
        except StoreError:
            # The record is optional.
            return ""

    def remember(self, spec: ModelSpec, name: Reference) -> None:
        """Record a model as listed, with its name in the store. Raises StoreError, NoSpaceError."""
        self._records.remember(spec.name, str(name) if name != spec.reference else "")

    def _pin(self, spec: ModelSpec, name: str) -> None:
        """Set the specified pin, or remove this node's own pin; keep pins of other nodes."""
        if not spec.pin:
            unpin(self._store, name, self._records.owner)
        elif self._store.pins.get(name) is None:
            pin = {"by": BY_NODE, "owner": self._records.owner}
            self._store.pin(name, pin)


def unpin(store: ImageLayout, name: str, owner: str) -> None:
    """Remove the pin set by the node ``owner``. Raises StoreError."""
    pin = store.pins.get(name)
    if pin is not None and is_own_pin(pin, owner):
        store.unpin(name)


def is_own_pin(pin: Mapping[str, object], owner: str) -> bool:
    """Return True if a pin was set by the node ``owner``."""
    return pin.get("by") == BY_NODE and pin.get("owner") == owner


def list_credential_files(connection: ClientOptions) -> tuple[tuple[Path, float], ...]:
    """Return the credential files with their modification times."""
    files = []
    for path in connection.auth_files:
        with contextlib.suppress(OSError):
            files.append((path, path.stat().st_mtime))
    return tuple(files)
