"""Grammars of hostile schemas: each is tried in a process, whose time and memory are limited."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any

import pytest

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")

from clowder_aimage.errors import UsageError
from clowder_aimage.model.bounded_process import MEMORY, SECONDS, RefusedError
from clowder_aimage.model.llama import grammar
from clowder_aimage.model.llama.digit_bound import DigitBound
from clowder_aimage.model.llama.grammar import Grammar, Grammars
from tests.process import run
from tests.text.hostile_schema import SCHEMAS

ENDLESS = {"type": "integer", "multipleOf": 9_999_991, "minimum": 0}
# Of Python, llama.cpp and the model of bytes, before the limits are set, and of the first try
START_SECONDS, START_MEMORY = 10.0, 160 << 20


@pytest.mark.integration
def test_no_schema_takes_more_time_and_memory_than_its_process_may() -> None:
    done = run([sys.executable, "-m", "tests.text.hostile_schema"], text=True, check=True)
    trials = {trial["name"]: trial for trial in map(json.loads, done.stdout.splitlines())}
    assert trials.keys() == SCHEMAS.keys()
    for trial in trials.values():
        assert trial["trial"] < SECONDS + START_SECONDS, trial
        assert trial["peak"] < MEMORY + START_MEMORY, trial
        assert trial["prepare"] <= 3.0, trial
    refused = {name for name, trial in trials.items() if trial["reason"]}
    assert refused > {"multipleOf 9999991", "maxItems", "enum of 10^5", "uniqueItems"}
    assert refused > {"references to itself", "references in a circle", "any of itself"}
    assert not refused & {"enum of 9000", "required properties", "nested ranges"}


def test_a_schema_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, tried = Grammars(), []

    def run_bounded(module: str, data: bytes, _: object) -> bytes:
        tried.append(module)
        if b"multipleOf" in data:
            raise RefusedError("it takes too long")
        return b"0.25\nroot"

    monkeypatch.setattr(grammar, "run_bounded", run_bounded)
    for _ in range(2):
        assert grammars.build({"type": "object"}) == Grammar("root", 0.25) == grammars.build({})
        with pytest.raises(UsageError, match="cannot be used: it takes too long") as caught:
            grammars.build(ENDLESS)
    assert caught.value.facts["field"] == "response_format"
    assert len(tried) == 2


def test_grammars_that_take_long_leave_half_of_the_time_to_others() -> None:
    now = [10.0]
    grammars = Grammars(clock=lambda: now[0])
    assert [grammars.reserve(Grammar("", 0.25)) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert grammars.reserve(Grammar("", 0.01)) == 0.0
    now[0] = 20.0
    assert grammars.reserve(Grammar("", 0.25)) == 0.0


def test_an_endless_schema_is_refused_and_an_ordinary_one_is_not_held_up() -> None:
    grammars, outcomes = Grammars(), list[str]()

    def build(schema: dict[str, Any]) -> None:
        try:
            outcomes.append(grammars.build(schema).text)
        except UsageError as error:
            outcomes.append(error.message)

    threads = [threading.Thread(target=build, args=(one,)) for one in (ENDLESS, {"enum": [1, 2]})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "start: %json" in outcomes[0]
    assert re.search(r"preparing it takes more than (2 seconds|256 MiB)", outcomes[1])


def test_a_try_ends_when_its_request_is_cancelled() -> None:
    grammars, looks = Grammars(), list[int]()

    def is_cancelled() -> bool:
        looks.append(1)
        return len(looks) > 2

    with pytest.raises(UsageError, match="cancelled"):
        grammars.build(ENDLESS, is_cancelled)
    # The schema itself was not refused
    assert not grammars._cache


def test_white_space_between_values_is_fixed() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": " *", "coerce_one_of": True}}
    options = json.loads(Grammars().build(schema).text.partition("%json ")[2])["x-guidance"]
    assert options["whitespace_flexible"] is False and options["coerce_one_of"] is True
    assert options["whitespace_pattern"] is None


@pytest.mark.parametrize(
    ("parts", "is_endless"),
    [
        (["1" * 320, "]"], False),
        (["[1", "1" * 319, "1"], True),
        (['{"a": 0.', "3" * 321], True),
        (["1" * 200, ".", "1" * 200, "e", "1" * 200], False),
        (['"', "1" * 400, '"'], False),
        (['"\\\\', '"', "1" * 321], True),
        (['"\\"', "1" * 400], False),
        (['"a", ', "1" * 321], True),
    ],
)
def test_numbers_have_a_bound_of_digits(parts: list[str], is_endless: bool) -> None:
    digits = DigitBound()
    assert any(digits.feed(part) for part in parts) is is_endless
