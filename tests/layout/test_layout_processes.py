"""Several processes on one layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest, Reference
from tests.process import spawn

ROOT = Path(__file__).parent.parent.parent
WRITERS, NAMES = 3, 10


def start(root: Path, who: int) -> subprocess.Popen[bytes]:
    program = Path(__file__).parent / "layout_writer.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, str(program), str(root), str(who), str(NAMES)]
    return spawn(arguments, env=environment, stderr=subprocess.PIPE)


def test_concurrent_tags_keep_all_names_and_a_readable_index(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "store")
    writers = [start(layout.root, who) for who in range(WRITERS)]
    seen, looks = 0, 0
    while any(writer.poll() is None for writer in writers):
        entries = list(layout.list_tags())  # raises if index.json is incomplete
        assert len(entries) >= seen  # no name is removed
        seen, looks = len(entries), looks + 1
        for _, descriptor in entries[-1:]:
            assert Digest.of(layout.find_path(descriptor).read_bytes()) == descriptor.digest
        if (layout.root / "oci-layout").exists():
            version = json.loads((layout.root / "oci-layout").read_bytes())
            assert version == {"imageLayoutVersion": "1.0.0"}
    for writer in writers:
        _, said = writer.communicate()
        assert writer.returncode == 0, said.decode()
    assert looks > 1
    names = {name for name, _ in layout.list_tags()}
    assert names == {f"writer{who}:v{n}" for who in range(WRITERS) for n in range(NAMES)}
    assert (
        len(json.loads((layout.root / "index.json").read_bytes())["manifests"]) == WRITERS * NAMES
    )
    for path in (layout.root / "blobs" / "sha256").iterdir():
        assert Digest.of(path.read_bytes()).encoded == path.name
    left = [p for p in (layout.root / ".aimage").rglob("*") if p.is_file()]
    assert {p.parent.name for p in left} <= {".aimage", "names", "used", "listing"}
    assert not [p for p in left if "." in p.name and p.name != "gc.lock"]


@pytest.mark.integration
def test_a_killed_process_leaves_a_working_store(tmp_path: Path) -> None:
    """Repeated kills at random moments; the next process continues each time."""
    layout = ImageLayout(tmp_path / "store")
    for who in range(4):
        writer = start(layout.root, who)
        while writer.poll() is None and len(list(layout.list_tags())) < 2 + who * 3:
            pass
        writer.kill()
        writer.communicate()
        named = dict(layout.list_tags())
        assert len(named) >= 2 + who * 3
        for name, descriptor in named.items():
            assert layout.resolve(Reference.parse(name)).digest == descriptor.digest
            manifest = json.loads(layout.find_path(descriptor).read_bytes())
            for child in (manifest["config"], *manifest["layers"]):
                path = layout.root / "blobs" / "sha256" / child["digest"].partition(":")[2]
                assert str(Digest.of(path.read_bytes())) == child["digest"]
    last = start(layout.root, 99)
    assert last.wait(60) == 0
    last.communicate()
    assert {f"writer99:v{n}" for n in range(NAMES)} <= {name for name, _ in layout.list_tags()}
