"""The page for everybody: axe-core's rules, the keyboard, languages, themes, narrow windows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect

from tests.page.conftest import Watch

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.integration
OpenPage = Callable[..., "Page"]
# All rules for WCAG 2.2 A and AA, and axe-core's best practices
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PARTS = ("make", "gallery", "models", "chat")
PHONE = {"width": 360, "height": 740}


def violations(page: Page, kind: str = "tag", names: Sequence[str] = RULES) -> list[str]:
    page.evaluate("new Promise(requestAnimationFrame)")  # colours follow the theme in a frame
    if not page.evaluate("'axe' in self"):
        page.evaluate(AXE_SCRIPT)
    options = {"runOnly": {"type": kind, "values": names}, "resultTypes": ["violations"]}
    found: Any = page.evaluate("(how) => axe.run(how).then((it) => it.violations)", options)
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
        for one in found
        for node in one["nodes"]
    ]


def make(page: Page, prompt: str = "a red circle") -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Steps", exact=True).fill("1")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text("Done in")


def test_axe_finds_nothing_in_any_part(open_page: OpenPage) -> None:
    page = open_page()
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    make(page)
    for fold in page.locator("details.fold > summary").all():
        fold.click()
    found = violations(page)
    page.get_by_role("button", name="Earlier prompts").click()
    found += violations(page)
    page.keyboard.press("Escape")
    for part in PARTS[1:]:
        page.get_by_role("link", name=part.capitalize(), exact=True).click()
        expect(page.locator(f".main-{part}")).to_be_visible()
        found += violations(page)
        page.emulate_media(color_scheme="dark")
        found += violations(page, "rule", ["color-contrast"])
        page.emulate_media(color_scheme="light")
    page.get_by_role("link", name="Make", exact=True).click()
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    found += violations(page)
    assert not found, "\n".join(found)


def test_everything_of_make_is_reached_by_the_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.get_by_label("Steps", exact=True)).to_have_attribute("placeholder", "8")
    page.get_by_label("Steps", exact=True).fill("1")
    page.reload()
    expect(page.get_by_label("Steps", exact=True)).to_have_value("1")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    names, before = [], None
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # after the last one
        now = page.evaluate(
            "(() => { const one = document.activeElement; return one.ariaLabel ||"
            " one.labels?.[0]?.textContent || one.textContent || one.tagName; })()"
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        hidden = page.evaluate("document.activeElement.matches('input[type=radio], [role=switch]')")
        assert outline != "none" or hidden or now == before, now  # the focus is visible
        names.append(now)
        before = now
    text = "\n".join(names)
    for name in (
        "Gallery",
        "Prompt",
        "Negative prompt",
        "Model",
        "Default",
        "Steps",
        "Pictures",
        "Seed",
        "Draw a seed",
        "Advanced",
        "Make",
        "Reset",
    ):
        assert name in text, f"{name} in {names}"
    page.get_by_label("Prompt", exact=True).focus()
    page.keyboard.type("a red circle")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("status").filter(has_text="Done in")).to_be_visible()


def test_the_language_is_chosen_kept_and_complete(
    open_page: OpenPage, context: BrowserContext
) -> None:
    page = open_page()
    page.get_by_role("button", name="Language: Deutsch").click()
    for part in PARTS:
        page.goto(f"{page.url.partition('#')[0]}#{part}")
        expect(page.locator(f".main-{part}")).to_be_visible()
    page.goto(f"{page.url.partition('#')[0]}#make")
    expect(page.get_by_role("button", name="Erzeugen")).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == "de"
    page.reload()
    expect(page.get_by_label("Schritte")).to_be_visible()


def test_errors_of_the_worker_are_in_the_language(open_page: OpenPage, watch: Watch) -> None:
    """By their codes, or by the form of their message; unknown ones as the worker says them."""
    watch.allow("status of 400")
    page = open_page()
    page.evaluate("import('/page/lang.js').then((it) => it.speak('de'))")
    page.keyboard.press("Control+Enter")
    alert = page.get_by_role("alert")
    expect(alert.filter(has_text="Dieses Feld darf nicht leer sein.")).to_be_visible()
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.get_by_label("Schritte").fill("2000")
    page.keyboard.press("Control+Enter")
    expect(alert.filter(has_text="Möglich sind ganze Zahlen von 1 bis 1000.")).to_be_visible()
    page.get_by_label("Schritte").fill("1")
    page.get_by_text("Weitere Einstellungen").click()
    page.get_by_label("Guidance endet bei").fill("0.5")
    page.keyboard.press("Control+Enter")
    warning = "guidance_end hat ohne Guidance keine Wirkung."
    expect(page.locator(".make-warning")).to_have_text(warning)
    said = page.evaluate(
        "import('/page/lang.js').then(({ worded }) => [worded('overloaded', 'the queue is full'),"
        " worded('name_taken', '$& exists'), worded(null, 'something else')])"
    )
    amounts = "import('/page/lang.js').then(({ amount }) => ['3.9M', '6B', '?'].map(amount))"
    assert page.evaluate(amounts) == ["3,9\N{NO-BREAK SPACE}Mio.", "6\N{NO-BREAK SPACE}Mrd.", "?"]
    assert said == [
        "Die Warteschlange ist voll.",
        "Diesen Namen gibt es schon ($& exists).",
        "something else",
    ]


def test_a_german_browser_begins_in_german(browser: Any, shapes_worker: Any) -> None:
    page = browser.new_page(locale="de-DE")
    page.goto(shapes_worker.url)
    expect(page.get_by_role("button", name=re.compile("Erzeugen"))).to_be_visible()
    expect(page.locator(".make-facts")).to_contain_text("7,9 MB")
    loaded = "performance.getEntriesByType('resource').map((one) => one.name.split('/page/')[1])"
    assert "lang/de.js" in page.evaluate(loaded)
    assert "lang/en.js" not in page.evaluate(loaded)  # which it has no need of
    page.get_by_role("button", name="Sprache: English").click()
    expect(page.get_by_role("button", name="Make")).to_be_visible()
    page.close()


def test_the_theme_follows_the_system_until_one_is_chosen(open_page: OpenPage) -> None:
    page = open_page()
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colour)
    assert light != dark
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate(colour) == light
    page.reload()
    expect(page.get_by_role("button", name="Dark colours")).to_be_visible()
    assert page.evaluate(colour) == light


def test_motion_is_reduced(open_page: OpenPage) -> None:
    page = open_page()
    found = []
    for motion in ("no-preference", "reduce"):
        page.emulate_media(reduced_motion=motion)
        style = "getComputedStyle(document.querySelector('.switch-track')).transitionDuration"
        found.append(float(page.evaluate(style).removesuffix("s")))
    assert found[0] > 0.01
    assert found[1] < 0.001


def test_nothing_moves_while_a_part_is_loaded(open_page: OpenPage) -> None:
    """Answers of the worker move nothing that can be clicked (web.dev, Layout Shift)."""
    page = open_page()
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.add_init_script(
        "self.moved = 0; new PerformanceObserver((list) => list.getEntries()"
        ".forEach((one) => (moved += one.value))).observe({type: 'layout-shift', buffered: true})"
    )
    last = (".make-facts", ".gallery-limits", '[data-name="shapes:latest"]', ".chat-settings")
    for part, shown in zip(PARTS, last, strict=True):
        page.goto(f"{page.url.partition('#')[0]}#{part}")
        page.reload()
        page.locator(shown).wait_for()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert page.evaluate("moved") < 0.02, part


def test_nothing_is_wider_than_a_phone(open_page: OpenPage) -> None:
    page = open_page()
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    make(page, "a-word-without-an-end" * 40)
    for part in PARTS:
        page.goto(f"{page.url.partition('#')[0]}#{part}")
        expect(page.locator(f".main-{part}")).to_be_visible()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{part}: {width}"
    page.goto(f"{page.url.partition('#')[0]}#make")
    small = page.evaluate(
        "[...document.querySelectorAll('button, a, input, select, summary')]"
        ".filter((one) => one.checkVisibility())"
        ".filter((one) => !one.matches('.skip, .hidden-text, [type=radio], [role=switch]'))"
        ".map((one) => [one.getBoundingClientRect(), one.outerHTML])"
        ".filter(([box]) => box.width < 24 || box.height < 24).map(([box, name]) => name)"
    )
    assert not small  # WCAG 2.2, 2.5.8
