"""Prefixes of digests instead of names in the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.content.artifact import CONFIG, blob, manifest, put, put_artifact
from tests.process import Aimage


@pytest.fixture
def stored(aimage: Callable[..., Aimage]) -> Aimage:
    """Return a store of two artifacts, one with two names."""
    here: Any = aimage()
    layout = ImageLayout(here.store)
    here.a, here.b = (put_artifact(layout, f"{name}:v1", name.encode()).digest for name in "ab")
    here("tag", "b:v1", "c:v1")
    return here


def names(here: Any) -> list[Any]:
    return [row["reference"] for row in here("--json", "ls").value]


@pytest.mark.parametrize("prefix", ["", "sha256:"])
def test_a_prefix_of_a_digest_stands_for_its_name(stored: Any, prefix: str) -> None:
    assert stored("tag", prefix + stored.a.encoded[:8], "new").line == str(stored.a)
    stored("tag", prefix + stored.a.encoded, "whole")
    assert stored("--json", "du", stored.b.encoded[:4]).value["total"]["blobs"] == 3
    assert names(stored) == ["a:v1", "b:v1", "c:v1", "new:latest", "whole:latest"]


def test_an_existing_name_has_precedence(stored: Any) -> None:
    stored("tag", "b:v1", stored.a.encoded[:6])
    assert stored("tag", stored.a.encoded[:6], "new").line == str(stored.b)


def test_an_ambiguous_prefix_is_refused(stored: Aimage) -> None:
    layout, seen = ImageLayout(stored.store), dict[str, int]()
    config = blob(b"{}", CONFIG)
    for number in range(10_000):  # until two digests begin with the same digits
        prefix = manifest(config, [], annotations={"n": str(number)}).digest.encoded[:4]
        if prefix in seen:
            break
        seen[prefix] = number
    put(layout, b"{}", CONFIG)
    for name, each in (("x", seen[prefix]), ("y", number)):
        made = manifest(config, [], annotations={"n": str(each)})
        layout.push(made.descriptor, build_bytes_body(made.raw), Reference.parse(name))
    stored("tag", "y", "z")
    err = stored("tag", prefix, "new", code=2).err
    assert f"several digests begin with {prefix}: {prefix}" in err
    assert "(x:latest)" in err
    assert "(y:latest, z:latest)" in err
    assert "use more digits, or a name" in err


def test_a_name_is_removed_by_the_digest_only_if_it_is_the_only_one(stored: Any) -> None:
    err = stored("rm", stored.b.encoded[:12], code=2).err
    assert f"{stored.b.short} has several names: b:v1, c:v1\n  use one of them" in err
    assert stored("rm", stored.a.encoded[:12]).line == "a:v1"
    assert names(stored) == ["b:v1", "c:v1"]


def test_three_digits_and_unknown_digits_are_names(stored: Any) -> None:
    assert "abc:latest not found" in stored("show", "abc", code=3).err
    assert "sha256:0000 not found" in stored("show", "sha256:0000", code=3).err
    assert (
        f"{stored.a.encoded[:3]}:latest not found" in stored("rm", stored.a.encoded[:3], code=3).err
    )


def test_the_store_may_be_named_after_the_prefix(
    stored: Any, aimage: Callable[..., Aimage]
) -> None:
    other = aimage()
    line = other("tag", stored.a.encoded[:8], "new", "--store", stored.store).line
    assert line == str(stored.a)
