"""``aimage verify``: what is wrong is found, named, and mended where it can be."""

from __future__ import annotations

import json
import os

import pytest


@pytest.fixture
def stored(aimage, tiny, registry):
    """A store with an AImage that its registry has too, and one that only it has."""
    here = aimage()
    name = f"{registry.host}/verify/tiny:v1"
    here("create", name, tiny)
    here("push", name)
    here("tag", name, "mine")
    here.name = name
    return here


def blobs(here):
    manifest = json.loads((here.store / "blobs" / "sha256" / digest(here)).read_bytes())
    return [layer["digest"].removeprefix("sha256:") for layer in manifest["layers"]]


def digest(here):
    return here("--json", "show", here.name).value["digest"].removeprefix("sha256:")


def path_of(here, encoded):
    return here.store / "blobs" / "sha256" / encoded


def flip(path):
    """Change one bit, and nothing that a look at the file's size or time would tell."""
    times = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def kinds(done):
    return sorted((problem["kind"], problem["what"][:19]) for problem in done.value["problems"])


def test_an_intact_store(stored):
    done = stored("--json", "verify")
    assert done.value["problems"] == []
    assert done.value["blobs"] == len(set(blobs(stored))) + 2  # the config and the manifest
    assert "blobs intact" in stored("verify", "mine").line


def test_one_flipped_bit(stored):
    encoded = blobs(stored)[7]
    flip(path_of(stored, encoded))
    done = stored("--json", "verify", code=5)
    assert kinds(done) == [("damaged", f"sha256:{encoded[:12]}")]
    assert done.value["problems"][0]["names"] == [stored.name, "mine:latest"]


def test_only_what_is_asked_for_is_read(stored, tiny):
    stored("create", "other", tiny, "--license", "mit")
    flip(path_of(stored, digest(stored)))  # its manifest: the other one is another
    stored("verify", "other")
    assert "damaged" in stored("verify", "mine", code=5).out


@pytest.mark.parametrize("what", ["layer", "config", "manifest"])
def test_what_is_missing_is_fetched_again(stored, what):
    manifest = json.loads(path_of(stored, digest(stored)).read_bytes())
    encoded = {
        "layer": blobs(stored)[0],
        "config": manifest["config"]["digest"].removeprefix("sha256:"),
        "manifest": digest(stored),
    }[what]
    path_of(stored, encoded).unlink()
    assert kinds(stored("--json", "verify", code=5)) == [("missing", f"sha256:{encoded[:12]}")]
    done = stored("--json", "verify", "--repair")
    assert [problem["mended"] for problem in done.value["problems"]] == [True]
    assert stored("--json", "verify").value["problems"] == []


def test_what_is_damaged_is_fetched_again_whatever_its_tag_means_by_now(stored, tiny):
    encoded = blobs(stored)[3]
    before = digest(stored)
    elsewhere = stored.home / "elsewhere"
    stored("--store", elsewhere, "create", stored.name, tiny, "--license", "mit")
    stored("--store", elsewhere, "push", stored.name)
    flip(path_of(stored, encoded))
    assert "mended" in stored("verify", "--repair").out
    assert digest(stored) == before
    stored("verify")


def test_what_no_registry_has_stays_a_problem(aimage, tiny):
    here = aimage()
    here("create", "x", tiny)
    here.name = "x"
    path_of(here, blobs(here)[0]).unlink()
    done = here("verify", "--repair", code=5)
    assert "has no registry in its name" in done.out


def test_a_damaged_blob_that_nothing_needs_is_removed(stored):
    stray = "ab" * 32
    path_of(stored, stray).write_bytes(b"something else")
    assert kinds(stored("--json", "verify", code=5)) == [("damaged", "sha256:" + "ab" * 6)]
    stored("verify", "--repair")
    assert not path_of(stored, stray).exists()


def test_what_is_no_blob_is_noted_and_left(stored):
    (stored.store / "blobs" / "sha256" / "README").write_text("hello")
    done = stored("verify")
    assert "README" in done.out
    stored("verify", "--repair")
    assert (stored.store / "blobs" / "sha256" / "README").exists()


def test_a_link_among_the_blobs_is_not_followed(stored):
    secret = stored.home / "secret"
    secret.write_text("x")
    path_of(stored, "cd" * 32).symlink_to(secret)
    done = stored("--json", "verify")
    assert [problem["kind"] for problem in done.value["problems"]] == ["foreign"]


def test_an_unknown_name(stored):
    stored("verify", "nothing", code=3)


def test_an_empty_store(aimage):
    assert aimage()("--json", "verify").value == {"blobs": 0, "size": 0, "problems": []}
