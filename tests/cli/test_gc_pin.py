"""``aimage gc``, ``pin`` and ``unpin`` on the command line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from tests.content.artifact import put, put_artifact
from tests.process import Aimage
from tests.store import unshare

DAY = 86400


@pytest.fixture
def stored(aimage: Callable[..., Aimage]) -> Any:
    """Return a store with two names that share a blob, used one and two days ago."""
    here: Any = aimage()
    here.layout = ImageLayout(here.store)
    here.made = {
        name: put_artifact(here.layout, name, b"s" * 500, name[0].encode() * 1000)
        for name in ("a:v1", "b:v1")
    }
    for days, made in enumerate(here.made.values(), 1):
        when = time.time() - days * DAY
        os.utime(here.store / ".aimage" / "used" / made.digest.encoded, (when, when))
    return here


def names(here: Any) -> list[Any]:
    return [row["reference"] for row in here("--json", "ls").value]


def total(here: Any) -> Any:
    return sum(path.stat().st_size for path in (here.store / "blobs" / "sha256").iterdir())


def own(made: Any) -> Any:
    """Return the bytes of blobs that only this AImage needs: layer, config and manifest."""
    return 1000 + made.config.size + len(made.raw)


def test_gc_reports_removed_and_kept_blobs(stored: Any) -> None:
    put(stored.layout, b"of a pull in progress")
    left = total(stored) - own(stored.made["b:v1"])
    stored("rm", "b:v1")
    out = stored("gc").out
    assert out.startswith("removed: 3 blobs, ")  # only a name of this store needed them
    assert "kept: 1 blob, 21 B, newer than the grace period (--grace 0 removes them)" in out
    assert total(stored) == left
    assert stored("gc", "--grace", "0").out == "removed: 1 blob, 21 B\n"


def test_gc_json_output(stored: Any) -> None:
    put(stored.layout, b"young")
    freed, left = own(stored.made["b:v1"]), total(stored) - own(stored.made["b:v1"])
    stored("rm", "b:v1")
    wanted = {
        "dryRun": False,
        "forgotten": [],
        "blobs": 3,
        "size": freed,
        "partials": {"count": 0, "size": 0},
        "young": {"blobs": 1, "size": 5},
        "left": left,
    }
    assert stored("--json", "gc", "--dry-run").value == wanted | {"dryRun": True}
    assert stored("--json", "gc").value == wanted


def test_rm_reports_what_gc_would_free(stored: Any) -> None:
    freed = own(stored.made["b:v1"])
    stored("tag", "b:v1", "c:v1")
    assert stored("rm", "c:v1").err == ""  # b:v1 needs all of it
    done = stored("rm", "b:v1")
    assert (done.out, done.err) == ("b:v1\n", "1.55 kB can be freed with: aimage gc\n")
    assert stored("--json", "gc").value["size"] == freed


def test_rm_in_a_large_store_reads_no_other_manifests(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clowder_aimage.cli.verbs.rm._MANY", 1)
    stored("tag", "b:v1", "c:v1")
    monkeypatch.setattr(Collector, "run", None)
    done = stored("rm", "c:v1")
    assert done.err == "to free content that no other name needs: aimage gc\n"


def test_rm_with_gc_frees_the_content(stored: Any) -> None:
    left = total(stored) - own(stored.made["b:v1"])
    done = stored("rm", "b:v1", "--gc")
    assert (done.out, done.err) == ("b:v1\n", "freed 1.55 kB (3 blobs)\n")
    assert total(stored) == left
    with stored.layout.lease(stored.made["a:v1"].digest):  # a worker uses it
        assert stored("--json", "rm", "a:v1", "--gc").value == {"removed": ["a:v1"], "freed": 0}
        assert total(stored) == left
    assert stored("gc").out.startswith("removed: 4 blobs")


def test_rm_removes_all_names_or_none(stored: Any) -> None:
    err = stored("rm", "a:v1", "x", "b:v1", "y:v1", code=3).err
    assert "x:latest, y:v1 not found in the store" in err
    assert "nothing was removed" in err
    stored("rm", "a:v1", "x", code=3)
    assert names(stored) == ["a:v1", "b:v1"]
    assert stored("rm", "a:v1", "b:v1", "-q").out == "a:v1\nb:v1\n"
    assert names(stored) == []


def test_max_size_frees_names_that_were_just_pulled(stored: Any) -> None:
    before = total(stored)
    wishes = ("--json", "gc", "--max-size", before - 1)
    assert stored(*wishes, "--dry-run").value["blobs"] == 3
    assert stored(*wishes).value["blobs"] == 3
    assert total(stored) == before - own(stored.made["b:v1"])


def test_a_dry_run_reports_and_removes_nothing(stored: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in stored.store.rglob("*")}
    out = stored("gc", "--dry-run", "--grace", "0", "--max-age", "36h").out
    assert "would be removed: b:v1 (not used for 2 days)" in out
    assert "would be removed: 3 blobs" in out
    assert {path: path.stat().st_mtime_ns for path in stored.store.rglob("*")} == before


def test_max_age_removes_unused_names(stored: Any) -> None:
    value = stored("--json", "gc", "--grace", "0", "--max-age", "36h").value
    assert value["forgotten"] == [{"reference": "b:v1", "reason": "not used for 2 days"}]
    assert value["blobs"] == 3
    assert names(stored) == ["a:v1"]


def test_max_size_removes_the_least_recently_used_name(stored: Any) -> None:
    done = stored("--json", "gc", "--grace", "0", "--max-size", total(stored) - 1)
    assert [one["reference"] for one in done.value["forgotten"]] == ["b:v1"]
    assert done.value["left"] == total(stored)
    assert done.err == ""


def test_an_unreachable_max_size_is_reported(stored: Any) -> None:
    stored("pin", "a:v1", "b:v1")
    done = stored("gc", "--grace", "0", "--max-size", "1KB")
    assert "3.61 kB kept, more than 1 kB: 3.61 kB needed by names that are pinned" in done.err
    assert names(stored) == ["a:v1", "b:v1"]


def test_kept_names_are_not_removed(stored: Any) -> None:
    stored("gc", "--grace", "0", "--max-age", "0", "--keep", "b:*", "--keep", "x*")
    assert names(stored) == ["b:v1"]


@pytest.mark.parametrize("wrong", [("--max-size", "lots"), ("--max-age", "7")])
def test_invalid_limits_are_refused(stored: Any, wrong: tuple[str, str]) -> None:
    assert "expected a value such as" in stored("gc", *wrong, code=2).err
    assert names(stored) == ["a:v1", "b:v1"]


@pytest.mark.parametrize("wishes", [(), ("--dry-run",)])
def test_a_damaged_manifest_stops_gc(stored: Any, wishes: tuple[str, ...]) -> None:
    stray = put(stored.layout, b"stray")
    path = stored.layout.find_path(stored.made["b:v1"].descriptor)
    unshare(path)
    path.write_bytes(path.read_bytes().replace(b"schemaVersion", b"SchemaVersion"))
    before = total(stored)
    err = stored("gc", "--grace", "0", *wishes, code=5).err
    assert "b:v1" in err
    assert "aimage verify --repair" in err
    assert total(stored) == before
    assert names(stored) == ["a:v1", "b:v1"]
    assert stored.layout.exists(stray)


def test_a_missing_manifest_stops_gc_until_it_is_untagged(stored: Any) -> None:
    stray = put(stored.layout, b"stray")
    stored.layout.find_path(stored.made["b:v1"].descriptor).unlink()
    err = stored("gc", "--grace", "0", code=5).err
    assert "the manifest of b:v1 is missing" in err
    assert "aimage rm b:v1" in err
    assert stored.layout.exists(stray)
    stored("rm", "b:v1")
    assert stored("--json", "gc", "--grace", "0").value["blobs"] == 3
    assert not stored.layout.exists(stray)
    assert stored.layout.exists(stored.made["a:v1"].layers[1])


def test_gc_without_a_store(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    assert here("gc").out == "removed: 0 blobs, 0 B\n"
    assert here("--json", "gc", "--max-size", "0", "--max-age", "0").value["left"] == 0
    assert here("pin").out.strip() == ""
    assert not here.store.exists()


def test_gc_of_an_empty_store(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    here.store.mkdir()
    assert here("--json", "gc", "--grace", "0").value["blobs"] == 0
    assert here("ls").code == 0


def test_pinned_names_are_not_removed(stored: Any) -> None:
    assert stored("pin", "b:v1").line == "b:v1"
    assert stored("--json", "pin").value == {"pinned": ["b:v1"]}
    stored("gc", "--grace", "0", "--max-age", "0")
    assert names(stored) == ["b:v1"]
    err = stored("rm", "b:v1", code=2).err
    assert "b:v1 is pinned" in err
    assert "aimage unpin b:v1" in err
    assert stored("unpin", "b:v1").line == "b:v1"
    assert stored("pin").out.strip() == ""
    stored("rm", "b:v1")
    assert names(stored) == []


def test_a_pin_protects_the_name_and_not_the_manifest(stored: Any) -> None:
    stored("pin", "a:v1")
    stored("tag", "b:v1", "a:v1")
    stored("gc", "--grace", "0", "--max-age", "0")
    assert names(stored) == ["a:v1"]
    found = stored("--json", "ls").value[0]["digest"]
    assert found == str(stored.made["b:v1"].digest)


def test_a_short_name_is_pinned_in_full(stored: Any) -> None:
    stored("tag", "a:v1", "a")
    assert stored("pin", "a").line == "a:latest"
    stored("rm", "a:latest", code=2)
    stored("unpin", "a:latest")


def test_pin_unpin_and_rm_are_atomic(stored: Any) -> None:
    stored("pin", "a:v1", "absent:v1", code=3)
    assert stored("pin").out.strip() == ""
    stored("pin", "a:v1")
    stored("unpin", "a:v1", "b:v1", code=3)
    stored("rm", "b:v1", "a:v1", code=2)
    assert names(stored) == ["a:v1", "b:v1"]
    assert stored("pin").line == "a:v1"


def test_a_pinned_name_dropped_by_another_tool_is_restored(stored: Any) -> None:
    stored("pin", "a:v1")
    path = stored.store / "index.json"
    path.write_text(json.dumps({"schemaVersion": 2, "manifests": []}))
    stored("gc", "--grace", "0", "--max-age", "0")
    assert names(stored) == ["a:v1"]


def test_tagging_counts_as_use_and_listing_does_not(stored: Any) -> None:
    """``tag`` updates the time of last use; ``ls`` does not."""
    stored("ls")
    stored("tag", "b:v1", "c:v1")
    stored("gc", "--grace", "0", "--max-age", "12h")
    assert names(stored) == ["b:v1", "c:v1"]
