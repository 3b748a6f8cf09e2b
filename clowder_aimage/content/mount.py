"""Find the type of a file system: other hosts may write to a network type (proc(5))."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

from clowder_aimage.content.file_system import find_existing

_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
# Served by another machine, or a disk that several machines share.
_NETWORK = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs efs exafs fhgfs gfs gfs2 glusterfs gpfs iscsi "
    "lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 quobyte smb smb3 smbfs virtiofs vmhgfs "
    "weka wekafs".split()
)
# FUSE over a local directory or disk.
_LOCAL_FUSE = frozenset(
    "fuse.bindfs fuse.cryfs fuse.dwarfs fuse.encfs fuse.exfat fuse.ext2 fuse.fuse-overlayfs "
    "fuse.gocryptfs fuse.lxcfs fuse.mergerfs fuse.ntfs fuse.ntfs-3g fuse.portal "
    "fuse.unionfs-fuse fuse.zfs-fuse".split()
)
# FUSE whose locks the kernel keeps on this host.
_LOCAL_LOCKS = frozenset(
    "fuse.blobfuse fuse.blobfuse2 fuse.curlftpfs fuse.gcsfuse fuse.geesefs fuse.goofys "
    "fuse.mountpoint-s3 fuse.rclone fuse.s3fs fuse.smbnetfs fuse.sshfs".split()
)
# NFS without a lock manager, and SMB without locks of byte ranges.
_LOCAL_OPTIONS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "nobrl"})


class Mount(NamedTuple):
    """A mounted file system: its type, as in ``mount -t``, its directory and its options."""

    type: str
    point: str = "/"
    options: frozenset[str] = frozenset()

    @property
    def is_network(self) -> bool:
        """Return True if other hosts may write to it; also for an unknown type."""
        is_fuse = self.type == "fuse" or self.type.startswith("fuse.")
        is_remote_fuse = is_fuse and self.type not in _LOCAL_FUSE
        return is_remote_fuse or self.type in _NETWORK or not self.type

    @property
    def has_local_locks(self) -> bool:
        """Return True if locks are taken, but other hosts do not see them."""
        return self.type in _LOCAL_LOCKS or bool(self.options & _LOCAL_OPTIONS)


def find_mount(path: Path) -> Mount:
    """Return the mount of an existing path or of its first existing parent."""
    existing = find_existing(path)
    return _find(os.path.realpath(existing), existing.stat().st_dev)


@functools.lru_cache(maxsize=64)
def _find(path: str, device: int) -> Mount:  # noqa: ARG001 - another one may be mounted there
    try:
        lines = _MOUNTS.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return Mount("")
    return parse_mounts(lines, path)


def parse_mounts(lines: list[str], path: str) -> Mount:
    """Return the mount of a path without links, as the lines of mountinfo have it."""
    longest, mount = -1, Mount("")
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, last = left.split(" "), right.split(" ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # A later mount of the same place covers an earlier one.
        if len(point) >= longest and _is_below(path, point):
            longest = len(point)
            mount = Mount(last[0], point, frozenset(f"{fields[5]},{last[-1]}".split(",")))
    return mount


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
