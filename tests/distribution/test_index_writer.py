"""A server writes a large index in the background, and when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.engine.executor import run_locking
from clowder_aimage.errors import NoSpaceError
from clowder_aimage.http import index_writer as module
from clowder_aimage.http.index_writer import writing_index
from clowder_aimage.layout import ImageLayout, pending_names
from clowder_aimage.layout import index as index_module
from clowder_aimage.oci import Reference
from tests.content.artifact import put_artifact

parse = Reference.parse


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageLayout:
    """Return a store whose index is large; changes are due at once, also in the background."""
    monkeypatch.setattr(pending_names, "SMALL", 1)
    monkeypatch.setattr(index_module, "_MIN_INTERVAL", 0.0)
    monkeypatch.setattr(index_module, "_MAX_SHARE", 0)
    monkeypatch.setattr(module, "_INTERVAL", 0.01)
    found = ImageLayout(tmp_path / "store")
    for name in ("a:v1", "b:v1"):
        put_artifact(found, name, b"one")
    return found


def is_written(layout: ImageLayout, name: str) -> bool:
    return f'"{name}"'.encode() in (layout.root / "index.json").read_bytes()


def run(layout: ImageLayout, steps: Callable[[Callable[[str], Awaitable[None]]], Any]) -> None:
    """Run steps while the index is written in the background; they tag by the given function."""
    content = layout.resolve(parse("a:v1"))

    async def tag(name: str) -> None:
        await run_locking(layout.tag, content, parse(name))

    async def work() -> None:
        async with writing_index(layout):
            await steps(tag)

    asyncio.run(work())


def test_an_index_follows_in_the_background(layout: ImageLayout) -> None:
    async def steps(tag: Callable[[str], Awaitable[None]]) -> None:
        await tag("new:v1")
        async with asyncio.timeout(60):
            while not is_written(layout, "new:v1"):
                await asyncio.sleep(0.01)

    run(layout, steps)
    # A command writes by itself again
    layout.tag(layout.resolve(parse("a:v1")), parse("last:v1"))
    assert is_written(layout, "last:v1")


def test_an_index_is_written_when_a_server_ends(
    layout: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_MIN_INTERVAL", 3600.0)

    async def steps(tag: Callable[[str], Awaitable[None]]) -> None:
        await tag("new:v1")
        await asyncio.sleep(0.05)
        assert not is_written(layout, "new:v1")

    run(layout, steps)
    assert is_written(layout, "new:v1")


def test_an_index_that_cannot_be_written_is_logged_and_costs_no_name(
    layout: ImageLayout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> NoReturn:
        raise NoSpaceError("no space left")

    monkeypatch.setattr(layout, "write_pending", fail)

    async def steps(tag: Callable[[str], Awaitable[None]]) -> None:
        await tag("new:v1")
        await asyncio.sleep(0.05)

    with caplog.at_level(logging.WARNING, "aimage.store"):
        run(layout, steps)
    # Once in the background, and at the end
    assert [record.message.count("no space left") for record in caplog.records] == [1, 1]
    assert layout.resolve(parse("new:v1"))
    assert not is_written(layout, "new:v1")
