"""``aimage verify`` detects, names and repairs damage."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage import verify
from clowder_aimage.cli.main import cli
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from tests.process import Aimage
from tests.store import copy_store, unshare

GONE = "127.0.0.1:1"  # an unused port


@pytest.fixture
def stored(aimage: Callable[..., Aimage], pushed_store: tuple[Path, str]) -> Any:
    """Return a store with an AImage under two names that its registry has too."""
    here: Any = aimage()
    store, here.name = pushed_store
    copy_store(store, here.store)
    here("tag", here.name, "mine", "-q")
    return here


def blobs(here: Any) -> list[Any]:
    manifest = json.loads((here.store / "blobs" / "sha256" / digest(here)).read_bytes())
    return [layer["digest"].removeprefix("sha256:") for layer in manifest["layers"]]


def digest(here: Any) -> Any:
    return here("--json", "show", here.name).value["digest"].removeprefix("sha256:")


def path_of(here: Any, encoded: str) -> Any:
    return here.store / "blobs" / "sha256" / encoded


def flip(path: Any) -> None:
    """Flip one bit, keeping the file's size and time."""
    times = path.stat()
    unshare(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    path.chmod(0o444)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def kinds(done: Any) -> list[Any]:
    return sorted((problem["kind"], problem["what"][:19]) for problem in done.value["problems"])


def test_an_intact_store_passes(stored: Any) -> None:
    done = stored("--json", "verify")
    assert done.value["problems"] == []
    assert done.value["blobs"] == len(set(blobs(stored))) + 2  # the config and the manifest
    assert "blobs intact" in stored("verify", "mine").line


def test_a_flipped_bit_is_reported(stored: Any) -> None:
    encoded = blobs(stored)[7]
    flip(path_of(stored, encoded))
    done = stored("--json", "verify", code=5)
    assert kinds(done) == [("damaged", f"sha256:{encoded[:12]}")]
    assert done.value["problems"][0]["names"] == [stored.name, "mine:latest"]


def test_only_the_named_aimages_are_verified(stored: Any, tiny: Path) -> None:
    stored("create", "other", tiny, "--whole-files", "--license", "mit")
    flip(path_of(stored, digest(stored)))  # its manifest differs from the other's
    stored("verify", "other")
    assert "damaged" in stored("verify", "mine", code=5).out


@pytest.mark.parametrize("what", ["layer", "config", "manifest"])
def test_repair_fetches_missing_blobs(stored: Any, what: str) -> None:
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


def test_repair_fetches_by_digest_when_the_tag_has_moved(stored: Any, tiny: Path) -> None:
    encoded = blobs(stored)[3]
    before = digest(stored)
    elsewhere = stored.home / "elsewhere"
    changed = ("--whole-files", "--license", "mit")
    stored("--store", elsewhere, "create", stored.name, tiny, *changed)
    stored("--store", elsewhere, "push", stored.name)
    flip(path_of(stored, encoded))
    assert "repaired" in stored("verify", "--repair").out
    assert digest(stored) == before
    stored("verify")


def test_a_blob_missing_in_every_registry_is_reported(stocked: Callable[[], Aimage]) -> None:
    here: Any = stocked()
    here.name = "x"
    path_of(here, blobs(here)[0]).unlink()
    done = here("verify", "--repair", code=5)
    assert "has no registry host" in done.out


def test_a_damaged_blob_that_nothing_needs_is_removed(stored: Any) -> None:
    stray = "ab" * 32
    path_of(stored, stray).write_bytes(b"something else")
    path_of(stored, stray).chmod(0o444)
    assert kinds(stored("--json", "verify", code=5)) == [("damaged", "sha256:" + "ab" * 6)]
    out = stored("verify", "--repair").out
    assert "removed" in out
    assert "repaired" not in out
    assert not path_of(stored, stray).exists()
    assert set_aside(stored.store) == []


# -- repairs that fail


def set_aside(store: Any) -> list[Any]:
    """Return damaged blobs that were moved away and not restored."""
    return list((store / ".aimage").glob("damaged.*"))


@pytest.mark.parametrize(
    ("name", "what"), [(f"{GONE}/team/x:v1", "layer"), ("x", "config"), ("x", "manifest")]
)
def test_a_damaged_blob_missing_in_every_registry_is_kept(
    name: str, what: str, aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here: Any = aimage()
    here("create", name, tiny, "--whole-files")
    here.name = name
    manifest = json.loads(path_of(here, digest(here)).read_bytes())
    encoded = {
        "layer": blobs(here)[5],
        "config": manifest["config"]["digest"].removeprefix("sha256:"),
        "manifest": digest(here),
    }[what]
    path = path_of(here, encoded)
    flip(path)
    before = path.read_bytes()
    done = here("--json", "verify", "--repair", code=5)
    assert ("damaged", f"sha256:{encoded[:12]}") in kinds(done)
    assert [p["mended"] for p in done.value["problems"] if p["kind"] == "damaged"] == [False]
    assert path.read_bytes() == before
    assert set_aside(here.store) == []


def test_repair_continues_after_a_blob_that_cannot_be_fetched(stored: Any, tiny: Path) -> None:
    """The registry lost one of two blobs."""
    other = f"{GONE}/team/other:v1"
    stored("create", other, tiny, "--whole-files", "--license", "mit")
    mine = json.loads(path_of(stored, digest(stored)).read_bytes())["config"]["digest"]
    theirs = stored("--json", "show", other).value["digest"].removeprefix("sha256:")
    encoded = mine.removeprefix("sha256:")
    for damaged in (encoded, theirs):
        flip(path_of(stored, damaged))
    before = path_of(stored, theirs).read_bytes()
    done = stored("--json", "verify", "--repair", code=5)
    assert {p["what"][7:]: p["mended"] for p in done.value["problems"]} == {
        encoded: True,
        theirs: False,
    }
    assert path_of(stored, theirs).read_bytes() == before
    assert kinds(stored("--json", "verify", code=5)) == [("damaged", f"sha256:{theirs[:12]}")]


def test_a_damaged_blob_is_restored_when_its_repair_fails(
    stocked: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    here: Any = stocked()
    here.name = "x"
    path = path_of(here, blobs(here)[5])
    flip(path)
    before = path.read_bytes()
    layout = ImageLayout(here.store)
    report = verify.verify(layout)

    def fetch(*_: Any) -> NoReturn:
        assert not path.exists()  # the damaged blob was moved away
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_fetch", fetch)
    with pytest.raises(KeyboardInterrupt):
        verify.repair(layout, report, ClientOptions(docker_config=here.home))
    assert path.read_bytes() == before
    assert set_aside(here.store) == []


@pytest.fixture
def refused(stocked: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a store with an intact blob that cannot be opened: ``refused(errno)``."""
    here: Any = stocked()
    here.name = "x"

    def refuse(code: Any, what: str = "layer") -> tuple[Any, Any]:
        path = path_of(here, blobs(here)[5] if what == "layer" else digest(here))
        real = os.open

        def opened(name: str | bytes | os.PathLike[Any], *arguments: Any, **options: Any) -> int:
            if str(name) == str(path):
                raise OSError(code, os.strerror(code))
            return real(name, *arguments, **options)

        monkeypatch.setattr(os, "open", opened)
        return here.store, path

    return refuse


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, "unreadable"),
        (errno.EIO, "damaged"),
    ],
    ids=["permission", "disk"],
)
def test_an_unreadable_blob_is_reported(code: int, kind: str, refused: Any) -> None:
    store, path = refused(code)
    (problem,) = verify.verify(ImageLayout(store)).problems
    assert (problem.kind, problem.what) == (kind, f"sha256:{path.name}")
    assert os.strerror(code) in problem.message


def test_an_unreadable_manifest_is_reported(refused: Any) -> None:
    store, path = refused(errno.EACCES, "manifest")
    problems = verify.verify(ImageLayout(store)).problems
    assert ("unreadable", f"sha256:{path.name}") in [(one.kind, one.what) for one in problems]


@pytest.mark.parametrize("repair", [[], ["--repair"]], ids=["look", "repair"])
def test_repair_leaves_a_blob_without_permission(
    repair: list[str], refused: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store, path = refused(errno.EACCES)
    before = path.stat()
    arguments = ["--store", str(store), "--json", "verify", *repair]
    assert cli.main(arguments, standalone_mode=False) == 5
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["kind"] == "unreadable"
    assert "mended" not in problem
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert set_aside(store) == []


def test_a_directory_in_place_of_a_blob_is_kept(stocked: Callable[[], Aimage]) -> None:
    here: Any = stocked()
    here.name = "x"
    path = path_of(here, blobs(here)[5])
    path.unlink()
    path.mkdir()
    (path / "file").touch()
    here("verify", code=5)
    here("verify", "--repair", code=5)
    assert (path / "file").exists()
    assert set_aside(here.store) == []


# -- other files


def test_a_file_that_is_not_a_blob_is_reported_and_kept(stored: Any) -> None:
    (stored.store / "blobs" / "sha256" / "README").write_text("hello")
    done = stored("verify")
    assert "README" in done.out
    stored("verify", "--repair")
    assert (stored.store / "blobs" / "sha256" / "README").exists()


def test_a_symlink_among_the_blobs_is_not_followed(stored: Any) -> None:
    secret = stored.home / "secret"
    secret.write_text("x")
    path_of(stored, "cd" * 32).symlink_to(secret)
    done = stored("--json", "verify")
    assert [problem["kind"] for problem in done.value["problems"]] == ["foreign"]


def test_verify_of_an_unknown_name_fails(stored: Any) -> None:
    stored("verify", "nothing", code=3)


def test_verify_of_an_empty_store(aimage: Callable[..., Aimage]) -> None:
    assert aimage()("--json", "verify").value == {"blobs": 0, "size": 0, "problems": []}


def test_writable_blobs_are_reported_and_made_read_only(stored: Any) -> None:
    path = path_of(stored, blobs(stored)[0])
    unshare(path)
    done = stored("--json", "verify")
    assert [problem["kind"] for problem in done.value["problems"]] == ["writable"]
    stored("verify", "--repair")
    assert path.stat().st_mode & 0o777 == 0o444
    assert stored("--json", "verify").value["problems"] == []


def test_a_partial_aimage_may_lack_blobs(stored: Any) -> None:
    layout = ImageLayout(stored.store)
    reference = Reference.parse(stored.name)
    layout.untag(Reference.parse("mine"))
    layout.tag(layout.resolve(reference), reference, is_partial=True)
    path_of(stored, blobs(stored)[0]).unlink()
    stored("verify")
    stored("tag", stored.name, "part")  # another name does not complete it
    stored("verify")
    layout.tag(layout.resolve(reference), Reference.parse("whole"))
    assert "missing" in stored("verify", code=5).out
