"""What a node remembers of what it was told to keep."""

from __future__ import annotations

import errno
import json
import os

import pytest

pytest.importorskip("yaml", reason="pyyaml is not installed")
pytest.importorskip("pydantic_settings", reason="pydantic-settings is not installed")

from clowder_aimage.errors import NoSpaceError, StoreError
from clowder_aimage.layout import metadata
from clowder_aimage.node.model_spec import wants_of
from clowder_aimage.node.spec_store import SpecStore

DIGEST = "sha256:" + "ab" * 32


def want(ref="h.io/a:v1", **said):
    (found,) = wants_of([{"ref": ref} | said])
    return found


def files(root):
    return sorted((root / ".aimage" / "wanted").iterdir())


def test_an_empty_store_remembers_nothing_and_stays_empty(tmp_path):
    wanted = SpecStore(tmp_path)
    assert (wanted.api(), wanted.ours(), wanted.damaged()) == ([], {}, [])
    assert not wanted.drop_api("h.io/a:v1")
    wanted.forget("h.io/a:v1")
    assert list(tmp_path.iterdir()) == []


def test_what_the_api_was_told_survives_the_process(tmp_path):
    wants = [
        want("h.io/b", priority=7, pin=True, components=["vae"], refresh="0"),
        want("h.io/a:v1", digest=DIGEST, pullPolicy="Never"),
    ]
    for each in wants:
        SpecStore(tmp_path).put_api(each)
    found = SpecStore(tmp_path).api()
    assert found == sorted(wants, key=lambda each: each.name)
    assert {each.origin for each in found} == {"api"}


def test_of_one_name_the_last_want_holds(tmp_path):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want(priority=1))
    wanted.put_api(want(priority=2))
    assert wanted.api() == [want(priority=2)]
    assert len(files(tmp_path)) == 2  # the want, and that there ever was one


def test_a_want_that_is_dropped_was_wanted_once(tmp_path):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want())
    assert wanted.drop_api(want().name)
    assert not wanted.drop_api(want().name)
    assert (wanted.api(), set(wanted.ours())) == ([], {want().name})


def test_what_a_file_wanted_is_remembered_until_it_is_forgotten(tmp_path):
    wanted = SpecStore(tmp_path)
    wanted.remember("h.io/a:v1")
    wanted.remember(f"h.io/b@{DIGEST}")
    assert set(SpecStore(tmp_path).ours()) == {"h.io/a:v1", f"h.io/b@{DIGEST}"}
    wanted.forget("h.io/a:v1")
    assert set(SpecStore(tmp_path).ours()) == {f"h.io/b@{DIGEST}"}
    assert wanted.api() == []


def test_forgetting_leaves_what_the_api_was_told(tmp_path):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want())
    wanted.forget(want().name)
    assert (wanted.api(), wanted.ours()) == ([want()], {})


def test_remembering_again_writes_nothing(tmp_path):
    wanted = SpecStore(tmp_path)
    wanted.remember("h.io/a:v1")
    (path,) = files(tmp_path)
    before = path.stat()
    wanted.remember("h.io/a:v1")
    assert path.stat() == before


def test_the_api_may_be_told_everything_anew(tmp_path):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want("h.io/a"))
    wanted.put_api(want("h.io/b"))
    wanted.replace_api([want("h.io/b", pin=True), want("h.io/c")])
    assert wanted.api() == [want("h.io/b", pin=True), want("h.io/c")]
    assert set(wanted.ours()) == {f"h.io/{name}:latest" for name in "abc"}
    wanted.replace_api([])
    assert wanted.api() == []


def test_a_replacement_that_fails_midway_drops_nothing(tmp_path, monkeypatch):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want("h.io/a"))
    write = metadata.write_file

    def full(path, data, **options):
        if b"h.io/c" in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data, **options)

    monkeypatch.setattr(metadata, "write_file", full)
    with pytest.raises(NoSpaceError):
        wanted.replace_api([want("h.io/b"), want("h.io/c")])
    assert SpecStore(tmp_path).api() == [want("h.io/a"), want("h.io/b")]


def test_what_each_directory_wanted_is_its_own_and_what_the_api_wanted_is_everybodys(tmp_path):
    one, other = (SpecStore(tmp_path, tmp_path / name) for name in ("one", "other"))
    none = SpecStore(tmp_path)
    one.remember("h.io/a:v1", "h.io/a@" + str(DIGEST))
    other.remember("h.io/a:v1")
    other.remember("h.io/b:v1")
    none.put_api(want("h.io/c"))
    assert one.ours() == {"h.io/a:v1": f"h.io/a@{DIGEST}", "h.io/c:latest": "h.io/c:latest"}
    assert set(one.others()) == {"h.io/a:v1", "h.io/b:v1"}
    assert set(other.ours()) == {"h.io/a:v1", "h.io/b:v1", "h.io/c:latest"}
    assert set(none.ours()) == {"h.io/c:latest"}
    one.forget("h.io/a:v1")
    one.forget("h.io/c:latest")
    assert one.ours() == none.ours() == {}
    assert set(other.ours()) == {"h.io/a:v1", "h.io/b:v1"}


def test_a_damaged_record_can_be_mended_by_what_the_api_is_told(tmp_path):
    wanted = SpecStore(tmp_path)
    for name in ("h.io/a", "h.io/b"):
        wanted.put_api(want(name))
    wanted.file(want("h.io/b").name).write_bytes(b"{")
    assert wanted.drop_api(want("h.io/b").name)  # it is there, whatever it said
    wanted.file(want("h.io/a").name).write_bytes(b"{")
    wanted.replace_api([want("h.io/c")])
    assert (wanted.damaged(), wanted.api()) == ([], [want("h.io/c")])


def test_two_nodes_on_one_store_share_it(tmp_path):
    one, other = SpecStore(tmp_path), SpecStore(tmp_path)
    one.put_api(want("h.io/a"))
    other.put_api(want("h.io/b"))
    other.drop_api(want("h.io/a").name)
    assert one.api() == other.api() == [want("h.io/b")]


@pytest.mark.parametrize("raw", [b"", b"{", b"\0" * 100, b"[]", b'{"key": 5}', b"\xff"], ids=repr)
def test_damaged_files_are_passed_over_and_named(tmp_path, raw):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want("h.io/a"))
    wanted.put_api(want("h.io/b"))
    damaged = next(path for path in files(tmp_path) if b'"want"' in path.read_bytes())
    damaged.write_bytes(raw)
    assert len(wanted.api()) == 1
    assert wanted.damaged() == [damaged]
    damaged.unlink()
    assert wanted.damaged() == []


@pytest.mark.parametrize(
    "change",
    [
        {"want": {"ref": "h.io/a:v1", "platform": "one-of-2027"}},
        {"want": {"ref": "h.io/other:v1"}},
        {"want": None},
        {"want": {"ref": "h.io/a:v1", "refresh": "1ms"}},
        {"want": [[]]},
    ],
    ids=str,
)
def test_what_a_later_version_wrote_is_named_as_damaged(tmp_path, change):
    wanted = SpecStore(tmp_path)
    wanted.put_api(want())
    path = next(path for path in files(tmp_path) if b'"want"' in path.read_bytes())
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    assert (wanted.api(), wanted.damaged()) == ([], [path])
    wanted.put_api(want(pin=True))  # telling it again repairs it
    assert (wanted.api(), wanted.damaged()) == ([want(pin=True)], [])


def test_a_link_in_its_place_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "store" / ".aimage").mkdir(parents=True)
    (tmp_path / "store" / ".aimage" / "wanted").symlink_to(outside)
    wanted = SpecStore(tmp_path / "store")
    for write in (lambda: wanted.put_api(want()), lambda: wanted.remember("h.io/a:v1")):
        with pytest.raises(StoreError, match="is a link"):
            write()
    assert list(outside.iterdir()) == []
