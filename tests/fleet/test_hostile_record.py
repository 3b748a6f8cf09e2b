"""Records of files and batches are valid, or left out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.gateway.batch_record import read_record
from clowder_aimage.fleet.gateway.batch_store import FleetBatchStore
from tests.fleet.fleet_run import FleetRun
from tests.fleet.hostile_message import list_hostile_messages
from tests.wait import PATIENCE

Play = Callable[..., None]
FILE_ID, BATCH_ID = f"file-{'1' * 24}", f"batch_{'1' * 24}"
FILE = {
    "id": FILE_ID,
    "object": "file",
    "bytes": 5,
    "created_at": 1,
    "expires_at": 2,
    "filename": "a.jsonl",
    "purpose": "batch",
    "status": "processed",
    "status_details": None,
}
BATCH = {
    "id": BATCH_ID,
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "errors": None,
    "input_file_id": FILE_ID,
    "completion_window": "24h",
    "status": "in_progress",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1,
    "in_progress_at": 1,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "expires_at": 2,
    "request_counts": {"total": 1, "completed": 0, "failed": 0},
    "metadata": None,
}
RECORDS: dict[str, dict[str, Any]] = {
    FILE_ID: {"owner": "me", "object": FILE, "pieces": [["a" * 32, 1]]},
    BATCH_ID: {
        "owner": "me",
        "object": BATCH,
        "scope": "infer",
        "caller": "me",
        "host": "127.0.0.1",
        "keep": 5,
        "pieces": [["a" * 32, 1]],
        "runner": None,
        "outputs": [],
        "errors": [[f"{'a' * 32}-errors", 1]],
        "sizes": {"outputs": 0, "errors": 0},
    },
}


BAD_PIECES: tuple[Any, ...] = (
    [["*", 1]],
    [[">", 1]],
    [["a.b", 1]],
    [["a", 10**9]],
    [["a", True]],
    [["a"]],
    [["a", "b"]],
)


def list_hostile_records(name: str) -> list[tuple[str, bytes]]:
    record = RECORDS[name]
    others = json.dumps({**record, "object": None}).encode()
    inner = [
        (f"object: {label}", others.replace(b'"object": null', b'"object": ' + raw))
        for label, raw in list_hostile_messages(record["object"])
    ]
    pieces = [
        ("bad pieces", json.dumps({**record, "pieces": value}).encode()) for value in BAD_PIECES
    ]
    return [*list_hostile_messages(record), *inner, *pieces]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_valid_or_refused(name: str) -> None:
    assert read_record(json.dumps(RECORDS[name]).encode(), "me", name) == RECORDS[name]
    later = {**RECORDS[name], "later": 1}
    assert read_record(json.dumps(later).encode(), "me", name) == later
    for label, raw in list_hostile_records(name):
        with contextlib.suppress(FormatError):
            record = read_record(raw, "me", name)
            assert label != "bad pieces"
            assert (record["owner"], record["object"]["id"]) == ("me", name)
            assert type(record["object"]["created_at"]) is int
            assert all(type(count) is int for _, count in record["pieces"])


@pytest.mark.integration
def test_no_record_makes_an_internal_error(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        link = fleet.operator()
        async with link.open(), fleet.gateway() as url:
            await link.wait_until_ready(PATIENCE)
            bucket = await link.streams.key_value(link.names.batches)
            paths = ["/v1/files", "/v1/batches"]
            for name in RECORDS:
                raws = [raw for _, raw in list_hostile_records(name) if len(raw) < 10_000]
                for number, raw in enumerate(raws[::4]):
                    own = name[:-24] + f"{number:024x}"
                    await bucket.put(f"me.{own}", raw.replace(name.encode(), own.encode()))
                    paths += [f"/v1/files/{own}"] if number % 20 == 0 else []
            for path in paths:
                async with fleet.session.get(url + path) as answer:
                    assert answer.status in (200, 404), (path, await answer.text())

    play(scene)


@pytest.mark.integration
def test_a_key_that_is_not_valid_ends_no_connection(play: Play) -> None:
    async def scene(fleet: FleetRun) -> None:
        link = fleet.operator()
        async with link.open():
            await link.wait_until_ready(PATIENCE)
            names, raw = link.names, json.dumps(RECORDS[FILE_ID]).encode()
            for key in (f"me.{FILE_ID}", f"{'a' * 3900}.{FILE_ID}", f"é.{FILE_ID}", "me.x"):
                await link.streams.publish(f"$KV.{names.batches}.{key}", raw)
            store = FleetBatchStore(link)
            assert await store.list_keys() == [("me", FILE_ID)]
            assert [await store.read(*key) for key in await store.list_keys()]
            assert len(await store.list_records("me")) == 1
            assert link.is_ready

    play(scene)
