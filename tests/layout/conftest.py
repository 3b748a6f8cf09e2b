"""Disable hypothesis deadlines: the machine may be busy. Stores of several tests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import settings

from clowder_aimage.layout import ImageLayout, index, pending_names
from clowder_aimage.oci import Manifest
from tests.content.artifact import put_artifact
from tests.layout.collecting import DAY, used
from tests.layout.large_index import COUNT, parse, read_written

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture
def aged(store: ImageLayout) -> dict[str, Manifest]:
    """Return three names of 1000 bytes each and 500 shared, used one, two and three days ago."""
    made = {
        name: put_artifact(store, name, b"s" * 500, name[0].encode() * 1000)
        for name in ("a:v1", "b:v1", "c:v1")
    }
    now = time.time()
    for days, name in enumerate(made, 1):
        used(store, made[name], now - days * DAY)
    return made


@pytest.fixture
def ingests(store: ImageLayout) -> Path:
    """Return the directory of unfinished downloads."""
    directory = store.root / ".aimage" / "ingest"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take an index of more than four names for a large one, which is not due for an hour."""
    monkeypatch.setattr(pending_names, "SMALL", 4)
    monkeypatch.setattr(index, "_MIN_INTERVAL", 3600.0)


@pytest.fixture
def models(store: ImageLayout, large: None) -> tuple[Manifest, Manifest]:
    """Two models; names of the first are in an index that is large."""
    one, two = put_artifact(store, "a:v1", b"one"), put_artifact(store, "b:v1", b"two")
    for number in range(COUNT - 2):
        store.tag(one.descriptor, parse(f"m{number}:v1"))
    store.write_index()
    assert len(read_written(store)) == COUNT
    return one, two
