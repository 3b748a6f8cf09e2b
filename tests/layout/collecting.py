"""Collections in tests, and what they leave."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout, gc, lock
from clowder_aimage.layout.gc import STALE, Collector
from clowder_aimage.oci import Descriptor, Manifest, mediatype
from tests.content.artifact import CONFIG, put

DAY = 86400.0


def collected(
    store: ImageLayout,
    *,
    grace: float = 0.0,
    dry_run: Any = False,
    stale: float = STALE,
    later: float = 0.0,
    **wishes: Any,
) -> gc.Collection:
    """Collect as if ``later`` seconds had passed."""
    collector = Collector(
        store, grace=grace, dry_run=dry_run, stale=stale, clock=lambda: time.time() + later
    )
    return collector.run(**wishes)


def blobs(store: ImageLayout) -> set[Any]:
    """Return the names of all files among the blobs."""
    return {path.name for path in (store.root / "blobs").rglob("*") if not path.is_dir()}


def names(store: ImageLayout) -> set[Any]:
    return {name for name, _ in store.list_tags()}


def encoded(*contents: Descriptor) -> set[Any]:
    return {content.digest.encoded for content in contents}


def all_of(made: Manifest) -> Any:
    """Return the digests of an artifact's parts."""
    return encoded(made.descriptor, *made.children)


def add_entry(store: ImageLayout, descriptor: Descriptor, name: str = "", **fields: Any) -> None:
    """List a manifest in index.json only, as another tool does."""
    path = store.root / "index.json"
    value: dict[str, Any] = {"schemaVersion": 2, "manifests": []}
    if path.exists():
        value = json.loads(path.read_bytes())
    entry = descriptor.to_json() | fields
    if name:
        entry["annotations"] = entry.get("annotations", {}) | {mediatype.REF_NAME: name}
    value["manifests"].append(entry)
    store.root.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def put_raw(store: ImageLayout, value: Any, media_type: str = mediatype.OCI_MANIFEST) -> Descriptor:
    """Push a document as written by another tool."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return put(store, raw, media_type)


def foreign(
    store: ImageLayout, layers: list[Any], config: Descriptor | None = None, **fields: Any
) -> Descriptor:
    """Return a manifest with unknown fields."""
    config = config or put(store, b"{}", CONFIG)
    document = {"config": config.to_json(), "layers": [layer.to_json() for layer in layers]}
    return put_raw(store, {"schemaVersion": 2, **document, **fields})


def before_sweeping(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    """Run a function between marking and sweeping."""
    held = lock.hold_lock

    def wrapped(root: Path, name: str, **options: Any) -> AbstractContextManager[None]:
        hook()
        return held(root, name, **options)

    monkeypatch.setattr(gc, "hold_lock", wrapped)


def used(store: ImageLayout, made: Manifest, when: float) -> None:
    """Set the time of a manifest's last use."""
    store.use(made.descriptor)
    os.utime(store.root / ".aimage" / "used" / made.digest.encoded, (when, when))


def total(store: ImageLayout) -> Any:
    return sum(path.stat().st_size for path in (store.root / "blobs").rglob("*/*"))


def damage(store: ImageLayout, content: Descriptor) -> None:
    path = store.find_path(content)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def state(store: ImageLayout) -> dict[Any, Any]:
    return {path: path.lstat().st_size for path in store.root.rglob("*") if path.name != "gc.lock"}
