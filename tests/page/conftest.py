"""Fixtures of the page: a worker with the shapes model, and a real browser.

``open_page`` opens tabs in a browser without a window. The test fails if a tab printed an error,
violated its Content Security Policy, raised an exception, or asked another host.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import ROOT
from tests.process import Aimage
from tests.program import lack
from tests.store import copy_store
from tests.worker.conftest import Worker, begin

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHAPES = ROOT / "examples" / "shapes"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--process-per-site",  # tabs share a process: the files are compiled once
]
# Only the worker's own checks protect it from hosts below .example, which lead to it
RECKLESS = [
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks,PrivateNetworkAccessRespectPreflightResults",
]
PATIENCE = 20_000  # milliseconds
SIZE = {"width": 1280, "height": 800}


@pytest.fixture(scope="package")
def launch() -> Iterator[Callable[[], Browser]]:
    """Return a function that returns a browser without a window: the same one while it lives."""
    from playwright.sync_api import expect, sync_playwright

    if CHROMIUM is None:
        lack("chromium is not installed")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        found: list[Browser] = []

        def current() -> Browser:
            if not found or not found[-1].is_connected():
                arguments = [*ARGUMENTS, *RECKLESS]
                found.append(playwright.chromium.launch(executable_path=CHROMIUM, args=arguments))
            return found[-1]

        yield current
        for one in found:
            one.close()


@pytest.fixture(scope="module")
def browser(launch: Callable[[], Browser]) -> Browser:
    """Return the browser."""
    return launch()


@pytest.fixture(scope="package")
def shapes_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the models ``shapes`` (pictures) and ``words`` (texts). Copy it."""
    here = tmp_path_factory.mktemp("shapes")
    aimage = Aimage(here, here / "store")
    aimage("create", "-q", "shapes", SHAPES / "model")
    aimage("create", "-q", "words", SHAPES / "enhancer")
    return aimage.store


def serve_copy(store: Path, here: Path, *arguments: object) -> Worker:
    """Start ``aimage serve`` on a copy of the store."""
    copy_store(store, here / "store")
    defaults = ("--default-model", "shapes", "--enhancer", "words", "--max-models", 2)
    return begin(Aimage(here, here / "store"), *defaults, *arguments)


@pytest.fixture(scope="module")
def start_worker(
    shapes_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker of the test."""
    workers: list[Worker] = []

    def start(*arguments: object) -> Worker:
        here = tmp_path_factory.mktemp("worker")
        workers.append(serve_copy(shapes_store, here, *arguments))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture(scope="package")
def shapes_worker(shapes_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Return a worker without tokens that the tests share: leave its store as it was."""
    worker = serve_copy(shapes_store, tmp_path_factory.mktemp("worker"))
    yield worker
    worker.end()


class Watch:
    """The faults of the tabs of a test; ``allow`` accepts errors that the test provokes."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.asked: list[str] = []
        self._allowed: list[str] = []

    def allow(self, pattern: str) -> None:
        """Accept faults in which the pattern occurs."""
        self._allowed.append(pattern)

    def follow(self, page: Page, url: str) -> None:
        """Collect what the tab prints, raises and asks of other hosts than ``url``."""
        page.on("console", lambda one: self._printed(one))
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", lambda one: self._asked(one.url, url))

    def _printed(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text} {message.location}")

    def _asked(self, asked: str, url: str) -> None:
        self.asked.append(asked)
        if not asked.startswith((url, "blob:", "data:")):
            self.faults.append(f"another host: {asked}")

    def remaining(self) -> list[str]:
        """Return the faults that no pattern allows."""
        return [
            one for one in self.faults if not any(re.search(each, one) for each in self._allowed)
        ]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Collect the faults of all tabs of the test, which fails with them."""
    found = Watch()
    yield found
    assert not found.remaining()


@pytest.fixture(scope="module")
def shared_context(browser: Browser, shapes_worker: Worker) -> Iterator[BrowserContext]:
    """Return a browser context whose cache has the files of the page after the first test.

    Its first tab stays open, and with it the process of all tabs. Transitions take no time.
    """
    found = browser.new_context(
        viewport=SIZE,  # type: ignore[arg-type]
        locale="en-GB",
        accept_downloads=True,
        reduced_motion="reduce",
    )
    found.set_default_timeout(PATIENCE)
    found.new_page().goto(f"{shapes_worker.url}/healthz")
    yield found
    found.close()


@pytest.fixture
def context(shared_context: BrowserContext) -> Iterator[BrowserContext]:
    """Return a browser context; ``open_page`` clears the storage that earlier tests left."""
    yield shared_context
    for page in shared_context.pages[1:]:
        page.close()
    shared_context.unroute_all()
    shared_context.clear_permissions()
    shared_context.clear_cookies()


@pytest.fixture
def open_page(context: BrowserContext, shapes_worker: Worker, watch: Watch) -> Callable[..., Page]:
    """Return a function that opens a tab with the page, or a part of it such as ``gallery``."""
    cleared: set[str] = set()

    def open_tab(part: str = "make", url: str = "", *, is_awaited: bool = True) -> Page:
        base = url or shapes_worker.url
        page = context.new_page()
        if base not in cleared:
            session = context.new_cdp_session(page)
            stored = {"origin": base, "storageTypes": "local_storage,indexeddb,cookies"}
            session.send("Storage.clearDataForOrigin", stored)
            cleared.add(base)
        watch.follow(page, base)
        page.goto(f"{base}/#{part}", wait_until="load" if is_awaited else "commit")
        if is_awaited:
            page.wait_for_selector("#main *")
        return page

    return open_tab
