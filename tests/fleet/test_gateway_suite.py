"""The tests of a worker's API, through a gateway: unmodified clients of OpenAI and ollama.

``make test-gateway`` runs more of them. What a gateway does otherwise is marked ``worker_only``.
"""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.conftest import ROOT
from tests.fleet.fleet_run import nats_program
from tests.process import run

pytestmark = pytest.mark.integration
FEWEST = {"openai": 60, "openai_text": 25, "ollama": 60, "ollama_text": 8, "ollama_pull": 12}
_OFTEN = ("openai", "ollama_text")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.slow) for name in FEWEST],
)
def test_the_api_of_a_worker_is_that_of_a_gateway(name: str) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    nats_program()
    command = [sys.executable, "-m", "pytest", "-q", "--gateway", "-p", "no:cacheprovider"]
    command += ["-m", "not integration and not slow", f"tests/worker/test_{name}.py"]
    kept = {
        key: text for key, text in os.environ.items() if not key.startswith(("PYTEST_", "AIMAGE_"))
    }
    done = run(command, cwd=ROOT, env=kept, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= FEWEST[name], done.stdout[-2000:]
