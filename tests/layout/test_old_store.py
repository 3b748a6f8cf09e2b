"""Stores of other versions: one that version 0.1 wrote is used, one of a newer version is refused.

``store-0.1.tar.gz`` is the store that ``make_old_store.sh`` wrote with version 0.1; it is never
written again.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.lock import VERSION
from clowder_aimage.oci import Digest
from tests.process import Aimage
from tests.real_registry import RealRegistry

DIGEST = "sha256:fe6f19a782870f7d98bb5083dacfd3c3f2c2025ee843a08608e8ef0620148c65"
CONTAINER = "sha256:1a33e97d2922c02b0e988cbfc6852c83adc3953284926137868971d8a9b84f52"
NAMES = {"registry.example/team/small:v1", "small:latest", "small:container"}
FILES = {
    "config.json": "sha256:16b418c9a4e72650f2fcffe586974707d9d064e3bd893c039d85daabd6d19221",
    "model.safetensors": "sha256:6595fbd40adc6e6a8b80ce86fced516c82634cb0a6ca37f7921f5d0a9a4ebb00",
}


@pytest.fixture
def old(aimage: Callable[..., Aimage]) -> Aimage:
    here: Aimage = aimage("old")
    with tarfile.open(Path(__file__).with_name("store-0.1.tar.gz")) as archive:
        # Python 3.11.2, which Debian 12 has, knows no filters yet
        options = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        archive.extractall(here.store.parent, **options)  # type: ignore[arg-type]  # noqa: S202
    (here.store.parent / "store").rename(here.store)
    return here


def test_a_store_of_version_0_1_is_read(old: Aimage, tmp_path: Path) -> None:
    found = {model["reference"]: model["digest"] for model in old("ls", "--json").value}
    assert found == dict.fromkeys(NAMES, DIGEST) | {"small:container": CONTAINER}
    assert old("verify", "-q").err == ""
    old("export", "-q", "small", tmp_path / "out")
    exported = {
        path.name: str(Digest.of(path.read_bytes())) for path in (tmp_path / "out").iterdir()
    }
    assert exported == FILES
    assert "is pinned" in old("rm", "small:latest", code=2).err


def test_a_store_of_version_0_1_is_written(old: Aimage, registry: RealRegistry) -> None:
    old("tag", "-q", "small", f"{registry.host}/team/small:v2")
    assert old("push", "-q", f"{registry.host}/team/small:v2").out.strip() == DIGEST
    old("rm", "-q", "registry.example/team/small:v1", "small:container")
    old("gc", "-q", "--grace", "0")
    old("verify", "-q")
    assert {str(each.digest) for _, each in ImageLayout(old.store).iter_entries()} == {DIGEST}


def state(store: Path) -> dict[Any, Any]:
    return {path: path.lstat().st_mtime_ns for path in store.rglob("*")}


def test_nothing_is_pulled_into_a_store_of_a_newer_version(
    old: Aimage, registry: RealRegistry, aimage: Callable[..., Aimage], tiny: Path
) -> None:
    name = f"{registry.host}/team/tiny:v1"
    other = aimage("other")
    other("create", "-q", name, tiny)
    other("push", "-q", name)
    (old.store / ".aimage" / "version").write_text("2")
    before = state(old.store)
    assert "has version 2" in old("pull", name, code=1).err
    assert state(old.store) == before


@pytest.mark.parametrize("version", [str(VERSION + 1), "", "x\x1b[2J"])
def test_a_store_of_a_newer_version_is_refused_and_unchanged(
    old: Aimage, version: str, tiny: Path
) -> None:
    (old.store / ".aimage" / "version").write_text(version)
    before = state(old.store)
    for arguments in (
        ("ls",),
        ("tag", "small", "other"),
        ("rm", "small:container"),
        ("gc", "--grace", "0"),
        ("create", "new", tiny),
        ("verify", "--repair"),
    ):
        done = old(*arguments, code=1)
        assert f"the store {old.store} has version" in done.err, arguments
        assert "of a newer release" in done.err and "\x1b" not in done.err
    assert state(old.store) == before
