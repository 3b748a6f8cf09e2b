"""Unreadable records are an error, and are not treated as missing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import StoreError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout import metadata as record_module
from clowder_aimage.layout.gc import Collector
from clowder_aimage.layout.index_file import read_index
from clowder_aimage.layout.metadata import MetadataFiles, build_file_name
from clowder_aimage.oci import Reference
from tests import process
from tests.content.artifact import put_artifact
from tests.process import Aimage

KIND = "wanted"
KEY = "h.io/a:v1"


@pytest.fixture
def records(tmp_path: Path) -> MetadataFiles:
    """Return two records."""
    found = MetadataFiles(tmp_path / "store", KIND)
    for key in (KEY, "other"):
        found.put(key, {"n": 1}, durable=False)
    return found


def break_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, place: Path, number: int = errno.EACCES
) -> None:
    """Make a system call fail for paths at ``place`` or below it."""
    real = getattr(os, name)

    def broken(path: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path).startswith(str(place)):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, name, broken)


def drop_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes without root's permission to read everything."""
    if os.geteuid() == 0:
        if not (setpriv := shutil.which("setpriv")):
            pytest.skip("root may read anything, and there is no setpriv")
        bare = [setpriv, "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
        monkeypatch.setattr(process, "PROGRAM", [*bare, *process.PROGRAM])


def directory(records: MetadataFiles) -> Path:
    return records._root / ".aimage" / KIND


# -- existing and missing records


@pytest.mark.parametrize("there", ["", f"store/.aimage/{KIND}"])
def test_metadata_of_an_empty_store_is_empty(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    records = MetadataFiles(tmp_path / "store", KIND)
    assert (records.list_names(), list(records.iter_items()), records.get(KEY)) == (set(), [], None)


@pytest.mark.parametrize("raw", [b"{", b'{"key": 7}'])
def test_damaged_or_missing_record_is_none(records: MetadataFiles, raw: bytes) -> None:
    path = directory(records) / build_file_name(KEY)
    path.write_bytes(raw)
    assert records.get(KEY) is None and [key for key, _ in records.iter_items()] == ["other"]
    path.unlink()
    assert records.get(KEY) is None and records.list_names() == {build_file_name("other")}
    path.mkdir()
    assert records.get(KEY) is None and [key for key, _ in records.iter_items()] == ["other"]


# -- unreadable records


def test_unreadable_directory_is_an_error(
    records: MetadataFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_calls(monkeypatch, "listdir", directory(records))
    for ask in (records.list_names, lambda: list(records.iter_items())):
        with pytest.raises(StoreError, match=os.strerror(errno.EACCES)) as caught:
            ask()
        assert str(directory(records)) in caught.value.message
    monkeypatch.undo()
    assert len(records.list_names()) == 2


def test_unreadable_record_is_an_error(
    records: MetadataFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory(records) / build_file_name(KEY)
    break_calls(monkeypatch, "open", path)
    for ask in (
        lambda: records.get(KEY),
        lambda: records.read(path.name),
        lambda: list(records.iter_items()),
        lambda: records.restore(KEY, {"key": KEY, "n": 2}),
    ):
        with pytest.raises(StoreError, match=os.strerror(errno.EACCES)) as caught:
            ask()
        assert str(path) in caught.value.message
    assert records.get("other") == {"key": "other", "n": 1}


def test_read_error_of_a_record_is_an_error(
    records: MetadataFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: str | Path) -> int:
        return os.open("/proc/self/mem", os.O_RDONLY)  # whose first byte gives an I/O error

    monkeypatch.setattr(record_module, "open_regular", failing)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        records.get(KEY)
    assert build_file_name(KEY) in caught.value.message


def test_a_file_in_place_of_the_directory_is_an_error(records: MetadataFiles) -> None:
    shutil.rmtree(directory(records))
    directory(records).write_text("no directory")
    for ask in (records.list_names, lambda: records.get(KEY)):
        with pytest.raises(StoreError, match="Not a directory"):
            ask()


def test_a_store_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    with pytest.raises(StoreError, match="is not a directory"):
        MetadataFiles(tmp_path / "store", KIND).list_names()


def test_a_link_in_place_of_the_directory_is_an_error(
    records: MetadataFiles, tmp_path: Path
) -> None:
    directory(records).rename(tmp_path / "elsewhere")
    directory(records).symlink_to(tmp_path / "elsewhere")
    for ask in (records.list_names, lambda: records.get(KEY), lambda: list(records.iter_items())):
        with pytest.raises(StoreError, match="is a link"):
            ask()


# -- callers


@pytest.fixture
def store_with_pin(tmp_path: Path) -> ImageLayout:
    """Return two names, one of them pinned."""
    layout = ImageLayout(tmp_path / "store")
    for name in ("kept:v1", "other:v1"):
        put_artifact(layout, name, name.encode())
    layout.pins.put("kept:v1", {}, durable=False)
    return layout


def everything(layout: ImageLayout) -> tuple[set[str], set[str]]:
    """Return the names and the blobs."""
    blobs = {path.name for path in (layout.root / "blobs" / "sha256").iterdir()}
    return {name for name, _ in layout.list_tags()}, blobs


@pytest.mark.parametrize(
    ("call", "below"),
    [("listdir", ".aimage/pins"), ("open", f".aimage/pins/{build_file_name('kept:v1')}")],
)
def test_unreadable_pins_stop_a_collection(
    store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch, call: str, below: str
) -> None:
    before = everything(store_with_pin)
    break_calls(monkeypatch, call, store_with_pin.root / below)
    with pytest.raises(StoreError, match=os.strerror(errno.EACCES)):
        Collector(store_with_pin, grace=0).run(max_size=0)
    monkeypatch.undo()
    assert everything(store_with_pin) == before
    Collector(store_with_pin, grace=0).run(max_size=0)
    assert everything(store_with_pin)[0] == {"kept:v1"}


def test_unreadable_names_stop_a_collection(
    store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tool dropped a name, which only the records have."""
    (store_with_pin.root / "index.json").write_text('{"schemaVersion": 2, "manifests": []}')
    before = everything(store_with_pin)
    break_calls(monkeypatch, "listdir", store_with_pin.root / ".aimage" / "names")
    with pytest.raises(StoreError, match=os.strerror(errno.EACCES)):
        Collector(store_with_pin, grace=0).run()
    with pytest.raises(StoreError, match=os.strerror(errno.EACCES)):
        read_index(store_with_pin.root)
    monkeypatch.undo()
    assert everything(store_with_pin) == before and before[0] == {"kept:v1", "other:v1"}


def test_a_name_with_an_unreadable_record_keeps_its_target(
    store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, other = everything(store_with_pin), store_with_pin.resolve(Reference.parse("other:v1"))
    kept = store_with_pin.resolve(Reference.parse("kept:v1"))
    path = store_with_pin.root / ".aimage" / "names" / build_file_name("kept:v1")
    raw = path.read_bytes()
    break_calls(monkeypatch, "open", path)
    for change in (
        lambda: store_with_pin.untag(Reference.parse("kept:v1")),
        lambda: store_with_pin.tag(other, Reference.parse("kept:v1")),
    ):
        with pytest.raises(StoreError, match=os.strerror(errno.EACCES)):
            change()
    assert (
        store_with_pin.resolve(Reference.parse("kept:v1")).digest == kept.digest
    )  # reads still work
    monkeypatch.undo()
    assert everything(store_with_pin) == before and path.read_bytes() == raw


@pytest.mark.parametrize("verb", [("gc", "--max-size", "0"), ("rm", "kept:v1"), ("pin",)], ids=str)
def test_verbs_report_unreadable_pins(
    store_with_pin: ImageLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: tuple[str, ...],
) -> None:
    drop_rights(monkeypatch)
    before, pins = everything(store_with_pin), store_with_pin.root / ".aimage" / "pins"
    pins.chmod(0)
    try:
        done = Aimage(tmp_path, store_with_pin.root)(*verb, code=1)
    finally:
        pins.chmod(0o755)
    assert "Permission denied" in done.err and str(pins) in done.err and done.out == ""
    assert everything(store_with_pin) == before
