"""The records of files and batches in the bucket of a fleet, as other gateways wrote them."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from clowder_aimage.api.batch.operation import BatchObject
from clowder_aimage.api.batch.store import Record
from clowder_aimage.api.batch.stored_file import FileObject
from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import STRICT, Count, Id, Line, read_fields
from clowder_aimage.oci import read_json

# Pairs of a mark and a number of chunks; the names of chunks become parts of subjects
_Chunks = Annotated[
    list[tuple[Id, Annotated[int, Field(ge=0, le=100_000)]]], Field(max_length=10_000)
]


@with_config(STRICT)
class _FileRecord(TypedDict):
    owner: Line
    object: FileObject
    pieces: _Chunks


class _Sizes(TypedDict):
    outputs: Count
    errors: Count


@with_config(STRICT)
class _BatchRecord(TypedDict):
    owner: Line
    object: BatchObject
    scope: Line
    caller: Line
    host: Line
    keep: Count
    pieces: _Chunks
    runner: Line | None
    outputs: _Chunks
    errors: _Chunks
    sizes: _Sizes
    files: NotRequired[dict[str, Id]]


_FILE: TypeAdapter[Any] = TypeAdapter(_FileRecord)
_BATCH: TypeAdapter[Any] = TypeAdapter(_BatchRecord)


def read_record(raw: bytes, owner: str, id: str) -> Record:  # noqa: A002
    """Return the record of an owner with an id, also of a later version. Raises FormatError."""
    label = "a record of a batch"
    read_fields(_BATCH if id.startswith("batch_") else _FILE, raw, label)
    record: Record = read_json(raw, label)
    if (record["owner"], record["object"]["id"]) != (owner, id):
        raise FormatError(f"{label} has the id of another one")
    return record
