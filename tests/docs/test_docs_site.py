"""The documentation as a site: it builds strictly, works as files, and asks no other host.

It is built by the environment of ``make docs``, or is at AIMAGE_SITE, as in CI.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.document import ROOT
from tests.page.conftest import ARGUMENTS, CHROMIUM, PATIENCE
from tests.process import run
from tests.program import lack

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.integration
QUERY, PAGE = "runbooks of Prometheus", "alerts.html"


def _mkdocs() -> Path:
    """Return mkdocs in the environment of ``make docs``, beside the site that it built."""
    built = os.environ.get("AIMAGE_SITE")
    path = (Path(built).parents[1] if built else ROOT) / "build" / "docs-venv" / "bin" / "mkdocs"
    if not path.is_file():
        pytest.skip("the site is not built: make docs")
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("AIMAGE_SITE"):
        return Path(built)
    place = tmp_path_factory.mktemp("site")
    done = run([_mkdocs(), "build", "--strict", "--site-dir", place], cwd=ROOT, text=True)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        lack("chromium is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=["files", "http"])
def address(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    """Return the address of the site: of its directory, or of a server."""
    if request.param == "files":
        yield site.as_uri()
        return

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_search_finds_a_page(browser: Browser, address: str) -> None:
    errors: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(f"{address}/index.html")
        page.locator("input[name=query]").press_sequentially(QUERY)  # the search waits for keys
        found = page.locator(f".md-search-result__link[href*='{PAGE}']").first
        found.wait_for(timeout=PATIENCE)
        found.click()
        page.wait_for_url(f"**/{PAGE}*", timeout=PATIENCE)
    assert errors == []


def test_pages_have_their_pictures_and_ask_no_other_host(browser: Browser, address: str) -> None:
    requests: set[str] = set()
    for scheme in ("light", "dark"):
        with browser.new_context(color_scheme=scheme) as context:
            page = context.new_page()
            page.on("request", lambda request: requests.add(request.url))
            for name in ("index.html", "page.html", "reference/api.html", "adr/template.html"):
                page.goto(f"{address}/{name}")
                broken = page.evaluate(
                    "() => [...document.images].filter((i) => i.checkVisibility()"
                    " && !i.naturalWidth).map((i) => i.src)"
                )
                assert broken == [], name
                width = "() => document.documentElement.scrollWidth - innerWidth"
                page.set_viewport_size({"width": 390, "height": 844})
                assert page.evaluate(width) <= 0, f"{name} is wider than a phone"
    assert requests
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


def test_the_colours_and_the_icon_are_those_of_the_page(site: Path) -> None:
    accent = re.search(
        r"--accent: light-dark\((#\w+), (#\w+)\)",
        (ROOT / "clowder_aimage/page/style.css").read_text("utf-8"),
    )
    assert accent is not None
    colors = (site / "site" / "colors.css").read_text("utf-8")
    assert re.findall(r"  --accent: (#\w+);", colors) == [*accent.groups()]
    icon = (ROOT / "clowder_aimage/page/icon.svg").read_bytes()
    assert (site / "icon.svg").read_bytes() == icon
    assert 'rel="icon" href="icon.svg"' in (site / "index.html").read_text("utf-8")


def test_a_broken_link_and_a_page_without_a_place_fail_the_build(tmp_path: Path) -> None:
    mkdocs = _mkdocs()
    project = tmp_path / "project"
    (project / "docs").mkdir(parents=True)
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    kept, _, _ = config.replace("hooks: [docs/mkdocs_hooks.py]", "hooks: []").partition("nav:")
    (project / "mkdocs.yml").write_text(f"{kept}nav: [index.md]\n", "utf-8")
    shutil.copytree(ROOT / "docs" / "site", project / "docs" / "site")
    for name, text in (("lost.md", "# Lost"), ("index.md", "# Home\n\n[no](no.md) [anchor](#no)")):
        (project / "docs" / name).write_text(text, "utf-8")
    done = run([mkdocs, "build", "--strict"], cwd=project, text=True)
    assert done.returncode == 1
    for message in ("lost.md", "'no.md'", "'#no'"):
        assert message in done.stderr, done.stderr
