"""The models of a worker's store, read by several threads."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.fleet import store_view
from clowder_aimage.fleet.store_view import StoreView
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor
from tests.wait import PATIENCE


def test_of_two_reads_of_a_store_the_later_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, is_begun, goes_on = ImageLayout(tmp_path), threading.Event(), threading.Event()
    view = StoreView(store, ModelDescriptions(store))
    entries: list[list[Any]] = []

    def list_entries(_: ImageLayout) -> list[Any]:
        read = list(entries)
        if not read:
            is_begun.set()
            goes_on.wait(PATIENCE)
        return [item for items in read for item in items]

    monkeypatch.setattr(store_view, "list_entries", list_entries)
    monkeypatch.setattr(ImageLayout, "compute_fingerprint", lambda _: None)
    descriptor = Descriptor.of("application/x", b"x")
    item = SimpleNamespace(descriptor=descriptor, missing=0, size=1, reference="a:latest")
    first, second = (threading.Thread(target=view.read) for _ in range(2))
    first.start()
    assert is_begun.wait(PATIENCE)
    entries.append([item])
    second.start()
    # It ends now, unless it waits for the first one.
    second.join(0.1)
    goes_on.set()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert view.models == {"a:latest": str(descriptor.digest)}
