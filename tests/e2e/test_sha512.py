"""A model whose layers and config have sha512 digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
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


def test_sha512_blobs_are_pushed_to_a_second_repository(
    aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    """Docker-registry confirms the mounts of sha512 blobs, but does not have them then."""
    here, there = aimage(), aimage("there")
    digest = here("create", repository, llm, "--digest", "sha512").line
    here("push", repository)
    for name in (f"{repository}-second", f"{repository}-third"):
        here("tag", repository, name)
        assert here("push", name).line == digest
        assert there("pull", name).line == digest
    done = here("copy", repository, f"{repository}-copy")
    assert done.line == digest
    # What was sent in the end is counted, not the mounts.
    assert "copied 6 blobs" in done.err
    assert there("pull", f"{repository}-copy").line == digest
    there("verify")


def test_a_push_of_a_sha512_manifest_prints_the_digest_of_the_registry(
    aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    here, there = aimage(), aimage("there")
    digest = here("create", repository, llm, "--digest", "sha512").line
    layout = ImageLayout(here.store)
    name = Reference.parse(repository)
    with layout.open(layout.resolve(name)) as file:
        raw = file.read() or b""
    content = Descriptor(mediatype.OCI_MANIFEST, Digest.of(raw, "sha512"), len(raw))
    layout.push(content, build_bytes_body(raw), name)
    assert layout.resolve(name).digest == content.digest
    assert here("push", repository).line == digest
    assert there("pull", repository).line == digest
