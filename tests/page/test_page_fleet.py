"""The page at a gateway: it makes pictures, and shows the workers of the fleet."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fleet.fleet_run import Nats
from tests.page.conftest import serve_copy
from tests.process import Aimage
from tests.wait import until
from tests.worker.conftest import answer_to, begin

pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = pytest.mark.integration

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_the_page_at_a_gateway_shows_the_fleet(
    open_page: Callable[..., Page], shapes_store: Path, tmp_path: Path
) -> None:
    nats = Nats(tmp_path / "js").start()
    joined = ("--join", nats.url, "--worker-name", "w1")
    workers = []
    try:
        (tmp_path / "worker").mkdir()
        here = Aimage(tmp_path, tmp_path / "store")
        here.process("fleet", "init", "--nats", nats.url)
        (key,) = tmp_path.rglob("root.public")
        fleet_key = ("--fleet-key", str(key))
        workers.append(serve_copy(shapes_store, tmp_path / "worker", *joined, *fleet_key))
        workers.append(begin(here, "--nats", nats.url, verb="gateway"))

        def has_worker() -> bool:
            status, _, body = answer_to(urllib.request.Request(f"{workers[-1].url}/v1/fleet"))
            return status == 200 and bool(json.loads(body)["workers"])

        until(has_worker)
        page = open_page(url=workers[-1].url)
        page.get_by_label("Prompt", exact=True).fill("a red circle")
        page.get_by_role("button", name="Make").click()
        page.locator("img").first.wait_for()
        page.goto(f"{workers[-1].url}/#models")
        page.get_by_role("heading", name="Fleet aimage").wait_for()
        shown = page.locator('[data-name="w1"]')
        shown.wait_for()
        assert "shapes:latest" in shown.inner_text() and "of 2 jobs running" in shown.inner_text()
        assert page.get_by_role("heading", name="Jobs").count() == 0
    finally:
        for each in reversed(workers):
            each.end()
        nats.kill()
