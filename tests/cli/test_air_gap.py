"""Archives for a store without a network: only what it lacks, in volumes of a limited size."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage import save
from clowder_aimage.content.tar import build_tar_header
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Digest
from clowder_aimage.save import read_known
from tests.abridged import abridge
from tests.process import Aimage


@pytest.fixture
def here(aimage: Callable[..., Aimage], tiny: Path, tmp_path: Path) -> Aimage:
    """Return a store with two models that differ in one file."""
    here = aimage()
    first = abridge(tiny, tmp_path / "first")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    # Random bytes, so that each volume has its own
    (second / "tokenizer" / "vocabulary.txt").write_bytes(bytes(range(256)) * 12_000)
    here("create", "one", first, "-q")
    here("create", "two", second, "-q")
    return here


@pytest.fixture
def there(aimage: Callable[..., Aimage]) -> Aimage:
    return aimage("there")


def read_digest(store: Aimage, name: str) -> str:
    return str(store("show", name, "--json").value["digest"])


def test_an_archive_since_another_has_only_what_the_receiver_lacks(
    here: Aimage, there: Aimage
) -> None:
    here("save", "one", "-o", "one.tar", "-q")
    done = here("save", "two", "-o", "two.tar", "--since", "one.tar")
    assert "left out: " in done.err
    here("save", "two", "-o", "whole.tar", "-q")
    sizes = {name: (here.home / f"{name}.tar").stat().st_size for name in ("one", "two", "whole")}
    assert sizes["whole"] - sizes["two"] > sizes["one"] / 2
    failed = there("load", "two.tar", code=5)
    assert "two:latest is missing sha256:" in failed.err
    there("load", "one.tar", "-q")
    there("load", "two.tar", "-q")
    assert read_digest(there, "two") == read_digest(here, "two")
    there("verify", "-q")


def test_a_list_of_digests_is_as_good_as_an_archive(here: Aimage, there: Aimage) -> None:
    here("save", "one", "-o", "one.tar", "-q")
    there("load", "one.tar", "-q")
    names = "\n".join(path.name for path in (there.store / "blobs" / "sha256").iterdir())
    (here.home / "list").write_text(names)
    here("save", "two", "-o", "by-list.tar", "--since", "list", "-q")
    here("save", "two", "-o", "by-tar.tar", "--since", "one.tar", "-q")
    assert (here.home / "by-list.tar").read_bytes() == (here.home / "by-tar.tar").read_bytes()
    (here.home / "list").write_text(json.dumps({"blobs": names.split()}))
    here("save", "two", "-o", "by-json.tar", "--since", "list", "-q")
    assert (here.home / "by-json.tar").read_bytes() == (here.home / "by-tar.tar").read_bytes()


def test_a_list_comes_from_a_pipe_and_an_archive_does_not(tmp_path: Path) -> None:
    digest = Digest.of(b"one")
    assert read_known(pipe(tmp_path / "list", f"{digest}\n".encode())) == {digest}
    with pytest.raises(UsageError, match="is an archive in a pipe"):
        read_known(pipe(tmp_path / "tar", build_tar_header("blobs/sha256/" + "0" * 64, size=0)))


def pipe(path: Path, data: bytes) -> Path:
    """Make a named pipe that a thread writes to once."""
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(data,)).start()
    return path


def test_a_list_has_digests_of_both_algorithms(tmp_path: Path) -> None:
    known = {Digest.of(b"one"), Digest.of(b"two", "sha512")}
    path = tmp_path / "list"
    for texts in (map(str, known), (digest.encoded for digest in known)):
        path.write_text("\n".join(texts))
        assert read_known(path) == known


@pytest.mark.parametrize("content", [b"", b"no digest here", b"sha256:" + b"0" * 63])
def test_a_list_without_digests_is_refused(here: Aimage, content: bytes) -> None:
    (here.home / "list").write_bytes(content)
    failed = here("save", "one", "-o", "one.tar", "--since", "list", code=5)
    assert "has no digests" in failed.err
    assert not (here.home / "one.tar").exists()


@pytest.fixture
def volumes(here: Aimage) -> list[Path]:
    """Return the volumes of ``big.tar``, of one megabyte each but the last."""
    done = here("save", "one", "two", "-o", "big.tar", "--volume", "1MB", "-q")
    assert done.line == "big.tar.list"
    found = sorted(here.home.glob("big.tar.0*"))
    assert [path.stat().st_size for path in found[:-1]] == [1_000_000] * (len(found) - 1)
    assert len(found) >= 4
    return found


def test_volumes_are_the_archive(here: Aimage, there: Aimage, volumes: list[Path]) -> None:
    here("save", "one", "two", "-o", "whole.tar", "-q")
    joined = b"".join(path.read_bytes() for path in volumes)
    assert joined == (here.home / "whole.tar").read_bytes()
    there("load", "big.tar.list", "-q")
    for name in ("one", "two"):
        assert read_digest(there, name) == read_digest(here, name)
    there("verify", "-q")


def test_an_archive_since_volumes(here: Aimage, volumes: list[Path]) -> None:
    assert volumes
    done = here("save", "two", "-o", "two.tar", "--since", "big.tar.list")
    assert "left out: " in done.err
    assert (here.home / "two.tar").stat().st_size < 200_000


def lose(paths: list[Path], listed: Any) -> None:
    paths[1].unlink()


def repeat(paths: list[Path], listed: Any) -> None:
    shutil.copy(paths[0], paths[1])


def reorder(paths: list[Path], listed: Any) -> None:
    first = paths[0].read_bytes()
    shutil.copy(paths[1], paths[0])
    paths[1].write_bytes(first)


def damage(paths: list[Path], listed: Any) -> None:
    data = bytearray(paths[2].read_bytes())
    data[1000] ^= 1
    paths[2].write_bytes(data)


def truncate(paths: list[Path], listed: Any) -> None:
    paths[-1].write_bytes(paths[-1].read_bytes()[:-1])


def wait(paths: list[Path], listed: Any) -> None:
    paths[1].unlink()
    os.mkfifo(paths[1])


def list_twice(paths: list[Path], listed: Any) -> None:
    listed["volumes"].append(listed["volumes"][0])


def lead_away(paths: list[Path], listed: Any) -> None:
    listed["volumes"][0]["name"] = f"../{paths[0].parent.name}/{paths[0].name}"


def list_none(paths: list[Path], listed: Any) -> None:
    listed["volumes"] = []


def be_another_document(paths: list[Path], listed: Any) -> None:
    listed["mediaType"] = "application/json"


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (lose, 3, "big.tar.002 is missing, which big.tar.list lists"),
        (repeat, 5, "big.tar.002 is not the one that big.tar.list lists"),
        (reorder, 5, "big.tar.001 is not the one that big.tar.list lists"),
        (damage, 5, "big.tar.003 is not the one that big.tar.list lists"),
        (truncate, 5, "bytes, and big.tar.list lists"),
        (wait, 1, "big.tar.002 is not a regular file"),
        (list_twice, 5, "lists the volume big.tar.001 twice"),
        (lead_away, 5, "lists a volume with the name '../"),
        (list_none, 5, "must list 1 to"),
        (be_another_document, 5, "big.tar.list is not a tar archive"),
    ],
)
def test_wrong_volumes_load_nothing(
    here: Aimage,
    there: Aimage,
    volumes: list[Path],
    change: Callable[[list[Path], Any], None],
    code: int,
    reason: str,
) -> None:
    path = here.home / "big.tar.list"
    listed = json.loads(path.read_text())
    change(volumes, listed)
    path.write_text(json.dumps(listed))
    assert reason in there("load", "big.tar.list", code=code).err
    assert not (there.store / "blobs").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--volume", "4G"), "--volume requires a file"),
        (("--volume", "10k", "-o", "x"), "at least 1000000 bytes"),
        (("--volume", "much", "-o", "x"), "invalid size"),
        (("--volume", "1M", "-o", "/dev/null"), "volumes are files, and /dev/null is not one"),
    ],
)
def test_sizes_of_volumes_that_are_refused(
    here: Aimage, options: tuple[str, ...], reason: str
) -> None:
    assert reason in here("save", "one", *options, code=2).err


def test_too_many_volumes_are_refused(here: Aimage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "MAX_WRITTEN", 2)
    err = here("save", "one", "two", "-o", "big.tar", "--volume", "1MB", code=2).err
    assert "volumes, over 2" in err
    assert not [*here.home.glob("*big.tar*")]
    size = re.search(r"at least (\d+) bytes", err)
    assert size is not None
    here("save", "one", "two", "-o", "big.tar", "--volume", size[1], "-q")
    assert len([*here.home.glob("big.tar.0*")]) == 2


def test_volumes_of_an_earlier_save(here: Aimage, there: Aimage, volumes: list[Path]) -> None:
    """Temporary files of a killed one are removed; more volumes of another one are named."""
    (here.home / f".big.tar.001.{'0' * 16}").write_bytes(b"killed")
    done = here("save", "one", "two", "-o", "big.tar", "--volume", "2MB")
    assert not [*here.home.glob(".big.tar*")]
    count = len(json.loads((here.home / "big.tar.list").read_text())["volumes"])
    assert count < len(volumes)
    assert f"big.tar.{count + 1:03} is of an earlier archive, and not of this one" in done.err
    there("load", "big.tar.list", "-q")
    volumes[count].unlink()
    again = here("save", "one", "two", "-o", "big.tar", "--volume", "2MB")
    assert "earlier" not in again.err


def test_a_failed_save_leaves_no_volume(here: Aimage) -> None:
    blob = max((here.store / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.chmod(0o644)
    blob.write_bytes(bytes(blob.stat().st_size))
    here("save", "two", "-o", "big.tar", "--volume", "1MB", code=5)
    assert [path.name for path in here.home.iterdir() if "big.tar" in path.name] == []
