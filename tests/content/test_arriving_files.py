"""Blobs that are read while they are being fetched."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.arriving_files import ArrivingFiles
from clowder_aimage.errors import NetworkError, NotFoundError
from clowder_aimage.layout import ImageLayout
from tests.content.artifact import blob, put

DATA = b"a blob"


def test_a_read_waits_for_its_blob(tmp_path: Path) -> None:
    store, looked = ImageLayout(tmp_path), threading.Event()

    def is_over() -> bool:
        looked.set()
        return False

    def arrive() -> None:
        looked.wait(60)
        store.push(blob(DATA), build_bytes_body(DATA))

    arriving = threading.Thread(target=arrive)
    arriving.start()
    files = ArrivingFiles(store, is_over)
    with files.open(blob(DATA)) as file:
        assert file.read() == DATA
    arriving.join()
    assert files.find_path(blob(DATA)).read_bytes() == DATA


def test_a_blob_of_a_group_commit_is_read_before_the_copy_ends(tmp_path: Path) -> None:
    store = ImageLayout(tmp_path)
    with store.begin_batch():
        put(store, DATA)
        assert ArrivingFiles(store, bool).find_path(blob(DATA)).read_bytes() == DATA


def test_a_read_raises_the_error_of_the_fetch(tmp_path: Path) -> None:
    def failed() -> bool:
        raise NetworkError("the registry has gone")

    with pytest.raises(NetworkError, match="has gone"):
        ArrivingFiles(ImageLayout(tmp_path), failed).find_path(blob(DATA))


def test_a_blob_that_has_not_arrived_at_the_end_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ArrivingFiles(ImageLayout(tmp_path), lambda: True).find_path(blob(DATA))
