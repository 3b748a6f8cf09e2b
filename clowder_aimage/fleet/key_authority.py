"""The use of the root key of a fleet: keys are made, and key sets published."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.errors import UsageError, VerificationError
from clowder_aimage.fleet.key import ROOT, SIGNER, FleetKey, KeySet
from clowder_aimage.fleet.key_change import KeyBucket, Keys, add_key, build_key, choose_name
from clowder_aimage.fleet.key_files import KeyDirectory, read_seed, write_seed
from clowder_aimage.fleet.name import GATEWAY, OPERATOR, FleetNames

_ROLES = (OPERATOR, GATEWAY)


@dataclass(frozen=True, slots=True)
class KeyAuthority:
    """The root key in ``root_file``, and the directory of the other keys of a fleet.

    ``clock`` is the time of this machine: the version of a key set is at least the time in seconds,
    so that it is newer than those that a server has lost.
    """

    names: FleetNames
    directory: KeyDirectory
    root_file: Path
    clock: Callable[[], float] = time.time

    def read_root(self) -> FleetKey:
        """Return the root key. Raises UsageError."""
        if not self.root_file.exists():
            raise UsageError(f"there is no root key: {self.root_file}", remedy="root_key")
        return read_seed(self.root_file, ROOT)

    def make_keys(self) -> tuple[FleetKey, dict[str, FleetKey]]:
        """Return the root key, and the signing keys of this machine that had to be made, by role.

        Raises UsageError, StoreError.
        """
        if not self.root_file.exists():
            write_seed(self.root_file, FleetKey.generate(ROOT))
        root = self.read_root()
        if self.directory.read_public_root() != root.public:
            self.directory.write_public_root(root.public)
        made = {}
        for role in _ROLES:
            path = self.directory.get_seed_path(role)
            if not path.exists():
                made[role] = FleetKey.generate(SIGNER)
                write_seed(path, made[role])
        return root, made

    async def init(self, bucket: KeyBucket, *, replaces: bool = False) -> KeySet | None:
        """Publish the key set with the keys of this machine unless it is there; return it.

        Return None for the key set of a root key that is not on this machine. Raises UsageError,
        StoreError: its root key is another one, unless ``replaces``.
        """
        raw, revision = await bucket.read()
        if raw and not replaces and not self.root_file.exists():
            return None
        root, made = self.make_keys()
        published = None if replaces or not raw else self._decode(raw, root)
        current = self._select_latest(published, root)
        added = made if current is not None else self._read_signers()
        if published is not None and published is current and not added:
            return published
        keys = current.keys if current is not None else ()
        for role, key in added.items():
            keys = add_key(keys, build_key(choose_name(keys, role), role, key.public))
        return await self._publish(bucket, keys, root, current, revision)

    async def change(self, bucket: KeyBucket, change: Callable[[Keys], Keys]) -> KeySet:
        """Publish a change of the key set; return it. Raises UsageError and those of ``change``."""
        root = self.read_root()
        raw, revision = await bucket.read()
        current = self._select_latest(self._decode(raw, root) if raw else None, root)
        if current is None:
            message = f"the fleet {self.names.fleet!r} has no key set"
            raise UsageError(message, remedy="fleet_init", fleet=self.names.fleet)
        return await self._publish(bucket, change(current.keys), root, current, revision)

    def _read_signers(self) -> dict[str, FleetKey]:
        return {role: read_seed(self.directory.get_seed_path(role), SIGNER) for role in _ROLES}

    def _decode(self, raw: bytes, root: FleetKey) -> KeySet:
        try:
            return KeySet.decode(raw, root.public, self.names.fleet)
        except VerificationError:
            message = f"the fleet {self.names.fleet!r} has a key set of another root key"
            raise UsageError(message, remedy="replace_keys") from None

    def _select_latest(self, published: KeySet | None, root: FleetKey) -> KeySet | None:
        """Return the published key set, or the copy if that is newer: NATS may have lost data."""
        copy = self.directory.read_copy(root.public, self.names.fleet)
        if published is None or copy is None:
            return published or copy
        return copy if copy.version > published.version else published

    async def _publish(
        self, bucket: KeyBucket, keys: Keys, root: FleetKey, current: KeySet | None, revision: int
    ) -> KeySet:
        version = max(current.version + 1 if current is not None else 1, int(self.clock()))
        key_set = KeySet(self.names.fleet, version, keys)
        raw = key_set.encode(root)
        await bucket.replace(raw, revision)
        self.directory.write_copy(raw)
        return key_set
