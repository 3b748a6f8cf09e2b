"""Models that a worker fetches when it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.engine import model_fetch
from clowder_aimage.layout import ImageLayout


def test_a_missing_model_without_a_registry_is_logged(
    stocked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, transfers = ImageLayout(stocked), None
    preloading: Any = model_fetch.preload
    asyncio.run(preloading(store, transfers, ["tiny", "absent"]))
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert record.__dict__["model"] == "absent:latest"
    assert record.__dict__["reason"] == (
        "model absent:latest not found; create it, or add a registry to the name"
    )
