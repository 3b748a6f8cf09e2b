"""The log of urllib3, whatever other tests have imported."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _urllib3_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let urllib3 log as it does by default: a library may have disabled it."""
    for name in ("urllib3", "urllib3.connectionpool"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
