"""Headers by which registries say when they accept requests again."""

from __future__ import annotations

import email.utils

import pytest
from urllib3 import HTTPHeaderDict

from clowder_aimage.registry.overload import read_pause

NOW = 1_800_000_000.0
YEAR = 365 * 86400.0

# Headers, and the seconds
SITUATIONS: dict[str, tuple[dict[str, str], float]] = {
    "nothing": ({}, 0),
    "seconds": ({"Retry-After": "17"}, 17),
    "seconds in spaces": ({"retry-after": " 7 "}, 7),
    "a fraction": ({"Retry-After": "1.5"}, 1.5),
    "0": ({"Retry-After": "0"}, 0),
    "hours": ({"Retry-After": "21600"}, 21600),
    "many digits": ({"Retry-After": "9" * 400}, 0),
    "a century": ({"Retry-After": "4999999999"}, YEAR),
    "negative": ({"Retry-After": "-1"}, 0),
    "other digits": ({"Retry-After": "٣"}, 0),
    "a date": ({"Retry-After": email.utils.formatdate(NOW + 20, usegmt=True)}, 20),
    "a date in the past": ({"Retry-After": email.utils.formatdate(NOW - 20, usegmt=True)}, 0),
    "no date": ({"Retry-After": "Fri, 31 Feb 2026 00:00:00 GMT"}, 0),
    "a time, Docker Hub": ({"X-Retry-After": f"{NOW + 90:.0f}"}, 90),
    "milliseconds, Azure": ({"x-ms-retry-after-ms": "2500"}, 2.5),
    "a time, GitHub": (
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": f"{NOW + 30:.0f}"},
        30,
    ),
    "seconds, GitLab": ({"RateLimit-Remaining": "0", "RateLimit-Reset": "40"}, 40),
    "a window": ({"RateLimit-Remaining": "0;w=60", "RateLimit-Reset": "40"}, 40),
    "remaining requests": ({"RateLimit-Remaining": "10", "RateLimit-Reset": "40"}, 0),
    "an old draft": ({"RateLimit": "limit=100, remaining=0, reset=50"}, 50),
    "a draft": ({"RateLimit": '"default";r=0;t=55'}, 55),
    "a draft with remaining requests": ({"RateLimit": '"default";r=20;t=55'}, 0),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_pause_is_read(situation: str) -> None:
    headers, seconds = SITUATIONS[situation]
    assert read_pause(HTTPHeaderDict(headers), NOW) == pytest.approx(seconds)
