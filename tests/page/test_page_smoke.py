"""The page opens in a browser and shows its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_the_page_opens(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    assert page.get_by_role("button", name="Make").is_visible()
