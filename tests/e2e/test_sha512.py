"""A model whose layers and config are known by sha512, through a real registry and back."""

from __future__ import annotations

import json

import pytest


def manifest(here, digest):
    return json.loads(
        (here.store / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
    )


@pytest.fixture
def made(aimage, tiny, registry):
    here = aimage()
    here.name = f"{registry.host}/sha512/tiny:v1"
    here.digest = here("create", here.name, tiny, "--digest", "sha512").line
    return here


def test_only_the_manifest_is_known_by_sha256(made):
    value = manifest(made, made.digest)
    digests = [value["config"]["digest"], *(layer["digest"] for layer in value["layers"])]
    assert all(digest.startswith("sha512:") for digest in digests)
    assert [path.name for path in (made.store / "blobs" / "sha256").iterdir()] == [made.digest[7:]]
    assert len(list((made.store / "blobs" / "sha512").iterdir())) == len(set(digests))
    made("verify")


@pytest.mark.integration
def test_there_and_back(made, aimage):
    made("push", made.name)
    there = aimage()
    assert there("pull", made.name).line == made.digest
    there("verify")
    there("push", "--dialect", "container", made.name)
    back = aimage()
    assert back("pull", made.name).line != made.digest
    back("push", "--dialect", "clowder", made.name)
    assert aimage()("pull", made.name).line == made.digest


def test_one_flipped_bit_is_found_and_mended(made):
    made("push", made.name)
    path = next((made.store / "blobs" / "sha512").iterdir())
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "damaged" in made("verify", code=5).out
    assert "mended" in made("verify", "--repair").out
    made("verify")


def test_what_nothing_needs_is_collected(made, tiny):
    made("create", "other", tiny)
    made("rm", made.name)
    made("gc", "--grace", "0")
    assert not list((made.store / "blobs" / "sha512").iterdir())
    made("verify", "other")
