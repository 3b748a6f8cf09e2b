"""Take the screenshots of the documentation: ``python -m tests.page.screenshots``.

It starts a worker with the shapes model, makes pictures in the page, and writes
``docs/page-PART-LOOK.png``. Look at them before they are committed.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import ROOT
from tests.page.conftest import ARGUMENTS, CHROMIUM, SHAPES
from tests.process import Aimage
from tests.worker.conftest import Worker, begin

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 820}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 820}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}
PROMPTS = (
    "a red circle above a blue square",
    "three green triangles",
    "a yellow star on a black background",
    "two blue squares",
    "a purple cross left of an orange circle",
    "a small red star",
    "a white circle on a gray background",
    "an orange triangle below a green star",
    "two red circles",
    "a blue cross",
    "a yellow square right of a purple triangle",
    "three orange stars",
)
# Make the pictures of the gallery as the form does, at sizes of several aspects
FILL = """async (prompts) => {
  const { generate } = await import('/page/generation.js');
  const { EMPTY } = await import('/page/state.js');
  const sizes = [[128, 128], [160, 112], [112, 160]];
  for (const [index, prompt] of prompts.entries()) {
    const [width, height] = sizes[index % 4 === 3 ? 1 : index % 5 === 4 ? 2 : 0];
    await generate({...EMPTY, prompt, width, height, seed: 100 + index, previews: 0});
  }
}"""

# Scroll until the tools of the mask, which are below the picture, are just above the button Make
TO_THE_TOOLS = """() => {
  const end = document.querySelector('.mask-editor').getBoundingClientRect().bottom;
  scrollBy(0, end - document.querySelector('.make-actions').getBoundingClientRect().top + 16);
}"""


@contextmanager
def serving() -> Iterator[Worker]:
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        aimage = Aimage(here, here / "store")
        aimage.process("create", "-q", "shapes", SHAPES / "model")
        aimage.process("create", "-q", "shapes:int8", SHAPES / "model", "--quantize", "int8")
        aimage.process("create", "-q", "words", SHAPES / "enhancer")
        lora = SHAPES / "azure.safetensors"
        aimage.process("create", "-q", "azure", lora, "--base", "shapes")
        worker = begin(
            aimage, "--default-model", "shapes", "--enhancer", "words", "--max-models", 2
        )
        try:
            yield worker
        finally:
            worker.end()


def save(page: Page, name: str) -> None:
    """Write a screenshot with a palette, a third of the size."""
    from PIL import Image

    page.wait_for_timeout(400)  # transitions
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        small = picture.convert("RGB").quantize(200, dither=Image.Dither.NONE)
        small.save(ROOT / "docs" / f"page-{name}.png", optimize=True)


def make(page: Page, look: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(PROMPTS[0])
    page.get_by_label("Seed", exact=True).fill("7")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".make-result")
    page.evaluate("document.activeElement.blur()")
    save(page, f"make-{look}")


def gallery(page: Page, look: str) -> None:
    page.evaluate(FILL, PROMPTS)
    page.goto(page.url.partition("#")[0] + "#gallery")
    page.get_by_role("button", name="Open: three orange stars").wait_for()
    page.wait_for_load_state("networkidle")
    save(page, f"gallery-{look}")


def mask(page: Page, look: str) -> None:
    page.goto(page.url.partition("#")[0] + "#make")
    page.get_by_role("button", name="Use this").click()
    page.get_by_text("Paint only a part").click()
    canvas = page.get_by_role("application").or_(page.locator("canvas")).last
    canvas.wait_for()
    page.evaluate(TO_THE_TOOLS)
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    for part in (0.45, 0.5, 0.55, 0.6):
        page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * 0.3)
    page.mouse.up()
    save(page, f"mask-{look}")


def models(page: Page, look: str) -> None:
    page.goto(page.url.partition("#")[0] + "#models")
    page.get_by_text("shapes:int8").first.wait_for()
    save(page, f"models-{look}")


def main() -> None:
    from playwright.sync_api import sync_playwright

    parts = {"make": make, "gallery": gallery, "mask": mask, "models": models}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("looks", nargs="*", default=[*LOOKS])
    looks = parser.parse_args().looks
    with serving() as worker, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        for look in looks:
            context = browser.new_context(locale="en-GB", reduced_motion="reduce", **LOOKS[look])
            context.set_default_timeout(120_000)
            page = context.new_page()
            page.goto(worker.url)
            for take in parts.values():
                take(page, look)
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
