"""Every verb on file systems that are mounted, as far as the machine of the tests can do that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout
from tests.file_system.session import run
from tests.importer.conftest import Model
from tests.process import run as run_program
from tests.process import spawn
from tests.registry_app import RegistryThread
from tests.wait import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
]
SIZE = 64 * 1024 * 1024
# A type of file system, and the limits that df names
KINDS = {
    "tmpfs": set[str](),
    "overlay": set[str](),
    "ext4": set[str](),
    "xfs": set[str](),
    "btrfs": set[str](),
    "vfat": {"modes"},
}


@pytest.fixture
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a new file system of the type that is the parameter."""
    kind, place = request.param, tmp_path / "mounted"
    place.mkdir()
    command = ["mount", "-t", kind, *build_source(kind, tmp_path), place]
    try:
        run_program(command, check=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot mount {kind}: {error.stderr.decode().strip()}")
    yield place
    run_program(["umount", "--lazy", place], check=True)


def build_source(kind: str, directory: Path) -> list[object]:
    """Return the arguments of mount for a new file system; skip without a program to make it."""
    if kind == "tmpfs":
        return ["-o", f"size={SIZE}", "tmpfs"]
    if kind == "overlay":
        names = ("lower", "upper", "work")
        # The directories of an overlay may not be on another overlay
        for name in names:
            (directory / name).mkdir()
        paths = ",".join(f"{name}dir={directory / name}" for name in names)
        return ["-o", paths, "overlay"]
    program = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip(f"requires mkfs.{kind}")
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(8 * SIZE)
    run_program([program, image], check=True)
    return ["-o", "loop", image]


def run_verbs(mounted: Path, tmp_path: Path) -> dict[str, str]:
    """Return what the verbs print on the file system; none of them fails."""
    model = Model(tmp_path / "model", tmp_path).fill().directory
    served = RegistryThread(ImageLayout(tmp_path / "registry"))
    order = {"home": str(mounted), "host": served.host, "model": str(model)}
    results = run(order, AIMAGE_STORE_SINGLE_WRITER="true")
    assert [result for result in results if result[1]] == []
    return {str(line): str(out) for line, _, out, _ in results}


@pytest.mark.parametrize(("mounted", "limits"), KINDS.items(), ids=KINDS, indirect=["mounted"])
def test_all_verbs_work_on_a_mounted_file_system(
    mounted: Path, limits: set[str], tmp_path: Path
) -> None:
    facts = json.loads(run_verbs(mounted, tmp_path)["df --json"])[0]["fileSystem"]
    assert set(facts["limits"]) == limits
    assert not facts["network"]


@pytest.fixture
def fuse(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a directory that the program of the parameter shows by FUSE."""
    name, arguments = request.param
    program, place = shutil.which(name), tmp_path / "mounted"
    if program is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip(f"requires {name} and FUSE")
    (tmp_path / "shown").mkdir()
    place.mkdir()
    words = arguments.format(tmp_path / "shown", place).split(" ")
    child = spawn([program, *words])
    try:
        until(lambda: place.is_mount() or child.poll() is not None)
        if child.poll() is not None:
            pytest.skip(f"{name} cannot mount")
        yield place
    finally:
        run_program(["umount", "--lazy", place])


@pytest.mark.parametrize(
    ("fuse", "limits"),
    [
        pytest.param(("bindfs", "-f {} {}"), set[str](), id="bindfs"),
        pytest.param(
            ("rclone", "mount --config /dev/null --vfs-cache-mode writes {} {}"),
            {"hostLocks"},
            id="rclone",
        ),
    ],
    indirect=["fuse"],
)
def test_all_verbs_work_on_fuse(fuse: Path, limits: set[str], tmp_path: Path) -> None:
    facts = json.loads(run_verbs(fuse, tmp_path)["df --json"])[0]["fileSystem"]
    assert set(facts["limits"]) == limits
    assert facts["network"]
