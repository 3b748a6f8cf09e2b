"""Platforms of manifests in an index."""

from __future__ import annotations

from typing import Any

import pytest

from clowder_aimage.content.platform import Platform
from clowder_aimage.oci import Descriptor, Digest


@pytest.mark.parametrize(
    ("own", "other", "takes"),
    [
        ("linux/arm64", "linux/arm64", True),
        ("linux/arm64", "linux/amd64", False),
        ("linux/arm64", "darwin/arm64", False),
        ("linux/arm64", "linux/arm64/v8", True),
        ("linux/arm", "linux/arm/v7", True),  # no variant accepts any
        ("linux/arm/v7", "linux/arm/v7", True),
        ("linux/arm/v7", "linux/arm/v6", False),
        ("linux/arm/v7", "linux/arm", False),
    ],
)
def test_a_platform_takes_its_own_content(own: str, other: str, takes: bool) -> None:
    assert Platform.parse(own).takes(Platform.parse(other)) is takes


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"os": "linux", "architecture": "arm64"}, "linux/arm64"),
        ({"os": "linux", "architecture": "arm", "variant": "v7"}, "linux/arm/v7"),
        ({"os": "linux", "architecture": "arm", "variant": 7}, "linux/arm"),
        ({"os": "linux", "architecture": "arm", "os.version": "1"}, "linux/arm"),
        ({"os": "", "architecture": "arm"}, None),
        ({"os": "linux", "architecture": ""}, None),
        ({"os": "linux"}, None),
        ("linux/arm64", None),
        (None, None),
    ],
)
def test_the_platform_of_a_child(fields: Any, text: str | None) -> None:
    child = Descriptor("x/y", Digest("sha256", "ab" * 32), 1, extra={"platform": fields})
    found = Platform.in_descriptor(child)
    assert found == (Platform.parse(text) if text else None)
