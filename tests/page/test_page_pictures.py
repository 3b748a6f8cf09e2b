"""Pictures to begin with: given, masked, sent, and taken from files, in a real browser."""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from PIL import Image
from playwright.sync_api import expect

from clowder_aimage.model.picture import encode_picture
from clowder_aimage.model.picture_mark import COMPOSITE, GENERATED, PictureMark
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.pictures.provenance.marking import read_mark
from tests.conftest import TINY
from tests.controlnet_file import tensors, write_file
from tests.page.conftest import Watch
from tests.page.picture_steps import (
    digest,
    draft,
    give,
    kept,
    make,
    opened,
    png,
    with_chunk,
    with_facts,
)
from tests.process import Aimage
from tests.store import copy_store
from tests.worker.conftest import LocalWorker, Worker

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page, Route

pytestmark = pytest.mark.integration
Open = Callable[..., "Page"]
DROP = ".pictures-drop"
RED = ("red.png", "image/png", png("red"))
HOSTILE = "<img src=x onerror=alert(1)> ' \" ` $(id) </textarea><script>alert(1)</script>"


def unfold(page: Page, title: str = "Picture to begin with") -> None:
    page.locator("summary", has_text=title).click()


def begin_with(page: Page, data: bytes = RED[2]) -> None:
    """Choose the picture to begin with."""
    page.locator("input[type=file]").first.set_input_files(
        {"name": "red.png", "mimeType": "image/png", "buffer": data}
    )
    page.locator(".pictures-chosen").wait_for()


def mask_canvas(page: Page) -> Locator:
    """Turn the mask on, and return its canvas."""
    page.set_viewport_size({"width": 1280, "height": 1600})  # all of it is seen, and at rest:
    expect(page.get_by_role("button", name=re.compile("^Make"))).to_be_enabled()
    page.get_by_text("Paint only a part").click()
    canvas = page.locator(".mask-canvas")
    canvas.wait_for()
    canvas.scroll_into_view_if_needed()
    return canvas


def stroke(page: Page, canvas: Locator, *points: tuple[float, float]) -> None:
    """Draw with the mouse through points, as parts of the canvas."""
    box = canvas.bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=4)
    page.mouse.up()


def given_mask(page: Page) -> bytes | None:
    """Return the mask of the form, once the page has made it."""
    page.locator(".mask-editor[aria-busy=false]").wait_for()
    data: bytes | None = draft(page)["mask"]
    return data


def mask(page: Page) -> np.ndarray:
    """Return the mask of the form; 255 is painted."""
    data = given_mask(page)
    assert data is not None
    picture = opened(data)
    assert picture.format == "PNG"
    return np.asarray(picture.convert("L"))


# -- giving pictures


def test_a_picture_is_chosen_dropped_or_pasted(open_page: Open) -> None:
    """The bytes are kept as they are, also over a reload. Other files are refused in words."""
    page = open_page()
    unfold(page)
    give(page, DROP, ("notes.png", "image/png", b"not a picture"))
    message = "notes.png is not a picture that this browser can read."
    expect(page.locator(".field-error")).to_have_text(message)
    assert draft(page)["images"] == []
    begin_with(page)
    assert draft(page)["images"] == [RED[2]]
    page.get_by_role("button", name="Remove picture 1").click()
    expect(page.locator(".pictures-chosen")).to_have_count(0)
    give(page, DROP, ("blue.png", "image/png", png("blue")))
    page.locator(".pictures-chosen").wait_for()
    assert draft(page)["images"] == [png("blue")]
    page.get_by_role("button", name="Remove picture 1").click()
    give(page, DROP, RED, kind="paste")
    expect(page.locator(".pictures-size")).to_have_text("128 × 96")
    page.reload()
    expect(page.locator(".pictures-size")).to_have_text("128 × 96")
    assert draft(page)["images"] == [RED[2]]


def test_strength_and_the_picture_are_in_the_request(open_page: Open) -> None:
    """The worker states the digest of the same bytes; a result is used for the next."""
    page = open_page()
    unfold(page)
    begin_with(page)
    strength = page.get_by_label("Strength", exact=True)
    expect(strength).to_have_value("0.6")
    strength.fill("0.5")
    page.get_by_label("Prompt", exact=True).fill("a red square")
    page.get_by_role("button", name=re.compile("^Make")).click()
    page.get_by_role("button", name="Use this").click()
    made = draft(page)["images"][0]
    facts = read_metadata(made)
    assert (facts["strength"], facts["image"]) == (0.5, digest(RED[2]))
    assert (facts["width"], facts["height"]) == (128, 96)
    assert facts["prompt"] == "a red square"


def result(page: Page) -> tuple[dict[str, Any], tuple[int, int]]:
    """Make a picture with the form; return its facts and its size."""
    page.get_by_role("button", name=re.compile("^Make")).click()
    expect(page.locator(".make-state")).to_contain_text("Done in")
    number = page.evaluate(
        "import('/page/gallery_store.js').then((it) => it.list()).then((it) => it[0].id)"
    )
    data = kept(page, number)
    return read_metadata(data), opened(data).size


def test_a_result_is_enlarged_and_a_picture_is_painted_around(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.get_by_label("Steps").fill("2")
    result(page)
    page.get_by_label("Prompt", exact=True).fill("a blue star")
    page.get_by_role("button", name="Enlarge").click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a red circle")
    expect(page.get_by_text("The result has 256 × 256 pixels.")).to_be_visible()
    expect(page.get_by_label("Strength", exact=True)).to_have_value("0.2")
    page.get_by_label("Factor").fill("1.5")
    facts, size = result(page)
    assert (facts["upscale"], facts["prompt"], size) == (1.5, "a red circle", (192, 192))
    expect(page.locator(".make-result-facts")).to_contain_text("192 × 192")
    page.get_by_label("Paint around it").check(force=True)
    expect(page.get_by_text("Paint only a part")).to_have_count(0)
    for name, pixels in ("Left", "0"), ("Top", "16"), ("Right", "48"), ("Bottom", "0"):
        page.get_by_label(name, exact=True).fill(pixels)
    facts, size = result(page)
    assert (facts["expand"], facts["strength"], size) == ([0, 16, 48, 0], 1.0, (176, 144))
    page.get_by_label("Off", exact=True).check(force=True)
    expect(page.get_by_text("Paint only a part")).to_be_visible()


# -- masks


def draw_with_keys(page: Page) -> None:
    """Move the brush, enlarge it, paint a dot and erase it with keys alone."""
    page.get_by_label("Mask on the picture").focus()
    page.mouse.move(0, 0)  # the brush is in the middle
    for key in ("Shift+ArrowUp", "Shift+ArrowUp", "ArrowUp", "]", "]", "Space"):
        page.keyboard.press(key)
    painted = mask(page)
    place = 48 - round(128 * 0.02 * 11)
    assert (painted[place, 64], painted[48, 64]) == (255, 0)
    width = int((painted[place] >= 128).sum())
    assert 18 <= width <= 22  # 16 % of 128 pixels
    expect(page.locator(".mask-editor [role=status]")).to_have_text(re.compile("[1-9] % of the"))
    page.keyboard.press("e")
    page.keyboard.press("Space")
    assert given_mask(page) is None


def test_a_mask_is_brushed_undone_inverted_and_drawn_with_keys(open_page: Open) -> None:
    page = open_page()
    unfold(page)
    begin_with(page)
    canvas = mask_canvas(page)
    stroke(page, canvas, (0.2, 0.5), (0.8, 0.5))
    first = mask(page)
    assert first.shape == (96, 128)
    assert (first[48, 30], first[48, 100], first[5, 64], first[90, 64]) == (255, 255, 0, 0)
    stroke(page, canvas, (0.5, 0.1), (0.5, 0.2))
    assert mask(page)[14, 64] == 255
    page.keyboard.press("Control+z")
    assert np.array_equal(mask(page), first)
    page.keyboard.press("Control+Shift+z")
    assert mask(page)[14, 64] == 255
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Invert the mask").click()
    turned = mask(page)
    assert (turned[48, 30], turned[5, 64]) == (0, 255)
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Eraser").click()
    stroke(page, canvas, (0.2, 0.5), (0.45, 0.5))
    erased = mask(page)
    assert (erased[48, 30], erased[48, 100]) == (0, 255)
    page.get_by_role("button", name="Clear the mask").click()
    assert given_mask(page) is None
    page.get_by_role("button", name="Brush").click()
    draw_with_keys(page)


def test_a_finger_and_a_pen_draw_with_its_pressure(
    context: BrowserContext, open_page: Open
) -> None:
    page = open_page()
    unfold(page)
    begin_with(page)
    canvas = mask_canvas(page)
    box = canvas.bounding_box()
    assert box is not None
    session = context.new_cdp_session(page)

    def place(across: float, down: float) -> dict[str, float]:
        return {"x": box["x"] + across * box["width"], "y": box["y"] + down * box["height"]}

    for kind, at in ("touchStart", 0.2), ("touchMove", 0.5), ("touchEnd", None):
        points = [] if at is None else [place(at, 0.25)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touched = mask(page)
    assert (touched[24, 40], touched[72, 40]) == (255, 0)
    widths = []
    for row, force in (0.5, 0.2), (0.8, 1.0):
        for kind in ("mousePressed", "mouseReleased"):
            pen = {"type": kind, "button": "left", "pointerType": "pen", "force": force}
            session.send("Input.dispatchMouseEvent", pen | place(0.75, row) | {"clickCount": 1})
        widths.append(int((mask(page)[round(96 * row), 70:] >= 128).sum()))
    assert widths[0] < 0.6 * widths[1]


def test_a_mask_stays_over_a_reload_and_only_its_part_is_painted(open_page: Open) -> None:
    page = open_page()
    unfold(page)
    begin_with(page)
    stroke(page, mask_canvas(page), (0.6, 0.2), (0.6, 0.8), (0.9, 0.8), (0.9, 0.2), (0.75, 0.5))
    page.get_by_label("Softness of the edge").fill("6")
    before = mask(page)
    page.reload()
    page.locator(".mask-canvas").wait_for()
    assert np.array_equal(mask(page), before)
    page.get_by_label("Prompt", exact=True).fill("a blue square")
    page.get_by_role("button", name=re.compile("^Make")).click()
    page.get_by_role("button", name="Use this").wait_for()
    number = page.evaluate(
        "import('/page/gallery_store.js').then((it) => it.list()).then((it) => it[0].id)"
    )
    made = kept(page, number)
    facts = read_metadata(made)
    assert (facts["paste"], facts["feather"], facts["strength"]) == (True, 6, 1.0)
    pixels = np.asarray(opened(made).convert("RGB"))
    assert (pixels[:, :40] == (255, 0, 0)).all()
    assert (pixels[before >= 128] != (255, 0, 0)).any()


# -- control pictures and references


def fields_of(route: Route) -> list[tuple[str, bytes]]:
    """Return the parts of a form, in order."""
    head = f"Content-Type: {route.request.headers['content-type']}\r\n\r\n".encode()
    found = []
    for part in message_from_bytes(head + (route.request.post_data_buffer or b"")).walk():
        content = part.get_payload(decode=True)
        if isinstance(content, bytes):
            found.append((str(part.get_param("name", header="content-disposition")), content))
    return found


def test_the_worker_says_that_a_control_picture_lacks_a_controlnet(
    open_page: Open, watch: Watch
) -> None:
    """The request has the picture and its strength; the message is beside the field."""
    watch.allow("status of 422")
    sent: list[dict[str, Any]] = []
    page = open_page()

    def seen(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        route.continue_()

    page.route("**/v1/images/generations", seen)
    unfold(page, "Control picture")
    page.locator("input[type=file]").last.set_input_files(
        {"name": "edges.png", "mimeType": "image/png", "buffer": RED[2]}
    )
    page.get_by_label("Control strength").fill("1.25")
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.get_by_role("button", name=re.compile("^Make")).click()
    expect(
        page.locator(".field", has_text="ControlNet").locator(".field-error").first
    ).to_contain_text("controlnet is required")
    assert sent[0]["control_strength"] == 1.25
    assert sent[0]["control"].startswith("data:image/png;base64,")


def test_references_are_added_ordered_and_sent_to_models_that_edit(
    context: BrowserContext, open_page: Open, shapes_worker: Worker, watch: Watch
) -> None:
    """The list of models says that this one takes four; nothing else of pictures is sent."""
    watch.allow("status of 400")
    sent: list[list[tuple[str, bytes]]] = []
    known = shapes_worker.get("/v1/models")
    known["data"] = [model | {"max_images": 4} for model in known["data"]]

    def taken(route: Route) -> None:
        sent.append(fields_of(route))
        route.fulfill(status=400, json={"error": {"message": "seen", "param": "image"}})

    context.route("**/v1/models", lambda route: route.fulfill(json=known))
    context.route("**/v1/images/edits", taken)
    page = open_page()
    unfold(page, "Pictures to edit")
    colours = ["red", "green", "blue", "black"]
    files = [(f"{one}.png", "image/png", png(one)) for one in colours]
    give(page, DROP, *files[:3])
    expect(page.locator(".pictures-chosen")).to_have_count(3)
    give(page, DROP, files[3], RED)
    expect(page.locator(".pictures-chosen")).to_have_count(4)
    expect(page.locator(DROP)).to_have_count(0)
    page.get_by_role("button", name="Move picture 3 forward").click()
    page.locator(".pictures-chosen").nth(3).drag_to(page.locator(".pictures-chosen").nth(0))
    page.get_by_role("button", name="Remove picture 4").click()
    order = ["black", "red", "blue"]
    assert draft(page)["images"] == [png(one) for one in order]
    page.get_by_label("Prompt", exact=True).fill("image 1 beside image 2")
    page.get_by_role("button", name=re.compile("^Make")).click()
    expect(page.locator(".field-error")).to_contain_text("seen")
    names = [name for name, _ in sent[0]]
    assert [data for name, data in sent[0] if name == "image[]"] == [png(one) for one in order]
    assert not {"mask", "strength", "fit", "paste", "feather", "crop", "control"} & {*names}


@pytest.fixture(scope="module")
def guided_worker(
    flux2_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalWorker]:
    """Return a worker with ``tiny``, its ControlNet ``control``, and ``flux``, which edits."""
    home = tmp_path_factory.mktemp("guided")
    copy_store(flux2_store, home / "store")
    here = Aimage(home, home / "store")
    here("create", "-q", "tiny", TINY)
    here("create", "-q", "control", write_file(home / "union.safetensors", tensors()))
    worker = LocalWorker(here, "--default-model", "tiny")
    yield worker
    worker.end()


def test_a_control_picture_guides(open_page: Open, guided_worker: LocalWorker) -> None:
    page = open_page(url=guided_worker.url)
    page.get_by_label("Prompt", exact=True).fill("a fox")
    page.get_by_label("Steps").fill("1")
    unfold(page, "Control picture")
    page.locator("input[type=file]").last.set_input_files(
        {"name": "edges.png", "mimeType": "image/png", "buffer": png("red", (64, 48))}
    )
    page.get_by_label("ControlNet").fill("control")
    facts, size = result(page)
    assert facts["controlnet"].startswith("control@sha256:")
    assert (facts["control"], size) == (digest(png("red", (64, 48))), (64, 48))


def test_references_are_edited_in_their_order(open_page: Open, guided_worker: LocalWorker) -> None:
    page = open_page(url=guided_worker.url)
    page.get_by_label("Model", exact=True).select_option("flux:latest")
    unfold(page, "Pictures to edit")
    given = [png(colour, (64, 80)) for colour in ("navy", "orange")]
    give(page, DROP, *((f"{index}.png", "image/png", one) for index, one in enumerate(given)))
    expect(page.locator(".pictures-chosen")).to_have_count(2)
    page.get_by_role("button", name="Move picture 2 forward").click()
    page.get_by_label("Prompt", exact=True).fill("both")
    page.get_by_label("Steps").fill("1")
    facts, _ = result(page)
    assert facts["references"] == [digest(one) for one in reversed(given)]


# -- files that are dropped anywhere


def test_a_picture_dropped_anywhere_loads_its_settings(open_page: Open) -> None:
    page = open_page(part="gallery")
    number, facts = make(page, "two blue circles", steps=3, seed="18446744073709551610")
    data = kept(page, number)
    page.reload()
    page.wait_for_selector("#main *")
    give(page, "body", ("circles.png", "image/png", data))
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("two blue circles")
    found = draft(page)
    assert (found["steps"], found["width"], found["model"]) == (3, 128, "shapes:latest")
    assert (found["seed"], found["seedLocked"]) == ("18446744073709551610", True)
    advanced = page.locator("summary", has_text="Advanced")
    expect(advanced).to_have_text("Advanced")  # the values are the model's
    advanced.click()
    page.get_by_label("Guidance", exact=True).fill("1.5")
    expect(advanced).to_contain_text("1 changed")
    again, same = make(page, found["prompt"], **{name: found[name] for name in ("seed", "steps")})
    assert same == facts
    assert kept(page, again) == data


def test_jpeg_and_webp_files_load_their_settings(open_page: Open, shapes_worker: Worker) -> None:
    """Of the worker; and one whose Exif data is cut off, which is a picture to begin with."""
    page = open_page()
    for kind, steps in ("jpeg", 2), ("webp", 3):
        asked = {"prompt": f"a {kind} star", "steps": steps, "seed": 2**64 - 5}
        body = json.dumps(asked | {"output_format": kind}).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{shapes_worker.url}/v1/images/generations"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            data = base64.b64decode(json.load(answer)["data"][0]["b64_json"])
        give(page, "body", (f"star.{kind}", f"image/{kind}", data))
        expect(page.get_by_label("Prompt", exact=True)).to_have_value(f"a {kind} star")
        found = draft(page)
        assert (found["steps"], found["seed"]) == (steps, str(2**64 - 5))
        assert found["images"] == []
        cut = data.replace(b"MM\0*", b"MM\0*\x7f", 1)[: len(data)]
        assert cut != data
        facts = (
            "import('/page/exif_facts.js').then((it) => it.exifText(new Uint8Array(data).buffer))"
        )
        assert page.evaluate(f"(data) => {facts}", list(cut)) == ""


def take_of_another_program(page: Page) -> None:
    """Paste a picture of stable-diffusion-webui, whose settings are loaded."""
    text = (
        "a red square\non white\nNegative prompt: blurry\n"
        'Steps: 6, Sampler: Euler, CFG scale: 2.5, Seed: 11, Size: 96x64, Model: "a, b", Version: 1'
    )
    data = with_chunk(png(), b"tEXt", b"parameters\0" + text.encode())
    give(page, "body", ("other.png", "image/png", data), kind="paste")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a red square\non white")
    found = draft(page)
    assert (found["steps"], found["guidance"], found["seed"], found["width"]) == (6, 2.5, 11, 96)
    assert found["negative"] == "blurry"
    expect(page.get_by_text("the model a, b, which this worker does not have")).to_be_visible()


def test_facts_of_strangers_are_text_and_have_the_right_types(open_page: Open) -> None:
    """A picture without facts becomes the one to begin with."""
    page = open_page()
    expect(page.get_by_role("button", name=re.compile("^Make"))).to_be_enabled()
    facts = {"prompt": HOSTILE, "steps": "9", "seed": -1, "width": 1e9, "loras": [{"model": 1}]}
    facts |= {"reference": HOSTILE, "guidance": 3, "mask": "alpha", "__proto__": {"steps": 5}}
    give(page, "body", ("hostile.png", "image/png", with_facts(png(), facts)))
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(HOSTILE)
    found = draft(page)
    assert (found["steps"], found["seed"], found["width"]) == (None, None, None)
    assert (found["loras"], found["guidance"]) == ([], 3)
    expect(page.locator(".notice", has_text="onerror=alert(1)")).to_be_visible()
    assert page.locator("main img[src=x], .notices img").count() == 0
    give(page, "body", ("plain.png", "image/png", png("green")))
    expect(page.locator(".pictures-chosen")).to_have_count(1)
    assert draft(page)["images"] == [png("green")]
    take_of_another_program(page)


# -- origin


def marked(kind: str, mark: PictureMark | None) -> bytes:
    return encode_picture(np.full((96, 128, 3), 200, np.uint8), None, kind, mark=mark)


_ORIGINS = """async (files) => {
    const { originOf } = await import('/page/origin.js');
    const bytes = (data) => Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    return Promise.all(files.map((data) => originOf(new Blob([bytes(data)]))));
}"""


def read_origins(page: Page, *files: bytes) -> list[dict[str, Any]]:
    texts = [base64.b64encode(data).decode() for data in files]
    found: list[dict[str, Any]] = page.evaluate(_ORIGINS, texts)
    return found


def test_the_page_reads_marks_and_signers_as_the_program_does(
    open_page: Open, tmp_path: Path
) -> None:
    signing = pytest.importorskip("tests.provenance.signing", reason="c2pa is not installed")
    page, signer = open_page(), signing.open_signer(tmp_path)
    for kind in ("png", "jpeg", "webp"):
        plain = marked(kind, PictureMark(COMPOSITE))
        signed = signer.sign(plain, kind, PictureMark(COMPOSITE), (), None)
        found = read_origins(page, marked(kind, None), plain, signed, signed[:300], b"")
        short = {"sourceType": "compositeWithTrainedAlgorithmicMedia"}
        nothing = {"sourceType": "", "isSigned": False, "signer": ""}
        assert found[:3] == [
            nothing,
            nothing | short,
            short | {"isSigned": True, "signer": "Test pictures"},
        ]
        assert found[4] == nothing


def test_the_viewer_shows_where_a_picture_is_from_and_the_download_says_it(
    open_page: Open,
) -> None:
    page = open_page(part="gallery")
    number, _ = make(page, "a red circle")
    page.locator(".wall-open").first.click()
    expect(page.locator(".origin")).to_have_text("OriginMade by a model")
    assert read_mark(kept(page, number), "it") == PictureMark(GENERATED)


def test_the_mark_of_a_dropped_picture_is_shown_and_its_loss_is_said(open_page: Open) -> None:
    page = open_page()
    give(page, "body", ("made.webp", "image/webp", marked("webp", PictureMark(GENERATED))))
    expect(page.locator(".origin")).to_have_text("Made by a model")
    file = io.BytesIO()
    Image.new("RGB", (128, 96)).save(file, "GIF")
    give(page, "body", ("old.gif", "image/gif", file.getvalue()))
    lost = "old.gif becomes a PNG, and what it says about its origin is lost."
    expect(page.get_by_text(lost)).to_be_visible()
