"""Directories held by their descriptors: links are not followed, nothing is replaced unseen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clowder_aimage.content.atomic_file import open_atomic, write_file
from clowder_aimage.content.open_directory import OpenDirectory, open_special, resolve


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a directory with a file, to which ``place/link`` leads."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("old")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "place" / "file").symlink_to(tmp_path / "victim" / "file")
    return tmp_path / "victim"


def test_no_call_follows_a_link(victim: Path, tmp_path: Path) -> None:
    with OpenDirectory(tmp_path / "place") as place:
        for call in (
            lambda: place.create("link/new"),
            lambda: place.create("file"),
            lambda: place.open("file", os.O_WRONLY),
            lambda: place.open("link/file"),
            lambda: place.open_subdirectory("link"),
            lambda: place.make("link/new"),
            lambda: place.symlink("x", "link/new"),
            lambda: place.link("link/file", "new"),
            lambda: place.link_from(victim / "file", "link/new"),
            lambda: place.link_from(tmp_path / "place" / "file", "new"),
            lambda: place.stat("link/file"),
        ):
            with pytest.raises(OSError):
                call()
        place.remove("link/file")
        place.remove_tree("link")
        assert place.list_names() == ["file", "link"]
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == "old"


def test_a_directory_that_was_moved_away_stays_the_same(victim: Path, tmp_path: Path) -> None:
    with OpenDirectory(tmp_path / "place") as place:
        (tmp_path / "place").rename(tmp_path / "moved")
        (tmp_path / "place").symlink_to(victim)
        os.close(place.create("new"))
        place.clear()
    assert list((tmp_path / "moved").iterdir()) == []
    assert [path.name for path in victim.iterdir()] == ["file"]


@pytest.mark.parametrize("by", ["link", "file"])
def test_a_replaced_temporary_file_is_not_renamed(tmp_path: Path, by: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "final").write_text("old")
    with (
        pytest.raises(OSError, match="another program has replaced it"),
        open_atomic(tmp_path / "final") as file,
    ):
        file.write(b"new")
        (temporary,) = tmp_path.glob(".final.*")
        temporary.unlink()
        if by == "link":
            temporary.symlink_to(tmp_path / "secret")
        else:
            temporary.write_text("other")
    assert (tmp_path / "final").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "secret"]


def test_a_file_is_written_where_the_directory_was_opened(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with open_atomic(tmp_path / "a" / "file") as file:
        (tmp_path / "a").rename(tmp_path / "moved")
        (tmp_path / "a").symlink_to(tmp_path / "b")
        file.write(b"new")
    assert (tmp_path / "moved" / "file").read_bytes() == b"new"
    assert list((tmp_path / "b").iterdir()) == []


def test_a_link_is_replaced_and_not_followed(victim: Path, tmp_path: Path) -> None:
    write_file(tmp_path / "place" / "file", b"new")
    assert (victim / "file").read_text() == "old"


def test_an_own_link_is_resolved(victim: Path, tmp_path: Path) -> None:
    assert resolve(tmp_path / "place" / "file") == victim / "file"
    assert resolve(tmp_path / "absent") == tmp_path / "absent"


def test_a_device_replaced_by_a_file_is_not_written(victim: Path) -> None:
    with pytest.raises(OSError, match="another program has replaced it"):
        open_special(victim / "file")
    assert (victim / "file").read_text() == "old"
    with open_special(Path("/dev/null")) as file:
        file.write(b"x")
