"""The account of an owner: the files and batches that it has, by their records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from clowder_aimage.api.batch.store import Record
from clowder_aimage.engine.batch_line import OVER
from clowder_aimage.http.caller_ledger import RECENT


@dataclass(frozen=True, slots=True)
class Account:
    """The files, the bytes in them and in the answers of open batches, and the open batches.

    A batch that has just been created counts as open, though it may have failed at once.
    """

    files: int = 0
    bytes: int = 0
    batches: int = 0


def compute_account(records: Iterable[Record], timestamp: float) -> Account:
    """Return the account of the owner of ``records`` at a time."""
    files = size = batches = 0
    for record in records:
        entry = record["object"]
        if entry["object"] == "file":
            files += 1
            size += entry["bytes"]
            continue
        is_open = entry["status"] not in OVER
        size += sum(record["sizes"].values()) if is_open else 0
        batches += is_open or entry["created_at"] + RECENT > timestamp
    return Account(files, size, batches)
