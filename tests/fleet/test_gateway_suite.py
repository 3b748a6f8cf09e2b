"""The tests of a worker's API, through a gateway: unmodified clients of OpenAI and ollama.

``make test-gateway`` runs more of them. What a gateway does otherwise is marked ``worker_only``.
"""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.conftest import ROOT
from tests.process import run
from tests.program import find_program

pytestmark = pytest.mark.integration
FEWEST = {"openai": 60, "openai_text": 25, "ollama": 60, "ollama_text": 8, "ollama_pull": 12}
# Each kind of response: a document, an error, a stream, one that breaks off, one to a queue
SAMPLE = (
    "openai.py::test_models_and_aliases_are_listed",
    "openai.py::test_an_invalid_request_names_the_field",
    "openai.py::test_a_stream_has_partial_images",
    "openai.py::test_an_error_in_the_middle_of_a_stream_is_an_event",
    "openai.py::test_a_disconnect_without_a_stream_cancels",
    "openai.py::test_the_sdk_retries_after_a_full_queue",
    "ollama.py::test_a_stream_has_progress_and_the_picture",
    "ollama.py::test_an_invalid_field_is_400_with_its_name",
    "ollama.py::test_a_copy_is_listed_and_can_be_deleted",
    "ollama_text.py::test_a_chat_is_streamed_in_lines_with_counts",
)


def passed(*tests: str) -> int:
    """Run tests through a gateway, and return how many passed; fail if one did not."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    find_program("nats-server")
    command = [sys.executable, "-m", "pytest", "-q", "--gateway", "-p", "no:cacheprovider"]
    command += ["-m", "not integration and not slow", *tests]
    kept = {
        key: text for key, text in os.environ.items() if not key.startswith(("PYTEST_", "AIMAGE_"))
    }
    done = run(command, cwd=ROOT, env=kept, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:]
    count = re.search(r"(\d+) passed", done.stdout)
    assert count is not None, done.stdout[-2000:]
    return int(count[1])


def test_a_gateway_answers_as_a_worker_does() -> None:
    assert passed(*(f"tests/worker/test_{test}" for test in SAMPLE)) >= 2 * len(SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWEST)
def test_the_api_of_a_worker_is_that_of_a_gateway(name: str) -> None:
    assert passed(f"tests/worker/test_{name}.py") >= FEWEST[name]
