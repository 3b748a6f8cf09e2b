"""Sizes and times as people write them."""

from __future__ import annotations

import pytest

from clowder_aimage.content.unit import parse_size, parse_time


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("7", 7),
        ("7b", 7),
        ("500k", 500_000),
        ("500K", 500_000),
        ("500kB", 500_000),
        ("20M", 20_000_000),
        ("20MB", 20_000_000),
        ("20 MB", 20_000_000),
        (" 20 mb ", 20_000_000),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 512 * 1024 * 1024),
        ("2Ki", 2048),
        ("64KiB", 65_536),
        ("1MiB", 1_048_576),
        ("200GB", 200_000_000_000),
        ("2TB", 2_000_000_000_000),
        ("2TiB", 2 * 1024**4),
        ("0.5k", 500),
        ("1e3", 1000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "-1k", "1kk", "1ik", "1 0", "nan", "infGB", "0x10", "1PB", "1e999"),
    ],
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"is not a size such as 500k, 20M or 1\.5GiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0s", 0),
        ("90s", 90),
        ("30m", 1800),
        ("12h", 43_200),
        ("12H", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1.5h", 5400),
        (" 7 d ", 604_800),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "d", "-7d", "1y", "1h30m", "infd", "1e99d", "00"),
    ],
)
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="is not a time such as 90s, 12h or 7d") as caught:
        parse_time(text)
    assert repr(text) in str(caught.value)
