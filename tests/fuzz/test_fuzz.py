"""The fuzzers find nothing, and would report it."""

from __future__ import annotations

import json
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.fuzz import __main__ as program
from tests.fuzz.__main__ import attempt, counts, fuzz, main
from tests.fuzz.damage import VALUES, damage_bytes, damage_json, damage_text
from tests.fuzz.target import TARGETS, Target, World
from tests.process import run

DOCUMENT = {"a": [1, {"b": "text"}], "c": None}


class Failing(Target):
    """Fails on every third case, in two ways, and computes endlessly on every eighth."""

    def case(self, rng: random.Random) -> None:
        number = rng.randrange(24)
        if number % 8 == 0:
            while True:
                pass
        if number % 3 == 0:
            raise ValueError("found") if number % 2 else KeyError("found")


@pytest.mark.integration
@pytest.mark.parametrize("cases", [1000, pytest.param(4000, marks=pytest.mark.slow)])
def test_the_fuzzers_find_nothing(cases: int) -> None:
    done = run([sys.executable, "-m", "tests.fuzz", "--cases", str(cases)], text=True)
    print(done.stdout)  # noqa: T201 - with the seed
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_is_repeated_by_its_seed_and_number() -> None:
    for damaged in (
        lambda rng: damage_json(rng, DOCUMENT),
        lambda rng: damage_bytes(rng, bytes(99)),
        lambda rng: damage_text(rng, "a text"),
    ):
        first, second = ([damaged(random.Random(n)) for n in range(50)] for _ in range(2))
        assert repr(first) == repr(second)
        assert len(set(map(repr, first))) > 25
    assert DOCUMENT == {"a": [1, {"b": "text"}], "c": None}
    assert json.dumps(VALUES)


def test_findings_are_reported_with_what_repeats_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TARGETS, "failing", Failing)
    monkeypatch.setattr(program, "LIMIT", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)
    try:
        assert main(["failing", "--cases", "60", "--seed", "5"]) == 1
        out = capsys.readouterr().out
        assert "seed 5" in out and "60 cases" in out and "3 findings" in out
        assert "TooLongError" in out and "ValueError: found" in out and "KeyError: 'found'" in out
        number = int(out.partition("--only ")[2].split()[0])
        assert main(["failing", "--seed", "5", "--only", str(number)]) == 1
        target = Failing(World(tmp_path))
        found = [attempt(target, "failing", 5, each) is not None for each in range(number + 1)]
        assert found.index(True) == number
    finally:
        signal.signal(signal.SIGVTALRM, before)


def test_every_target_takes_part() -> None:
    shares = counts(list(TARGETS), 20_000)
    assert sum(shares.values()) > 19_000 and min(shares.values()) >= 300


def test_a_target_runs(tmp_path: Path) -> None:
    assert fuzz("requests", 7, range(20), tmp_path) == {}
