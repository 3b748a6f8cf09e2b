"""Changes of the key set of a fleet, and its publication."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import TypeAdapter, ValidationError

from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.fleet.key import SIGNER, SignerKey, decode_public_key
from clowder_aimage.fleet.key_files import check_no_seed
from clowder_aimage.fleet.name import KEY_SET, FleetNames

Keys = tuple[SignerKey, ...]
_KEY = TypeAdapter(SignerKey)


def build_key(name: str, role: str, public: str) -> SignerKey:
    """Return a key. Raises UsageError: a value is not valid."""
    check_no_seed(public)
    try:
        decode_public_key(public, SIGNER)
        # Only JSON is converted by strict types.
        return _KEY.validate_json(json.dumps({"name": name, "role": role, "public": public}))
    except FormatError as error:
        raise UsageError(error.message) from None
    except ValidationError:
        message = "the name of a key has 1 to 64 letters, digits, '-' and '_'"
        raise UsageError(message) from None


def add_key(keys: Keys, key: SignerKey) -> Keys:
    """Return the keys with another one. Raises UsageError."""
    for other in keys:
        if other.name == key.name:
            message = f"the fleet has a key with the name {key.name!r}"
            raise UsageError(message, remedy="rotate_key", name=key.name)
        if other.public == key.public:
            raise UsageError(f"the fleet has this key as {other.name!r}")
    return (*keys, key)


def remove_key(keys: Keys, name: str) -> Keys:
    """Return the keys without one. Raises NotFoundError."""
    removed = find_key(keys, name)
    return tuple(key for key in keys if key is not removed)


def rotate_key(keys: Keys, name: str, public: str) -> Keys:
    """Return the keys with a new one as ``name``; the present one gets a number.

    Raises NotFoundError, UsageError.
    """
    present, names = find_key(keys, name), {key.name for key in keys}
    former = next(
        former for number in itertools.count(1) if (former := f"{name}-{number}") not in names
    )
    renamed = build_key(former, present.role, present.public)
    others = tuple(renamed if key is present else key for key in keys)
    return add_key(others, build_key(name, present.role, public))


def find_key(keys: Iterable[SignerKey], name: str) -> SignerKey:
    """Return the key with a name. Raises NotFoundError."""
    for key in keys:
        if key.name == name:
            return key
    raise NotFoundError(f"the fleet has no key with the name {name!r}")


def choose_name(keys: Keys, role: str) -> str:
    """Return a name for the first key of a role of another machine."""
    names = {key.name for key in keys}
    numbered = (f"{role}-{number}" for number in itertools.count(2))
    return next(
        name for name in (role, *itertools.islice(numbered, len(names))) if name not in names
    )


class KeyBucket:
    """The bucket of the key set of a fleet."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, js: JetStreamContext, names: FleetNames) -> KeyBucket:
        """Return the bucket of a fleet. Raises UsageError."""
        try:
            return cls(await js.key_value(names.keys))
        except BucketNotFoundError:
            message = f"the NATS server has no fleet {names.fleet!r}: no bucket {names.keys}"
            raise UsageError(message, remedy="fleet_init", fleet=names.fleet) from None

    async def read(self) -> tuple[bytes, int]:
        """Return the entry and its revision; nothing and 0 if there is none."""
        try:
            entry = await self._bucket.get(KEY_SET)
        except KeyNotFoundError as error:
            # A deleted entry has a revision too.
            return b"", error.entry.revision if error.entry is not None else 0
        return entry.value or b"", entry.revision or 0

    async def replace(self, raw: bytes, revision: int) -> None:
        """Replace the entry of a revision. Raises UsageError: it was changed meanwhile."""
        try:
            await self._bucket.update(KEY_SET, raw, last=revision)
        except KeyWrongLastSequenceError:
            message = "the key set was changed by another program meanwhile"
            raise UsageError(message, remedy="list_keys") from None
