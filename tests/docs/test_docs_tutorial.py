"""The paths of the tutorial are as short as promised."""

from __future__ import annotations

import pytest

from tests.docs.scenario import LIMITS, TUTORIAL, commands


@pytest.mark.parametrize("heading", LIMITS)
def test_a_path_has_few_commands(heading: str) -> None:
    typed = [command.text for command in commands(heading)]
    assert 0 < len(typed) <= LIMITS[heading], typed


@pytest.mark.parametrize(
    ("heading", "verbs"),
    [
        ("The first picture", ["make install", "aimage create", "aimage run"]),
        ("A model on a second machine", ["aimage create", "aimage push", "aimage run"]),
        ("A picture in Open WebUI", ["make install", "aimage serve", "curl"]),
    ],
)
def test_a_path_goes_from_its_start_to_its_end(heading: str, verbs: list[str]) -> None:
    typed = [command.text for command in commands(heading)]
    assert [verb for verb in verbs if any(text.startswith(verb) for text in typed)] == verbs


def test_every_path_is_limited() -> None:
    assert [line[3:] for line in TUTORIAL.text.splitlines() if line.startswith("## ")] == [*LIMITS]
