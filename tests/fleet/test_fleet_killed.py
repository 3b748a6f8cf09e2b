"""Workers, gateways and the NATS server of a fleet are killed at random (benchmarks/jobs.py)."""

from __future__ import annotations

import json
import sys

import pytest

from tests.conftest import ROOT
from tests.process import run
from tests.program import find_program

pytestmark = pytest.mark.slow


def test_no_job_is_lost_or_answered_with_anothers_picture() -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    find_program("nats-server")
    sizes = {"workers": 3, "gateways": 2, "jobs": 600, "clients": 16, "every": 2}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.jobs", "--json", *options]
    done = run(command, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["jobs"] == sizes["jobs"] and sum(found["kills"].values()) >= 3
    bad = ("lost", "foreign", "different", "repeated_otherwise", "given_up", "left")
    assert {name: found[name] for name in bad} == dict.fromkeys(bad, 0)
