"""The measured batches of models on a device, kept beside the compiled code for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.errors import FormatError
from clowder_aimage.model.batch_table import BatchTable
from clowder_aimage.oci import read_json

_NAME = "batches.json"
_LIMIT = 1 << 20  # bytes
_MOST = 100


class BatchFile:
    """The file of tables in a directory. One that cannot be read or written is as an empty one."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _NAME

    def read(self, key: str) -> BatchTable | None:
        """Return the table of a key; None without any."""
        entries = self._read_all().get(_shorten(key))
        return None if entries is None else BatchTable.parse(entries)

    def write(self, key: str, table: BatchTable) -> None:
        """Keep the table of a key, beside those of the others."""
        tables = {**self._read_all(), _shorten(key): table.to_json()}
        recent = dict([*tables.items()][-_MOST:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            write_file(self._path, json.dumps(recent).encode(), durable=False)

    def _read_all(self) -> dict[str, object]:
        with contextlib.suppress(OSError, FormatError):
            with self._path.open("rb") as file:
                values = read_json(file.read(_LIMIT), _NAME, _LIMIT)
            if isinstance(values, dict):
                return values
        return {}


def _shorten(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
