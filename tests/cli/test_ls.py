"""``aimage ls``: its columns, its filter and its messages."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout, summary
from clowder_aimage.oci import Descriptor, Manifest, mediatype
from tests.conftest import TINY
from tests.content.artifact import put_artifact
from tests.process import Aimage
from tests.store import copy_store, unshare

DAY = 86400


@dataclass
class Stocked(Aimage):
    """The command line on a store of an AImage with two names, a dated one and an artifact."""

    made: Manifest = field(kw_only=True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Stocked:
    """Return a store that tests read only."""
    home = tmp_path_factory.mktemp("listed")
    copy_store(tiny_store, home / "store")
    made = put_artifact(ImageLayout(home / "store"), "other:v2", b"data")
    here = Stocked(home, home / "store", made=made)
    here("tag", "x", "tiny")
    here("tag", "x", "localhost:5000/team/tiny:v1")
    here("rm", "x")
    here("create", "dated", TINY, "--created", "2020-01-01T00:00:00Z")
    return here


@pytest.fixture
def changed(tmp_path: Path, stored: Stocked) -> Stocked:
    """Return a copy of the store that a test may change."""
    copy_store(stored.store, tmp_path / "store")
    return Stocked(tmp_path, tmp_path / "store", made=stored.made)


def test_columns_of_aimages_and_artifacts(stored: Stocked) -> None:
    titles, *rows = (line.split() for line in stored("ls").out.splitlines())
    assert titles == ["NAME", "FAMILY", "TYPE", "SIZE", "CREATED", "DIGEST"]
    cells = {row[0]: row[1:3] for row in rows}
    assert cells["tiny:latest"] == ["z-image", "BF16"]
    assert cells["other:v2"] == ["-", "-"]
    (line,) = stored("ls", "dated").out.splitlines()[1:]
    age = int((time.time() - 1577836800) // (365 * DAY))
    assert f" {age} years ago  " in line


def test_json_has_absolute_times(stored: Stocked) -> None:
    rows = {row["reference"]: row for row in stored("--json", "ls").value}
    dated = rows["dated:latest"]
    assert (dated["family"], dated["type"]) == ("z-image", "BF16")
    assert dated["created"] == "2020-01-01T00:00:00Z"
    assert rows["tiny:latest"]["created"] is None
    assert rows["tiny:latest"]["added"].endswith("+00:00")
    unknown = {"kind": "?", "family": None, "type": None, "created": None, "size": None}
    assert unknown.items() <= rows["other:v2"].items()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "now"),
        (1, "1 second ago"),
        (150, "2 minutes ago"),
        (5 * 3600, "5 hours ago"),
        (DAY, "1 day ago"),
        (13 * DAY, "1 week ago"),
        (90 * DAY, "3 months ago"),
    ],
)
def test_times_are_relative(
    stored: Stocked, monkeypatch: pytest.MonkeyPatch, seconds: float, text: str
) -> None:
    path = stored.store / "blobs" / "sha256" / stored.made.digest.encoded
    os.utime(path, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000 + seconds)
    (line,) = stored("ls", "other").out.splitlines()[1:]
    assert re.split(" {2,}", line)[-2:] == [text, stored.made.digest.short]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["tiny"], ["tiny:latest"]),
        (["*tiny"], ["localhost:5000/team/tiny:v1", "tiny:latest"]),
        (["localhost:5000/*"], ["localhost:5000/team/tiny:v1"]),
        (["*:v?", "dated:latest"], ["dated:latest", "localhost:5000/team/tiny:v1", "other:v2"]),
        (["TINY", "v1"], []),
    ],
)
def test_patterns_and_quiet_output(stored: Stocked, patterns: list[str], names: list[str]) -> None:
    assert stored("ls", "-q", *patterns).out.splitlines() == names
    assert [row["reference"] for row in stored("ls", "--json", *patterns).value] == names


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["family=Z-Image", "reference=tiny"], ["tiny:latest"]),
        (["type=bf*", "type=int4", "kind=clowder", "reference=*d*"], ["dated:latest"]),
        (["family="], ["other:v2"]),
        (["partial=false", "kind=?", "reference=other:v2"], ["other:v2"]),
        (["family=z-image", "partial=true"], []),
    ],
)
def test_filters_of_fields(stored: Stocked, filters: list[str], names: list[str]) -> None:
    options = [word for each in filters for word in ("-f", each)]
    assert stored("ls", "-q", *options).out.splitlines() == names


@pytest.mark.parametrize("text", ["family", "famly=x", "=x", ""])
def test_a_filter_needs_a_field_that_exists(stored: Stocked, text: str) -> None:
    err = stored("ls", "--filter", text, code=2).err
    assert f"{text!r} is not FIELD=PATTERN with one of reference, family, type" in err


def test_no_trunc_shows_whole_digests(stored: Stocked) -> None:
    digest = stored("ls", "tiny", "--format", "{{ digest }}").line
    assert digest not in stored("ls").out and digest in stored("ls", "--no-trunc").out


def test_names_that_do_not_match_are_reported(stored: Stocked) -> None:
    assert stored("ls", "x*", "y").err == "no names match x* y\n"
    assert stored("ls", "x", "-f", "family=y").err == "no names match x family=y\n"
    done = stored("ls", "-q", "x*")
    assert (done.out, done.err) == ("", "")
    assert stored("ls", "-q", "--json", "x*").value == []


def test_a_missing_and_an_empty_store_are_reported(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    hint = "'aimage create' and 'aimage pull' add names\n"
    assert here("ls").err == f"no store at {here.store}; {hint}"
    here.store.mkdir()
    assert here("ls").err == f"no names in the store {here.store}; {hint}"


def test_the_cache_of_an_earlier_version_is_replaced(changed: Stocked) -> None:
    (row,) = changed("--json", "ls", "tiny").value
    path = changed.store / ".aimage" / "listing" / row["digest"][7:]
    path.write_text(json.dumps({"size": 1, "kind": "clowder"}))
    assert changed("--json", "ls", "tiny").value == [row]
    assert '"BF16"' in path.read_text()


def test_an_unreadable_config_leaves_the_other_columns(changed: Stocked) -> None:
    digest = changed("--json", "ls", "dated").value[0]["digest"]
    manifest = json.loads((changed.store / "blobs" / digest.replace(":", "/")).read_bytes())
    path = changed.store / "blobs" / manifest["config"]["digest"].replace(":", "/")
    unshare(path)
    path.write_bytes(b"{" * path.stat().st_size)
    (changed.store / ".aimage" / "listing" / digest[7:]).unlink()
    row = changed("--json", "ls", "dated").value[0]
    assert (row["kind"], row["family"], row["created"]) == ("clowder", None, None)
    assert row["size"] > 1_000_000
    # It may be repaired
    assert not (changed.store / ".aimage" / "listing" / digest[7:]).exists()


def test_a_manifest_that_is_not_readable_is_read_once(
    changed: Stocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(changed.store)
    raw = b'{"schemaVersion": 2, "layers": 5}'
    (root / "blobs" / "sha256" / hashlib.sha256(raw).hexdigest()).write_bytes(raw)
    index = json.loads((root / "index.json").read_bytes())
    entry = {**index["manifests"][0], **Descriptor.of(mediatype.OCI_MANIFEST, raw).to_json()}
    entry["annotations"] = {mediatype.REF_NAME: "bad:latest"}
    index["manifests"].append(entry)
    (root / "index.json").write_text(json.dumps(index))
    assert [row["kind"] for row in changed("--json", "ls", "bad").value] == ["?"]
    monkeypatch.setattr(summary, "read_all", lambda *_: pytest.fail("it was read again"))
    assert [row["kind"] for row in changed("--json", "ls", "bad").value] == ["?"]


def test_a_store_filled_by_this_program_is_listed_without_reading_manifests(
    stored: Stocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "read_all", lambda *_: pytest.fail("a manifest was read"))
    assert [row["kind"] for row in stored("ls", "tiny", "dated", "--json").value] == ["clowder"] * 2


def test_names_set_by_another_tool_are_summarized_once(
    changed: Stocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(changed.store / ".aimage")
    index = json.loads((changed.store / "index.json").read_bytes())
    (entry,) = (e for e in index["manifests"] if "tiny:latest" in e["annotations"].values())
    index["manifests"] = []
    blobs = changed.store / "blobs" / "sha256"
    raw = json.loads((blobs / entry["digest"][7:]).read_bytes())
    for number in range(40):
        data = json.dumps(raw | {"annotations": {"n": str(number)}}).encode()
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        content = Descriptor.of(mediatype.OCI_MANIFEST, data).to_json()
        index["manifests"].append(content | {"annotations": {mediatype.REF_NAME: f"m{number}:v1"}})
    (changed.store / "index.json").write_text(json.dumps(index))
    rows = changed("ls", "--json").value
    assert [row["family"] for row in rows] == ["z-image"] * 40
    assert [path.name for path in (changed.store / ".aimage" / "listing").iterdir()] == ["pack"]
    monkeypatch.setattr(summary, "read_all", lambda *_: pytest.fail("a manifest was read again"))
    assert changed("ls", "--json").value == rows
