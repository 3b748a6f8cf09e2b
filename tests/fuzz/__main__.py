"""Run the fuzzers: ``python -m tests.fuzz [TARGET...] [--cases N] [--seed S] [--only CASE]``."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import secrets
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.fuzz.target import TARGETS, Target, World

LIMIT = 10.0  # seconds of CPU time for a case


class TooLongError(Exception):
    """A case took longer than the limit."""


def _too_long(*_: object) -> None:
    raise TooLongError(f"longer than {LIMIT:g} s")


def attempt(target: Target, name: str, seed: int, number: int) -> str | None:
    """Run one case; return the traceback of a finding."""
    rng = random.Random(f"{seed}/{name}/{number}")
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
    faulthandler.dump_traceback_later(
        max(60, 12 * LIMIT), exit=True, file=sys.__stderr__ or 2
    )  # code that no signal interrupts
    try:
        target.case(rng)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.cancel_dump_traceback_later()
    return None


def fuzz(name: str, seed: int, numbers: range, home: Path) -> dict[str, tuple[int, str]]:
    """Run cases of a target; return each distinct finding, with its first case."""
    findings: dict[str, tuple[int, str]] = {}
    target = TARGETS[name](World(home))
    try:
        for number in numbers:
            found = attempt(target, name, seed, number)
            if found is not None:
                findings.setdefault(_place(found), (number, found))
    finally:
        target.close()
    return findings


def _place(found: str) -> str:
    """Return the last line of the package in a traceback: findings there are the same."""
    lines = [line for line in found.splitlines() if "clowder_aimage" in line and "File" in line]
    return lines[-1] if lines else found.splitlines()[-1][:80]


def counts(names: list[str], cases: int) -> dict[str, int]:
    """Return how many of ``cases`` each target gets."""
    total = sum(TARGETS[name].share for name in names)
    return {name: max(1, cases * TARGETS[name].share // total) for name in names}


def main(arguments: list[str] | None = None) -> int:
    """Print the seed and the findings; return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, help="run this case of a target")
    chosen: Any = parser.parse_args(arguments)
    names = chosen.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGVTALRM, _too_long)
    has_findings = False
    for name, count in counts(names, chosen.cases).items():
        numbers = range(count) if chosen.only is None else range(chosen.only, chosen.only + 1)
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as directory:
            findings = fuzz(name, seed, numbers, Path(directory))
        took = time.process_time() - begun
        print(f"{name}: {len(numbers)} cases, {took:.1f} s, {len(findings)} findings", flush=True)
        for number, text in findings.values():
            has_findings = True
            print(f"-- repeat: python -m tests.fuzz {name} --seed {seed} --only {number}\n{text}")
    return int(has_findings)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
