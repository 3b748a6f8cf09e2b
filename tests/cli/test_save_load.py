"""``aimage save`` and ``aimage load``, also with archives of skopeo."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference, mediatype
from tests.content import artifact
from tests.process import PROGRAM, Aimage, run, spawn
from tests.store import unshare


@pytest.fixture
def here(aimage: Callable[[], Aimage], tiny: Path) -> Any:
    here: Any = aimage()
    here.digest = here("create", "tiny", tiny, "--whole-files").line
    return here


def leftovers(directory: Any) -> list[Any]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_save_and_load_round_trip(here: Any, aimage: Callable[..., Aimage]) -> None:
    here("tag", "tiny", "localhost:5000/team/tiny:v1")
    done = here("save", "tiny", "localhost:5000/team/tiny:v1", "-o", "out.tar")
    assert done.line == "out.tar"
    assert "saved 13 blobs" in done.err
    there = aimage("there")
    done = there("load", "out.tar")
    assert done.out.splitlines() == [
        f"localhost:5000/team/tiny:v1 {here.digest}",
        f"tiny:latest {here.digest}",
    ]
    assert "loaded 13 blobs" in done.err
    assert "loaded 0 blobs, 13 already there" in there("load", "out.tar").err
    assert there("show", "tiny", "--json").value == here("show", "tiny", "--json").value
    assert there("--json", "verify").value["problems"] == []


def test_save_and_load_json_output(here: Any, aimage: Callable[..., Aimage]) -> None:
    done = here("save", "tiny", "-o", "out.tar", "--json")
    data = (here.home / "out.tar").read_bytes()
    manifest = {"reference": "tiny:latest", "mediaType": mediatype.OCI_MANIFEST}
    manifest |= {"digest": here.digest, "size": done.value["references"][0]["size"]}
    assert done.value == {
        "file": "out.tar",
        "size": len(data),
        "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
        "references": [manifest],
    }
    events = [json.loads(line) for line in done.err.splitlines()]
    assert events[0]["event"] == "plan"
    assert events[0]["digest"] == here.digest
    assert events[-1]["event"] == "summary"
    assert aimage("there")("load", "out.tar", "--json").value == [manifest]


def test_save_and_load_quiet(here: Any, aimage: Callable[..., Aimage]) -> None:
    assert here("save", "tiny", "-o", "out.tar", "-q").err == ""
    assert aimage("there")("load", "out.tar", "-q").err == ""


def test_save_pipes_into_load(here: Any, aimage: Callable[..., Aimage]) -> None:
    there = aimage("there")
    save, load = (" ".join(PROGRAM) + f" {verb}" for verb in ("save tiny", "load"))
    shell = f"{save} | tee x.tar | gzip | AIMAGE_STORE={there.store} {load} --json"
    done = run(
        ["bash", "-o", "pipefail", "-c", shell],
        cwd=here.home,
        env=here.env(),
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["digest"] == here.digest
    assert "saved 13 blobs" in done.stderr
    here("save", "tiny", "-o", "y.tar")
    assert (here.home / "x.tar").read_bytes() == (here.home / "y.tar").read_bytes()


def test_save_writes_only_the_archive_to_stdout(here: Any) -> None:
    command = [*PROGRAM, "save", "tiny", "-o", "-", "--json"]
    done = run(command, env=here.env(), timeout=120)
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["event"], last["size"]) == ("saved", len(done.stdout))
    assert last["digest"] == f"sha256:{hashlib.sha256(done.stdout).hexdigest()}"


def test_a_closed_pipe_fails_a_save(here: Any) -> None:
    shell = f"{' '.join(PROGRAM)} save tiny -o - | head -c 1000 | wc -c; exit ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", shell], env=here.env(), text=True)
    assert (done.returncode, done.stdout.strip()) == (1, "1000")
    assert "the reader closed the pipe" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("save", "tiny"), ("load",), ("load", "-i", "-")], ids=" ".join
)
def test_save_to_a_terminal_is_refused(here: Any, arguments: tuple[str, ...]) -> None:
    leader, follower = pty.openpty()
    try:
        done = run(
            [*PROGRAM, *arguments],
            stdin=follower,
            stdout=follower,
            text=True,
            env=here.env(),
            timeout=60,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 2
    assert "an archive" in done.stderr


def test_load_reads_its_input_option_and_stdin(here: Any, aimage: Callable[..., Aimage]) -> None:
    here("save", "tiny", "-o", "out.tar")
    there = aimage(here.home)
    there.store = here.home / "elsewhere"
    assert there("load", "-i", "out.tar").out.startswith("tiny:latest sha256:")
    err = there("load", "x.tar", "-i", "out.tar", code=2).err
    assert "--input out.tar cannot be combined with the argument x.tar" in err
    assert "stdin is not a tar archive" in there("load", code=5, stdin="no archive").err


def test_usage_errors_of_save_and_load(here: Any) -> None:
    assert "see: aimage" in here("save", "-o", "x.tar", code=2).err
    assert "is a directory" in here("save", "tiny", "-o", ".", code=2).err
    assert "a tag is needed" in here("load", "x", "--as", f"x@{here.digest}", code=2).err
    assert "nothing:latest" in here("save", "nothing", "-o", "x.tar", code=3).err
    assert "archive not found: x.tar" in here("load", "x.tar", code=3).err
    assert not (here.home / "x.tar").exists()


def test_a_damaged_store_writes_no_archive(here: Any) -> None:
    path = max((here.store / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    unshare(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (here.home / "x.tar").write_text("old")
    assert path.name in here("save", "tiny", "-o", "x.tar", code=5).err
    assert (here.home / "x.tar").read_text() == "old"


def test_a_damaged_archive_tags_nothing(here: Any, aimage: Callable[..., Aimage]) -> None:
    here("save", "tiny", "-o", "x.tar")
    file = here.home / "x.tar"
    data = bytearray(file.read_bytes())
    data[-1500] ^= 1  # in the last blob: before the end marker and the padding
    file.write_bytes(data)
    there = aimage("there")
    assert "is damaged" in there("load", "x.tar", code=5).err
    assert there("ls", "--json").value == []
    assert there("--json", "verify").value["problems"] == []
    file.write_bytes(data[:-100_000])
    assert "x.tar" in there("load", "x.tar", code=5).err


def test_intact_names_are_printed_before_the_error(
    here: Any, aimage: Callable[..., Aimage]
) -> None:
    layout = ImageLayout(here.store)
    away = artifact.manifest(artifact.blob(b"{}"), [artifact.blob(b"away")])
    layout.push(away.descriptor, build_bytes_body(away.raw), Reference.parse("half"))
    assert "not found in the store" in here("save", "half", "tiny", "-o", "x.tar", code=3).err
    run(["tar", "-cf", "x.tar", "-C", here.store, "."], cwd=here.home, check=True)
    done = aimage("there")("load", "x.tar", code=5)
    assert done.line == f"tiny:latest {here.digest}"
    assert "half:latest is missing sha256:" in done.err


def test_save_of_an_index_reports_omitted_manifests(
    here: Any, aimage: Callable[..., Aimage]
) -> None:
    layout = ImageLayout(here.store)
    away = artifact.manifest(artifact.blob(b"{}"), [])
    both = artifact.index([layout.resolve(Reference.parse("tiny")), away.descriptor])
    layout.push(both.descriptor, build_bytes_body(both.raw), Reference.parse("all"))
    done = here("save", "all", "-o", "x.tar")
    assert f"left out: 1 manifest of an index that is not in the store: {away.digest}" in done.err
    assert aimage("there")("load", "x.tar").line == f"all:latest {both.digest}"


def small_disk(place: Any) -> None:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if run(mount).returncode:
        pytest.skip("no small disk can be mounted here")


def test_save_on_a_full_disk_fails(here: Any, aimage: Callable[..., Aimage]) -> None:
    small = here.home / "small"
    small_disk(small)
    try:
        done = here("save", "tiny", "-o", small / "x.tar", code=6)
        assert "archive requires" in done.err
        shell = f"{' '.join(PROGRAM)} save tiny -o - > {small}/y.tar"
        full = run(["bash", "-c", shell], env=here.env(), text=True)
        assert full.returncode == 6
        assert "no space left" in full.stderr
        (small / "y.tar").unlink()
        assert list(small.iterdir()) == []
        here("save", "tiny", "-o", "x.tar")
        there = aimage("small/store")
        there("load", "x.tar", code=6)
        assert there("ls", "--json").value == []
    finally:
        run(["umount", str(small)], check=True)


def test_ctrl_c_during_a_save_leaves_no_file(here: Any) -> None:
    """A pipe without a reader keeps the archive incomplete."""
    read_end, write_end = os.pipe()
    layout = ImageLayout(here.store)
    artifact.put_artifact(layout, "large", os.urandom(4_000_000))
    process = spawn(
        [*PROGRAM, "save", "large", "-o", "-"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env=here.env(),
    )
    os.close(write_end)
    assert os.read(read_end, 1)  # the save has started
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    os.close(read_end)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.integration
def test_ctrl_c_during_a_load_leaves_no_name(here: Any, aimage: Callable[..., Aimage]) -> None:
    """The pipe stalls: no partial blob remains, and nothing is tagged."""
    artifact.put_artifact(ImageLayout(here.store), "large", b"1" * 9_000_000)
    here("save", "large", "-o", "x.tar")
    there = aimage("there")
    process = spawn(
        [*PROGRAM, "load", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=there.env()
    )
    assert process.stdin is not None
    process.stdin.write((here.home / "x.tar").read_bytes()[:5_000_000])
    process.stdin.flush()  # everything except the pipe's buffer was read
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert there("ls", "--json").value == []
    assert list((there.store / ".aimage" / "ingest").iterdir()) == []
    assert there("load", "x.tar").line.startswith("large:latest ")


@pytest.mark.integration
def test_skopeo_reads_a_saved_archive(here: Any, skopeo: str, tiny: Path) -> None:
    digest = here("create", "few", tiny, "--whole-files", "-q").line  # skopeo is slow with many
    here("tag", "few", "localhost:5000/team/few:v1")
    here("save", "few", "localhost:5000/team/few:v1", "-o", "x.tar")
    for name in ("few:latest", "localhost:5000/team/few:v1"):
        done = run(
            [skopeo, "inspect", "--raw", f"oci-archive:x.tar:{name}"],
            cwd=here.home,
            check=True,
        )
        assert f"sha256:{hashlib.sha256(done.stdout).hexdigest()}" == digest
    run(
        [skopeo, "copy", "-q", "oci-archive:x.tar:few:latest", "oci:copied:v2"],
        cwd=here.home,
        check=True,
    )
    index = json.loads((here.home / "copied" / "index.json").read_text())
    assert index["manifests"][0]["digest"] == digest


@pytest.mark.integration
def test_load_reads_an_archive_of_skopeo(
    here: Any, aimage: Callable[..., Aimage], skopeo: str, tiny: Path
) -> None:
    digest = here("create", "few", tiny, "--whole-files", "-q").line  # skopeo is slow with many
    for name in (":named:v1", ":v1", ""):
        (here.home / "x.tar").unlink(missing_ok=True)
        source, target = f"oci:{here.store}:few:latest", f"oci-archive:x.tar{name}"
        run([skopeo, "copy", "-q", source, target], cwd=here.home, check=True)
        there = aimage(f"there{name}")
        if name:
            wanted = "v1:latest" if name == ":v1" else "named:v1"
            assert there("load", "x.tar").line == f"{wanted} {digest}"
            continue
        done = there("load", "x.tar", code=2)
        assert "set a name: aimage load FILE --as NAME" in done.err
        assert there("load", "x.tar", "--as", "mine").line == f"mine:latest {digest}"


@pytest.mark.integration
def test_load_decompresses_layers_of_skopeo(
    here: Any, aimage: Callable[..., Aimage], skopeo: str, tiny: Path
) -> None:
    """As after a pull: an AImage in the container dialect can be run and pushed."""
    here("create", "boxed", tiny, "--whole-files", "--dialect", "container")
    here("create", "few", tiny, "--whole-files")
    source = f"oci:{here.store}:boxed:latest"
    command = [skopeo, "copy", "-q", "--dest-compress", source, "oci-archive:x.tar:boxed:v1"]
    run(command, cwd=here.home, check=True)
    there = aimage("there")
    there("load", "x.tar")
    wanted = here("show", "few", "--json").value["layers"]
    assert there("show", "boxed:v1", "--json").value["layers"] == wanted
    for layer in wanted:
        assert (there.store / "blobs" / "sha256" / layer["digest"][7:]).exists()


def test_a_partial_aimage_is_not_saved(aimage: Callable[..., Aimage], pushed: str) -> None:
    there = aimage("there")
    there("pull", pushed, "--component", "vae")
    done = there("save", pushed, "-o", "out.tar", code=3)
    assert "is incomplete in the store: missing scheduler (1 layer), text_encoder" in done.err
    assert f"aimage pull {pushed}" in done.err
    assert not (there.home / "out.tar").exists()
