"""Records of the desired state that outlive the node's process, presence of models, and their pins.

The records are small files in the store: for each name, the directories whose files ever listed it
(only such a name is pruned); for each directory, its specs when the files were last valid. Nodes
that share a store share these records.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from clowder_aimage.api import model_list
from clowder_aimage.api.service import BY_NODE
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import AImageError, NoSpaceError, NotFoundError, StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import Completeness, check_blobs, check_completeness
from clowder_aimage.layout.layout import index_name
from clowder_aimage.layout.lock import PRIVATE
from clowder_aimage.layout.metadata import MetadataFiles
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.node.model_spec import ModelSpec, parse_specs
from clowder_aimage.node.model_state import ModelStatus
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions

_KIND = "wanted"
_EVER, _LAST = "ever ", "last "  # no name has a space in it
_log = logging.getLogger("aimage.node")


class SpecStore:
    """The records in the store at ``root``, for a node that reads the files of ``directory``.

    Methods that write raise StoreError or NoSpaceError, methods that read StoreError.
    """

    def __init__(self, root: Path, directory: Path | None = None) -> None:
        self._root = root
        self.owner = "nobody"
        if directory is not None:
            self.owner = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:32]
        self._prefix = f"{_EVER}{self.owner} "  # of the keys of this directory's names
        self._records = MetadataFiles(root, _KIND)

    def put_last(self, directory: Path, specs: Iterable[ModelSpec]) -> None:
        """Record the specs of a directory whose files are valid, durably."""
        key = f"{_LAST}{directory.absolute()}"
        value = {"wants": [spec.to_json() for spec in specs]}
        known = self._records.get(key)
        if known is None or known.get("wants") != value["wants"]:
            self._records.put(key, value, durable=True)

    def last(self, directory: Path) -> tuple[ModelSpec, ...] | None:
        """Return the last valid specs of a directory; None where there is no readable record."""
        try:
            known = self._records.get(f"{_LAST}{directory.absolute()}")
            return None if known is None else parse_specs(known.get("wants"), str(directory))
        except AImageError:
            return None

    def stamp(self) -> int:
        """Return a number that changes when any record may have changed."""
        try:
            return (self._root / PRIVATE / _KIND).stat().st_mtime_ns
        except OSError:
            return 0

    def remember(self, name: str, stored: str = "") -> None:
        """Record durably that the files list ``name``.

        ``stored`` is its name in the store where that differs: a name with an index's digest is
        stored with the digest of the chosen manifest.
        """
        key = self._prefix + name
        known = self._records.get(key)
        fact = {"stored": stored} if stored else {}
        if known is None or (stored and known.get("stored") != stored):
            self._records.put(key, fact, durable=True)

    def stored(self, name: str) -> str:
        """Return the name in the store where it is recorded as another; else an empty text."""
        return str((self._records.get(self._prefix + name) or {}).get("stored", ""))

    def ours(self) -> dict[str, str]:
        """Return the names that this directory ever listed, with their names in the store."""
        return {name: stored for owner, name, stored in self._ever() if owner == self.owner}

    def others(self) -> dict[str, str]:
        """Return the names that the directories of other nodes ever listed, as ``ours``."""
        return {name: stored for owner, name, stored in self._ever() if owner != self.owner}

    def forget(self, name: str) -> None:
        """Remove the record that this directory ever listed ``name``."""
        self._records.remove(self._prefix + name)

    def is_damaged(self) -> bool:
        """Return whether a record cannot be parsed: another node may list any name then."""
        directory = self._root / PRIVATE / _KIND
        lost = (name for name in self._records.names() if self._records.read(name) is None)
        return any(os.path.lexists(directory / name) for name in lost)

    def _ever(self) -> Iterator[tuple[str, str, str]]:
        for key, value in self._records.items():
            if key.startswith(_EVER):
                owner, _, name = key.removeprefix(_EVER).partition(" ")
                yield owner, name, str(value.get("stored", name))


def check_model(store: ImageLayout, spec: ModelSpec, name: Reference) -> Completeness:
    """Return what the store has of a model that it calls ``name``.

    A model that cannot be read counts as missing: a pull repairs it. Raises StoreError if the index
    cannot be read; no pull repairs that.
    """
    try:
        root = model_list.entry(store, name)
    except AImageError as error:
        raise StoreError(error.message, **error.advice) from error
    if root is None:
        return Completeness()
    try:
        found = check_completeness(store, root)
        if spec.components:  # also where nothing is missing: it may not have these components
            return check_blobs(store, root, _specified(store, spec, name))
        return found
    except NotFoundError:  # it has no such component: a pull fails with that
        return Completeness(root, root.size, (root,))
    except AImageError:
        return Completeness()


def _specified(store: ImageLayout, spec: ModelSpec, name: Reference) -> list[Descriptor]:
    stored = read_aimage(store, name)
    names = LayerSelection(components=spec.components).names(stored.aimage, name)
    layers = [layer.descriptor for layer in stored.aimage.layers if layer.name in names]
    return [stored.manifest.config, *layers]


class Pinner:
    """Records, leases and pins the models that are to stay. All methods block.

    The pins are of one owner: several nodes may share a store.
    """

    def __init__(self, store: ImageLayout, records: SpecStore) -> None:
        self._store, self._records = store, records
        self._failed: set[str] = set()  # the models that could not be recorded

    def keep(self, model: ModelStatus) -> None:
        """Record, lease and pin a model, so that no other node and no eviction removes it.

        A store that cannot be written serves all the same.
        """
        spec, name, manifest = model.spec, model.state.name, model.state.manifest
        writes: tuple[Callable[[], object], ...] = (
            lambda: self.remember(spec, name),
            lambda: model.hold(self._store, manifest.digest) if manifest else None,
            lambda: self._pin(spec, index_name(name)),
        )
        failed = None
        for write in writes:
            try:
                write()
            except (StoreError, NoSpaceError) as error:
                failed = error
        if manifest is not None:
            self._store.use(manifest)
        if failed is None:
            self._failed.discard(spec.name)
            return
        if not self._failed:  # one warning for all models
            facts = {"model": spec.name, "reason": failed.message}
            _log.warning("cannot write to the store", extra=facts)
        self._failed.add(spec.name)

    def stored(self, spec: ModelSpec) -> str:
        """Return the recorded name in the store if it is another one; else an empty text."""
        try:
            return self._records.stored(spec.name)
        except StoreError:  # the model is there all the same
            return ""

    def remember(self, spec: ModelSpec, name: Reference) -> None:
        """Record a model as listed, and its name in the store. Raises StoreError, NoSpaceError."""
        self._records.remember(spec.name, str(name) if name != spec.reference else "")

    def _pin(self, spec: ModelSpec, name: str) -> None:
        """Set the specified pin, or remove this node's own; another node's stays."""
        if not spec.pin:
            unpin(self._store, name, self._records.owner)
        elif self._store.pins.get(name) is None:
            pin = {"by": BY_NODE, "owner": self._records.owner}
            self._store.pins.put(name, pin, durable=True)


def unpin(store: ImageLayout, name: str, owner: str) -> None:
    """Remove the pin that the node of ``owner`` set. Raises StoreError."""
    known = store.pins.get(name)
    if known is not None and is_own_pin(known, owner):
        store.pins.remove(name)


def is_own_pin(pin: Mapping[str, object], owner: str) -> bool:
    """Return whether the node of ``owner`` set a pin."""
    return pin.get("by") == BY_NODE and pin.get("owner") == owner


def credentials(connection: ClientOptions) -> tuple[tuple[Path, float], ...]:
    """Return the files with credentials and when each was changed last."""
    found = []
    for path in connection.auth_files:
        with contextlib.suppress(OSError):
            found.append((path, path.stat().st_mtime))
    return tuple(found)
