"""``create --annotation``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Reference
from tests.process import Aimage

URL = "org.opencontainers.image.url"


def manifest(here: Aimage, name: str) -> StoredAImage:
    return read_aimage(ImageLayout(here.store), Reference.parse(name))


def test_an_annotation_is_in_the_manifest_and_kept(
    aimage: Callable[..., Aimage], tiny: Path
) -> None:
    here = aimage()
    pairs = ("--annotation", f"{URL}=https://ci.example.com/1?a=b", "--annotation", "team=")
    digest = here("create", "x", tiny, *pairs, "-q").line
    expected = {"team": "", URL: "https://ci.example.com/1?a=b"}
    stored = manifest(here, "x")
    assert expected.items() <= stored.manifest.annotations.items()
    assert here("create", "y", tiny, *pairs[2:], *pairs[:2], "-q").line == digest
    plain = here("create", "z", tiny, "-q").line
    assert plain != digest
    assert manifest(here, "z").manifest.layers == stored.manifest.layers
    assert "annotations" not in manifest(here, "z").aimage.properties
    here("convert", "x", "f32", "--dtype", "f32", "-q")
    assert expected.items() <= manifest(here, "f32").manifest.annotations.items()


@pytest.mark.parametrize("dialect", ["ollama", "container", "modelpack"])
def test_every_dialect_keeps_an_annotation(
    aimage: Callable[..., Aimage], tiny: Path, dialect: str
) -> None:
    here = aimage()
    here("create", "x", tiny, "--annotation", "team=a", "--dialect", dialect, "-q")
    stored = manifest(here, "x")
    assert stored.aimage.properties["annotations"] == {"team": "a"}
    assert stored.manifest.annotations.get("team") == (None if dialect == "ollama" else "a")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("team", "expected KEY=VALUE"),
        ("=a", "expected KEY=VALUE"),
        ("a b=c", "invalid annotation 'a b=c'"),
        ("a=\x1b[31m", "invalid annotation 'a=\\x1b[31m'"),
        ("vnd.clowder.aimage.variant=x", "is written by the program itself"),
        ("org.opencontainers.image.licenses=mit", "is written by the program itself"),
    ],
)
def test_a_malformed_annotation_is_refused(
    aimage: Callable[..., Aimage], tiny: Path, pair: str, message: str
) -> None:
    here = aimage()
    failed = here("create", "x", tiny, "--annotation", pair, "--json", code=2)
    assert message in json.loads(failed.err.splitlines()[-1])["message"]
    assert not here.store.exists()
