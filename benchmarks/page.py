"""How fast the page appears, and how many bytes it takes.

``python -m benchmarks.page`` starts a worker with an empty store and opens the page in Debian's
chromium, without a cache, several times in each language. It prints the first paint, the time until
the form can be used, and the bytes over the wire, and fails above the limits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

FIRST_PAINT = 0.5  # seconds
WIRE = 155_000  # bytes
LANGUAGES = ("en", "de")


def load(browser: Any, url: str, language: str) -> dict[str, float]:
    """Open the page with an empty cache; return seconds and bytes."""
    context = browser.new_context(locale=language)
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    sizes: list[tuple[bool, float]] = []
    files: set[str] = set()  # requests of the page's files; the others depend on the store
    session.on(
        "Network.requestWillBeSent",
        lambda event: files.add(event["requestId"]) if is_file(event, url) else None,
    )
    session.on(
        "Network.loadingFinished",
        lambda event: sizes.append((event["requestId"] in files, event["encodedDataLength"])),
    )
    page.goto(url)
    page.wait_for_selector(".make-form")
    usable = page.evaluate("performance.now()")
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.wait_for_load_state("networkidle")  # with the parts that are loaded afterwards
    context.close()
    found = {"first_paint": paint / 1000, "usable": usable / 1000}
    own = [size for is_own, size in sizes if is_own]
    return found | {"bytes": sum(own), "files": len(own), "all": sum(size for _, size in sizes)}


def is_file(event: dict[str, Any], url: str) -> bool:
    asked = event["request"]["url"].removeprefix(url).split("#")[0]
    return asked in ("", "/") or asked.startswith("/page/")


def main() -> None:
    from playwright.sync_api import sync_playwright

    from tests.page.conftest import ARGUMENTS, CHROMIUM, SHAPES
    from tests.process import Aimage
    from tests.worker.conftest import begin

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    home = Path(tempfile.mkdtemp(prefix="page-"))
    aimage = Aimage(home, home / "store")
    aimage.process("create", "-q", "shapes", SHAPES / "model")
    worker = begin(aimage)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            for language in LANGUAGES:  # the files are compressed when they are first asked for
                load(browser, worker.url, language)
            found = {
                language: [load(browser, worker.url, language) for _ in range(runs)]
                for language in LANGUAGES
            }
            browser.close()
    finally:
        worker.end()
        shutil.rmtree(home, ignore_errors=True)
    is_over = False
    for language, loads in found.items():
        median = {name: statistics.median(one[name] for one in loads) for name in loads[0]}
        rounded = {name: round(value, 3) for name, value in median.items()}
        print(json.dumps({"language": language} | rounded))
        is_over = is_over or median["first_paint"] > FIRST_PAINT or median["bytes"] > WIRE
    if is_over:
        sys.exit(f"above the limits: {FIRST_PAINT} s, {WIRE} bytes")


if __name__ == "__main__":
    main()
