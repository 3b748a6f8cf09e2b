"""Parse human-readable sizes and durations."""

from __future__ import annotations

import pytest

from clowder_aimage.content.unit import parse_size, parse_time


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("7b", 7),
        ("500K", 500_000),
        (" 20 mb ", 20_000_000),
        ("1.5GiB", 3 * 512 * 1024 * 1024),
        ("2Ki", 2048),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize("text", ["", "GiB", "-1k", "1kk", "nan", "1e999"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected a value such as 500k, 20M or 1\.5GiB"
    ) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90s", 90),
        ("1.5H", 5400),
        (" 7 d ", 604_800),
        ("2w", 1_209_600),
    ],
)
def test_parse_time(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "-7d", "1y", "infd"])
def test_parse_time_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected a value such as 90s, 12h or 7d") as caught:
        parse_time(text)
    assert repr(text) in str(caught.value)
