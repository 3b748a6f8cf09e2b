"""Jobs meet workers that have their model in memory (benchmarks/affinity.py)."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.conftest import ROOT
from tests.process import run

pytestmark = pytest.mark.integration


def test_nine_of_ten_jobs_meet_a_loaded_model() -> None:
    """20 models by Zipf's law, 8 workers with two slots; the clock is simulated."""
    command = [sys.executable, "-m", "benchmarks.affinity", "--json"]
    command += ["--jobs", "300", "--load", "0.1,0.2"]
    known = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    done = run(command, env=known, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout):
        assert found["met"] >= 0.9 and found["wait"][0] < 10, found
