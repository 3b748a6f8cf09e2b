"""A model whose layers and config have sha512 digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.process import Aimage
from tests.store import unshare


def test_only_the_manifest_has_a_sha256_digest(aimage: Callable[..., Aimage], llm: Path) -> None:
    here = aimage()
    digest = here("create", "x", llm, "--digest", "sha512").line
    manifest = here.store / "blobs" / "sha256" / digest.removeprefix("sha256:")
    value = json.loads(manifest.read_bytes())
    digests = [value["config"]["digest"], *(layer["digest"] for layer in value["layers"])]
    assert all(digest.startswith("sha512:") for digest in digests)
    assert list((here.store / "blobs" / "sha256").iterdir()) == [manifest]
    assert len(list((here.store / "blobs" / "sha512").iterdir())) == len(set(digests))
    here("verify")
    here("create", "other", llm)
    here("rm", "x")
    here("gc", "--grace", "0")
    assert not list((here.store / "blobs" / "sha512").iterdir())
    here("verify", "other")


def test_sha512_aimages_support_dialects_and_repair(
    aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    here, there, back = aimage(), aimage("there"), aimage("back")
    digest = here("create", repository, llm, "--digest", "sha512").line
    here("push", repository)
    assert there("pull", repository).line == digest
    path = next((there.store / "blobs" / "sha512").iterdir())
    unshare(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "damaged" in there("verify", code=5).out
    assert "repaired" in there("verify", "--repair").out
    there("verify")
    there("push", "--dialect", "container", repository)
    assert back("pull", repository).line != digest
    assert back("push", "--dialect", "clowder", repository).line == digest
