"""The types of file systems, of which some have no locks between hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from clowder_aimage.content.mount import Mount, find_mount, parse_mounts

LINES = r"""
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:40 / /data rw - nfs4 server:/x rw,vers=4.2,local_lock=none
3 1 0:41 / /data/deep rw - tmpfs tmpfs rw
4 1 0:42 / /with\040space rw shared:1 - cifs //server/x rw,nobrl
5 1 0:43 / /twice rw - ext4 /dev/sdb rw
6 1 0:44 / /twice rw - fuse.sshfs host: rw,user_id=0
""".strip().splitlines()


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/", "ext4", "/"),
        ("/database", "ext4", "/"),
        ("/data", "nfs4", "/data"),
        ("/data/store", "nfs4", "/data"),
        ("/data/deep/store", "tmpfs", "/data/deep"),
        ("/with space/store", "cifs", "/with space"),
        ("/twice/store", "fuse.sshfs", "/twice"),
    ],
)
def test_the_nearest_mount_counts(path: str, kind: str, point: str) -> None:
    mount = parse_mounts(LINES, path)
    assert (mount.type, mount.point) == (kind, point)


@pytest.mark.parametrize(
    ("kind", "options", "is_network", "has_local_locks"),
    [
        ("ext4", "", False, False),
        ("tmpfs", "", False, False),
        ("overlay", "", False, False),
        ("fuseblk", "", False, False),
        ("fuse.mergerfs", "", False, False),
        ("nfs4", "local_lock=none", True, False),
        ("nfs", "nolock,local_lock=all", True, True),
        ("nfs", "local_lock=flock", True, True),
        ("cifs", "", True, False),
        ("smb3", "nobrl", True, True),
        ("9p", "", True, False),
        ("virtiofs", "", True, False),
        ("fuse.sshfs", "", True, True),
        ("fuse.rclone", "", True, True),
        ("fuse.s3fs", "", True, True),
        ("fuse.juicefs", "", True, False),
        ("fuse", "", True, False),
        ("", "", True, False),
    ],
)
def test_locks_between_hosts(
    kind: str, options: str, is_network: bool, has_local_locks: bool
) -> None:
    mount = Mount(kind, options=frozenset(options.split(",")))
    assert (mount.is_network, mount.has_local_locks) == (is_network, has_local_locks)


def test_a_directory_of_this_machine_has_a_type(tmp_path: Path) -> None:
    mount = find_mount(tmp_path / "not" / "yet")
    assert mount.type and tmp_path.is_relative_to(mount.point)
