"""The gallery: what it keeps, shows, compares, makes again, exports and removes, in a browser."""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from clowder_aimage.model.picture_mark import GENERATED, PictureMark
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.pictures.provenance.marking import read_mark
from tests.page.picture_steps import kept, make, opened, png
from tests.page.test_page_accessible import violations
from tests.process import run
from tests.worker.conftest import Worker

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.integration
Open = Callable[..., "Page"]
HOSTILE = (
    'it\'s "a" $(touch no) `touch no` \\n ${HOME} !! -x\n\ttwo <b>red</b> circles & '
    "ünïcode\u0085\x07 'END'\nEND"
)
TILES = ".wall-open"
# Fill the gallery with copies of the picture that it has, in one transaction
FILL = """async (count) => {
    const { get, list } = await import('/page/gallery_store.js');
    const { id, blob, thumb, ...entry } = await get((await list())[0].id);
    const opened = indexedDB.open('aimage');
    await new Promise((done) => (opened.onsuccess = done));
    const filled = opened.result.transaction(['entries', 'blobs', 'thumbs'], 'readwrite');
    const put = (name, ...values) => filled.objectStore(name).put(...values);
    for (let at = 1; at <= count; at++) {
        const facts = { ...entry.facts, prompt: `number ${at}` };
        put('entries', { ...entry, id: id + at, inputs: [], facts });
        put('blobs', blob, id + at);
        put('thumbs', thumb, id + at);
    }
    await new Promise((done, fail) => Object.assign(filled, { oncomplete: done, onabort: fail }));
    opened.result.close();
}"""
# The times between frames in milliseconds while the window is scrolled, or is not
FRAMES = """async (distance) => {
    const frame = () => new Promise(requestAnimationFrame);
    const times = [];
    let before = await frame();
    for (let index = 0; index < 60; index++) {
        scrollBy(0, distance);
        const now = await frame();
        times.push(now - before);
        before = now;
    }
    return times;
}"""


def dialog(page: Page, name: str) -> Any:
    return page.get_by_role("dialog", name=name)


def view(page: Page, index: int = 0) -> Any:
    """Open a picture of the wall, and return the viewer."""
    page.locator(TILES).nth(index).click()
    viewer = dialog(page, "Picture")
    viewer.locator(".facts").wait_for()
    return viewer


def test_an_empty_gallery_says_what_it_is_for_and_a_made_picture_appears(open_page: Open) -> None:
    """Limits are stated; another tab shows the picture too; a prompt is text."""
    page = open_page(part="gallery")
    expect(page.get_by_text("No pictures yet")).to_be_visible()
    other = open_page(part="gallery")
    make(other, "<img src=x onerror=alert(1)> a red circle")
    expect(page.locator(TILES)).to_have_count(1)
    expect(page.locator(".wall-caption")).to_have_text("<img src=x onerror=alert(1)> a red circle")
    limits = page.locator(".gallery-limits")
    expect(limits).to_have_text(
        re.compile(r"1 of at most 5,000 pictures, [\d.]+ kB.*may still store [\d.]+ GB\.")
    )
    make(page, "two blue squares")
    page.get_by_label("Search prompts").fill("squares BLUE")
    expect(page.locator(TILES)).to_have_count(1)
    page.get_by_label("Search prompts").fill("elephant")
    expect(page.get_by_text("No picture matches.")).to_be_visible()


def test_the_viewer_keeps_the_focus_and_is_used_with_keys_and_a_finger(
    context: BrowserContext, open_page: Open
) -> None:
    page = open_page(part="gallery")
    for prompt in ("one", "two", "three"):
        make(page, prompt, steps=1)
    first = page.locator(TILES).first
    expect(first).to_have_attribute("aria-label", "Open: three")
    first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    viewer = dialog(page, "Picture")
    prompt = viewer.locator(".viewer-prompt")
    expect(prompt).to_have_text("two")
    for key, shown in (
        ("ArrowRight", "one"),
        ("Home", "three"),
        ("End", "one"),
        ("ArrowLeft", "two"),
    ):
        page.keyboard.press(key)
        expect(prompt).to_have_text(shown)
    expect(viewer.get_by_role("status").first).to_have_text("2 of 3")
    for _ in range(25):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        )
    page.keyboard.press("z")
    expect(viewer.get_by_label("Actual size")).to_have_attribute("aria-pressed", "true")
    assert viewer.locator("img").evaluate("(img) => img.getBoundingClientRect().width") == 128
    page.keyboard.press("f")
    expect(page.locator(".viewer-parts:fullscreen")).to_have_count(1)
    page.keyboard.press("f")
    expect(page.locator(".viewer-parts:fullscreen")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(viewer).to_have_count(0)
    assert page.evaluate("document.activeElement.ariaLabel") == "Open: two"
    page.set_viewport_size({"width": 390, "height": 740})
    prompt = view(page).locator(".viewer-prompt")
    session = context.new_cdp_session(page)
    for start, end, shown in (300, 80, "two"), (80, 300, "three"), (200, 190, "three"):
        for kind, at in ("touchStart", start), ("touchMove", end), ("touchEnd", None):
            points = [] if at is None else [{"x": at, "y": 250}]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        expect(prompt).to_have_text(shown)


def test_a_picture_again_with_one_thing_changed_is_compared_with_it(open_page: Open) -> None:
    """Only the seed differs; the slider is moved by keys and by the pointer."""
    page = open_page(part="gallery")
    make(page, "a red circle", steps=3)
    viewer = view(page)
    viewer.get_by_text("Again, with one thing changed").click()
    expect(viewer.get_by_label("To")).to_have_value("8")
    viewer.get_by_label("To").fill("0x")
    viewer.get_by_role("button", name="Make it again").click()
    expect(viewer.get_by_text("This value is not possible.")).to_be_visible()
    for name, value, range_ in (
        ("steps", "0", "It must be 1 to 1,000."),
        ("width", "100", "It must be 16 to 8,192, a multiple of 16."),
    ):
        viewer.get_by_label("Change", exact=True).select_option(name)
        viewer.get_by_label("To", exact=True).fill(value)
        viewer.get_by_role("button", name="Make it again").click()
        expect(viewer.get_by_text(range_)).to_be_visible()
    viewer.get_by_label("Change", exact=True).select_option("seed")
    viewer.get_by_label("To").fill("41")
    viewer.get_by_role("button", name="Make it again").click()
    compare = dialog(page, "Compare")
    expect(compare.locator(".fact")).to_have_text(["Seed7", "Seed41"])
    made = read_metadata(kept(page, 2))
    assert made == read_metadata(kept(page, 1)) | {"seed": 41}
    slider = compare.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Shift+ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "60 % left")
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", "0 % left")
    box = compare.locator(".compare-box").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
    share = float(slider.input_value())
    assert share == pytest.approx(25, abs=2)
    clip = compare.locator(".compare-left").evaluate("(img) => getComputedStyle(img).clipPath")
    assert float(re.findall(r"([\d.]+)%", clip)[-1]) == pytest.approx(100 - share, abs=0.01)
    page.keyboard.press("Escape")
    expect(compare).to_have_count(0)
    expect(viewer).to_be_visible()


def test_a_grid_of_two_settings_is_made_cancelled_and_saved(
    open_page: Open, tmp_path: Path
) -> None:
    page = open_page(part="gallery")
    make(page, "a red circle", steps=2)
    view(page).get_by_role("button", name="X/Y grid").click()
    page.get_by_label("Values").nth(0).fill("1, 2, 2, 3")
    page.get_by_label("Values").nth(1).fill("7..8")
    page.get_by_role("button", name="Make 6 pictures").click()
    expect(page.locator(".grid-open")).to_have_count(6)
    heads = page.locator("th[scope=col]"), page.locator("th[scope=row]")
    expect(heads[0]).to_have_text(["Steps 1", "Steps 2", "Steps 3"])
    expect(heads[1]).to_have_text(["Seed 7", "Seed 8"])
    expect(page.get_by_text("6 of 6 pictures")).to_be_visible()
    found = [read_metadata(kept(page, number)) for number in range(2, 8)]
    assert [(one["seed"], one["steps"]) for one in found] == [
        (s, t) for s in (7, 8) for t in (1, 2, 3)
    ]
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as one PNG").click()
    saved.value.save_as(tmp_path / "grid.png")
    whole = np.asarray(opened((tmp_path / "grid.png").read_bytes()).convert("RGB"))
    cell = np.asarray(opened(kept(page, 7)).convert("RGB"))  # the last one, in the corner
    assert np.array_equal(whole[-12 - 128 : -12, -12 - 128 : -12], cell)
    assert (whole[:40, -100:] < 128).any()  # the label of its column
    assert read_mark((tmp_path / "grid.png").read_bytes(), "it") == PictureMark(GENERATED)
    page.get_by_label("Values").nth(1).fill("1..9")
    page.get_by_label("Setting").nth(0).select_option("prompt")
    page.get_by_label("Values").nth(0).fill("one\ntwo\nthree")
    page.keyboard.press("Control+Enter")
    page.locator(".grid-open").nth(1).wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Make 27 pictures")).to_be_visible()
    expect(page.get_by_text(re.compile("^[2-9] of 27 pictures$"))).to_be_visible()
    page.get_by_label("Setting").nth(0).select_option("steps")
    page.get_by_label("Values").nth(0).fill("1, many")
    expect(page.get_by_text("These values are not possible: many")).to_be_visible()
    page.get_by_role("button", name="Gallery", exact=True).click()
    expect(page.locator(TILES).first).to_be_visible()


def test_deleted_pictures_are_put_back(open_page: Open) -> None:
    """By the viewer, by keys on the wall, and several at once."""
    page = open_page(part="gallery")
    for prompt in ("one", "two", "three"):
        make(page, prompt, steps=1)
    expect(page.locator(".wall-caption")).to_have_text(["three", "two", "one"])
    data = kept(page, 2)
    view(page, 1).get_by_role("button", name="Delete").click()
    expect(page.locator(".viewer-prompt")).to_have_text("one")
    page.keyboard.press("Escape")
    expect(page.locator(TILES)).to_have_count(2)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".wall-caption")).to_have_text(["three", "two", "one"])
    assert kept(page, 2) == data
    page.locator(TILES).first.focus()
    page.keyboard.press("Delete")
    expect(page.locator(".wall-caption")).to_have_text(["two", "one"])
    page.keyboard.press("Space")
    page.get_by_label("Select picture 2").check()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No pictures yet")).to_be_visible()
    expect(page.get_by_text("2 pictures were deleted.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".wall-caption")).to_have_text(["two", "one"])
    view(page).get_by_text("Again, with one thing changed").click()
    page.get_by_label("To", exact=True).fill("77")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="X/Y grid").click()
    page.get_by_label("Values").nth(0).fill("1, 2")
    page.reload()  # what was typed is kept
    expect(page.locator(TILES)).to_have_count(2)
    view(page).get_by_text("Again, with one thing changed").click()
    expect(page.get_by_label("To", exact=True)).to_have_value("77")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="X/Y grid").click()
    expect(page.get_by_label("Values").nth(0)).to_have_value("1, 2")


def test_a_picture_that_the_browser_cannot_keep_is_shown_and_said(open_page: Open) -> None:
    page = open_page()
    page.evaluate(
        """() => (IDBObjectStore.prototype.put = () => {
            throw new DOMException('no room', 'QuotaExceededError');
        })"""
    )
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".notice-bad")).to_contain_text("no room to keep")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download").click()
    assert read_metadata(saved.value.path().read_bytes())["prompt"] == "a red circle"


def test_axe_finds_nothing_in_the_views_of_pictures(open_page: Open) -> None:
    page = open_page(part="gallery")
    make(page, "a red circle " * 100, steps=1, width=64)
    make(page, "a blue circle", steps=1, guidance=1)
    page.locator(TILES).first.wait_for()
    found = violations(page)
    viewer = view(page)
    for title in ("As a command", "Again, with one thing changed"):
        viewer.get_by_text(title).click()
    found += violations(page)
    viewer.get_by_role("button", name="Compare").click()
    dialog(page, "Compare").locator(".fact").first.wait_for()
    found += violations(page)
    page.keyboard.press("Escape")
    viewer.get_by_role("button", name="X/Y grid").click()
    page.get_by_label("Values").nth(0).fill("1, 1000")
    page.get_by_role("button", name="Make 2 pictures").click()
    page.locator(".grid-open").wait_for()
    found += violations(page)
    page.get_by_role("button", name="Cancel").click()
    page.locator(".grid-open").click()
    viewer.get_by_role("button", name="Use this").click()
    page.set_viewport_size({"width": 1280, "height": 2400})  # the button Make covers nothing
    page.get_by_text("Paint only a part").click()
    page.locator(".mask-canvas").wait_for()
    found += violations(page)
    assert not found, "\n".join(found)


# -- files and commands


def command(page: Page, name: str) -> str:
    """Return a copied text of the picture in the viewer, from the clipboard."""
    viewer = dialog(page, "Picture")
    viewer.get_by_role("radio", name=name).check()
    viewer.get_by_role("button", name="Copy").click()
    expect(page.locator(".notice", has_text="Copied.")).to_be_visible()
    return str(page.evaluate("navigator.clipboard.readText()"))


def run_all(page: Page, worker: Worker, place: Path) -> list[bytes]:
    """Run the three copied texts of the picture in the viewer; return what they wrote."""
    programs = place / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "aimage").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m clowder_aimage.cli "$@"\n'
    )
    (programs / "aimage").chmod(0o755)
    environment = worker.aimage.env() | {"PATH": f"{programs}:{os.environ['PATH']}"}
    dialog(page, "Picture").get_by_text("As a command").click()
    found = []
    for name, interpreter in ("aimage run", "bash"), ("curl", "bash"), ("Python", sys.executable):
        before = set(place.glob("*.png"))
        done = run([interpreter, "-c", command(page, name)], cwd=place, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        (made,) = set(place.glob("*.png")) - before
        found.append(made.read_bytes())
        made.unlink()
    return found


def test_a_download_and_copied_commands_have_the_bytes_of_the_worker(
    context: BrowserContext, open_page: Open, shapes_worker: Worker, tmp_path: Path
) -> None:
    """The prompt has all kinds of characters."""
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = open_page(part="gallery")
    fields = {"negative": "-it's $HOME", "guidance": 1.5, "steps": 2, "shift": 2, "width": 64}
    number, _ = make(page, HOSTILE, **fields | {"seed": str(2**64 - 1), "height": 96})
    with page.expect_download() as saved:
        view(page).get_by_role("button", name="Download").click()
    assert re.fullmatch(
        r"it-s-a-touch-no-[\w-]+-18446744073709551615\.png", saved.value.suggested_filename
    )
    data = saved.value.path().read_bytes()
    assert data == kept(page, number)
    assert read_metadata(data)["seed"] == 2**64 - 1
    assert run_all(page, shapes_worker, tmp_path) == [data] * 3
    assert not (tmp_path / "no").exists()


def test_copied_commands_name_the_pictures_that_they_need(
    context: BrowserContext, open_page: Open, shapes_worker: Worker, tmp_path: Path
) -> None:
    """The viewer saves them under these names."""
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = open_page(part="gallery")
    page.evaluate(
        """async ([image, mask]) => {
            const { EMPTY } = await import('/page/state.js');
            const { generate } = await import('/page/generation.js');
            const bytes = (data) => Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
            const blob = (data) => new Blob([bytes(data)], { type: 'image/png' });
            const pictures = { images: [blob(image)], mask: blob(mask), strength: 0.75 };
            const more = { paste: true, feather: 4, seed: 5, steps: 2, previews: 0 };
            const prompt = '- a blue $circle';
            await generate({ ...EMPTY, model: 'shapes:latest', prompt, ...pictures, ...more });
        }""",
        [base64.b64encode(png(colour, (96, 64))).decode() for colour in ("red", "white")],
    )
    viewer = view(page)
    viewer.get_by_text("As a command").click()
    for button in viewer.locator("button.chip").all():
        with page.expect_download() as saved:
            button.click()
        saved.value.save_as(tmp_path / saved.value.suggested_filename)
    viewer.get_by_text("As a command").click()
    assert run_all(page, shapes_worker, tmp_path) == [kept(page, 1)] * 3


# -- many pictures


@pytest.mark.slow
def test_thousands_of_pictures_scroll_smoothly(
    context: BrowserContext, open_page: Open, record_property: Any
) -> None:
    """A frame costs less processor time than a frame of 60 a second has, however busy others are.

    The times between frames, which depend on those, are recorded.
    """
    page = open_page(part="gallery")
    make(page, "a red circle", steps=1)
    page.evaluate(FILL, 1999)
    page.reload()
    expect(page.locator(".gallery-limits")).to_contain_text("2,000 of at most")
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        """Return the processor time of the page's thread, in milliseconds."""
        found = session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(one["value"] for one in found if one["name"] == "ThreadTime")

    before = busy()
    times = page.evaluate(FRAMES, 120)
    cost = (busy() - before) / len(times)
    record_property("frames", f"median {np.median(times):.1f} ms, processor {cost:.1f} ms")
    assert page.evaluate("scrollY") >= 60 * 120
    assert cost < 1000 / 60
    assert page.locator(".wall-tile").count() < 160
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(page.locator(".wall-caption").last).to_have_text("a red circle")
    expect(page.locator(".wall-tile img").last).to_be_visible()
