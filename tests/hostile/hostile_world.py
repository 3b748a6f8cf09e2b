"""A store, a home and a command line in this process, with a record of all file accesses.

Verbs must not open, change or remove anything in ``outside``, whichever name leads
to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clowder_aimage.cli.main import run
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import mediatype
from tests.process import Done

SECRET = b"what nobody was to read"
_ROOT = Path(__file__).parents[2]
_ALWAYS = (  # Python's own files, the machine's settings
    str(_ROOT),
    sys.prefix,
    sys.base_prefix,
    os.path.realpath(sys.base_prefix),
    "/dev",
    "/etc/aimage",
    "/etc/containers",
    "/etc/docker",
    "/etc/ssl",
    "/usr/lib/ssl",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/proc",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {  # the arguments that are paths
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.listdir": 1,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.scandir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
}
_READS = {"os.listdir", "os.scandir"}
_FOLLOWS = {"os.chmod", "os.chown", "os.listdir", "os.scandir", "os.truncate", "os.utime"}


@dataclass(frozen=True)
class Touch:
    """An access to a file: the given path, the resolved path, and the operation."""

    event: str
    path: str
    place: str
    writes: bool


@dataclass
class _Eye:
    """A recorder of accesses while it is active. Audit hooks are permanent, so there is one."""

    touches: list[Touch] | None = None
    is_there: bool = False

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        touches = self.touches
        if touches is None:
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, str | bytes | os.PathLike):
                writes = bool(flags & _WRITES) or any(c in (mode or "") for c in "wax+")
                touches.append(_touch(event, path, not flags & os.O_NOFOLLOW, writes))
        elif event in _EVENTS:
            for path in arguments[: _EVENTS[event]]:
                if isinstance(path, str | bytes | os.PathLike):
                    follows = event in _FOLLOWS
                    touches.append(_touch(event, path, follows, event not in _READS))

    @contextlib.contextmanager
    def open(self) -> Iterator[list[Touch]]:
        if not self.is_there:
            sys.addaudithook(self.see)
            self.is_there = True
        found: list[Any]
        self.touches = found = []
        try:
            yield found
        finally:
            self.touches = None


def _touch(event: str, path: Any, follows: bool, writes: bool) -> Touch:
    text = os.fsdecode(path)
    head, name = os.path.split(text)
    place = os.path.realpath(text) if follows else f"{os.path.realpath(head)}/{name}"
    return Touch(event, text, place, writes)


EYE = _Eye()


@dataclass
class World:
    """The environment of a test."""

    home: Path
    store: Path
    outside: Path
    allowed: list[Path] = field(default_factory=list)
    capture: Any = None

    @property
    def layout(self) -> ImageLayout:
        return ImageLayout(self.store)

    def aimage(self, *arguments: object, code: int = 0) -> Done:
        """Run a verb in this process.

        It must exit with that code and a short message, and access no forbidden files.
        """
        texts = list(map(str, arguments))
        self.capture.readouterr()
        with self.watched():
            found = run(texts)
        out, err = self.capture.readouterr()
        assert found == code, f"{texts[0]} {found}: {out[:999]}\n{err[:999]}"
        assert len(err) < 4000, "nobody reads that much"
        return Done(found, out, err)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Check that all accesses inside are to the store and the home."""
        before = snapshot(self.outside)
        with EYE.open() as touches:
            yield
        wrong = [touch for touch in touches if not self._may(touch)]
        assert not wrong, wrong
        assert snapshot(self.outside) == before

    def _may(self, touch: Touch) -> bool:
        if "/__pycache__/" in touch.place and _is_below(touch.place, _ALWAYS[:4]):
            return True  # compiled at its first import
        if any(ord(c) < 32 for c in touch.path) or ".." in Path(touch.path).parts:
            return False
        own = [os.path.realpath(place) for place in (self.home, self.store, *self.allowed)]
        if os.path.commonpath([touch.place, os.path.realpath(self.outside)]) == str(
            self.outside.resolve()
        ):
            return False
        places = own if touch.writes else [*own, *_ALWAYS, *filter(None, sys.path)]
        return _is_below(touch.place, places) or touch.place == str(Path(own[1]).parent)


def _is_below(path: str, places: list[str] | tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


def snapshot(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Return everything below a directory: types, modification times and contents."""
    found = {}
    for path in sorted([directory, *directory.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        facts = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
        found[str(path)] = facts if path != directory else facts[:2]
    return found


# -- planted files


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def described(data: bytes, media_type: str = "application/vnd.example.blob") -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def plant(store: Path, data: bytes) -> Path:
    """Write a blob to the path of its digest, as any tool would."""
    path = store / "blobs" / "sha256" / hashlib.sha256(data).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(data)
        path.chmod(0o444)
    return path


def entry(data: bytes, name: str, media_type: str = mediatype.OCI_MANIFEST) -> dict[str, Any]:
    """Return an entry of index.json."""
    return {**described(data, media_type), "annotations": {mediatype.REF_NAME: name}}


def write_index(store: Path, *entries: Any) -> None:
    store.mkdir(parents=True, exist_ok=True)
    (store / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}')
    value = {"schemaVersion": 2, "manifests": list(entries)}
    (store / "index.json").write_bytes(json.dumps(value).encode())
