"""Make: the form, its previews, its errors, and what a person typed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from annotated_types import Gt, Le

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from clowder_aimage.api import page_parameter
from clowder_aimage.generation.parameter import Words, list_parameters
from clowder_aimage.generation.request import ParameterLocation, map_parameter_locations
from tests.page.conftest import Watch
from tests.page.picture_steps import draft, give, png, with_facts
from tests.process import Aimage
from tests.worker.conftest import Worker, begin

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Request

pytestmark = pytest.mark.integration
OpenPage = Callable[..., "Page"]
# The page waits a tenth of its pauses between tries
IMPATIENT = """() => {
    const real = setTimeout;
    window.setTimeout = (act, pause) => real(act, pause / 10);
}"""
# The connection of the next request for pictures is lost after the first of them
CUT = """() => {
    const real = fetch;
    window.fetch = async (path, options) => {
        if (!path.startsWith('/v1/images/')) return real(path, options);
        window.fetch = real;
        const body = JSON.stringify({ ...JSON.parse(options.body), n: 1 });
        const answer = await real(path, { ...options, body });
        const parts = [new Uint8Array(await answer.arrayBuffer())];
        const lose = (to) => to.error(new Error('lost'));
        const pull = (to) => (parts.length ? to.enqueue(parts.shift()) : lose(to));
        return new Response(new ReadableStream({ pull }, { highWaterMark: 0 }), answer);
    };
}"""
# The requests for a picture whose prompt was enhanced: as it is, with another prompt, and of
# workers whose enhancer is any language model, with an adapter in the prompt, or none
ENHANCED = """async () => {
    const { draftOf } = await import('/page/picture_draft.js');
    const { requestOf } = await import('/page/generation.js');
    const { withSetting } = await import('/page/setting.js');
    const { models, worker } = await import('/page/state.js');
    const facts = { prompt: 'a long one', original_prompt: 'short', enhancer: 'words@1' };
    const made = () => draftOf(facts).draft;
    const found = [made(), withSetting(made(), 'prompt', 'other')];
    worker.value = { ...worker.value, enhancer: null };
    found.push({ ...made(), prompt: 'other' });
    const tagged = 'short <lora:azure:1>';
    found.push({ ...made(), prompt: tagged, enhancedFrom: tagged });
    models.value = [];
    found.push({ ...made() });
    const names = ['prompt', 'enhance', 'original_prompt', 'enhancer'];
    return found.map(requestOf).map((one) => names.map((name) => one[name] ?? null));
}"""


def write(page: Page, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)


def make(page: Page, prompt: str = "") -> None:
    """Make a picture with the keyboard and wait until it is shown."""
    if prompt:
        write(page, prompt)
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text(re.compile("Done|pictures in"))


def sent(request: Request) -> dict[str, Any]:
    return json.loads(request.post_data or "{}")


def test_a_picture_is_made_with_previews_steps_and_the_settings_of_the_form(
    open_page: OpenPage,
) -> None:
    page = open_page()
    write(page, "a red circle")
    expect(page.get_by_label("Steps")).to_have_attribute("placeholder", "8")  # the model's
    page.get_by_label("Steps").fill("6")
    page.get_by_label("Seed", exact=True).fill("7")
    page.get_by_text("Advanced").click()
    page.get_by_label("Guidance", exact=True).fill("1.5")
    page.get_by_label("Shift").fill("2")
    page.get_by_text("Negative prompt").first.click()
    page.get_by_label("Negative prompt").fill("blue")
    texts: list[str] = []
    page.expose_function("note", lambda text: texts.append(text))
    page.evaluate(
        "() => new MutationObserver(() => note("
        "['.make-state', '.make-forming', '[role=progressbar]']"
        ".map((one) => document.querySelector(one)).map((one) => one?.ariaLabel ?? one?.alt"
        " ?? one?.textContent).join('; ')))"
        ".observe(document.body, {subtree: true, childList: true, characterData: true})"
    )
    with page.expect_request("**/v1/images/generations") as asked:
        page.get_by_role("button", name="Make").click()
    expect(page.locator(".make-state")).to_contain_text("Done in")
    assert any("Step 3 of 6" in text and "left" in text for text in texts), texts
    assert any("; Preview of the picture; Progress" in text for text in texts), texts
    assert sent(asked.value) | {"stream": True} == {
        "model": "shapes:latest",
        "prompt": "a red circle",
        "stream": True,
        "stream_format": "openai+progress",
        "negative_prompt": "blue",
        "steps": 6,
        "seed": 7,
        "guidance": 1.5,
        "shift": 2,
        "n": 1,
        "partial_images": 3,
    }
    facts = page.locator(".make-result-facts")
    expect(facts).to_have_text("128 × 128 · seed 7 · 6 steps")
    size = page.locator(".make-picture").evaluate("image => [image.naturalWidth, image.alt]")
    assert size == [128, "Picture made from: a red circle"]


def test_the_model_is_shown_with_its_size_precision_and_whether_it_is_in_memory(
    open_page: OpenPage, shapes_worker: Worker
) -> None:
    page = open_page()
    facts = page.get_by_role("list", name="Facts of the model")
    expect(facts).to_contain_text("7.9 MB")
    expect(facts).to_contain_text("BF16")
    make(page, "a red circle")
    expect(facts.get_by_text("in memory", exact=True)).to_be_visible()
    chooser = page.get_by_label("Model", exact=True)
    options = chooser.evaluate("select => [...select.options].map((one) => one.value)")
    assert "shapes:latest" in options
    assert "words:latest" not in options  # a language model


def test_sizes_follow_from_the_aspect_the_scale_and_the_model(
    open_page: OpenPage, watch: Watch
) -> None:
    watch.allow("status of 400")
    page = open_page()
    page.get_by_label("16:9").check(force=True)
    hint = page.locator(".slider-value").first
    expect(hint).to_have_text("176 × 96 pixels")
    page.get_by_role("button", name="Swap width and height").click()
    expect(hint).to_have_text("96 × 176 pixels")
    page.get_by_label("Scale × 1", exact=True).fill("5")
    expect(hint).to_have_text("192 × 336 pixels")
    page.get_by_label("Free").check(force=True)
    page.get_by_label("Width", exact=True).fill("100")
    write(page, "a red circle")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert").filter(has_text="multiple of 16")).to_be_visible()
    assert page.get_by_label("Width", exact=True).get_attribute("aria-invalid") == "true"


def test_the_seed_is_drawn_for_each_request_unless_it_is_locked(open_page: OpenPage) -> None:
    page = open_page()
    seed = page.get_by_label("Seed", exact=True)
    page.get_by_label("Steps").fill("1")
    make(page, "a red circle")
    first = seed.input_value()
    make(page)
    second = seed.input_value()
    assert first != second
    page.get_by_role("button", name="Keep this seed").click()
    make(page)
    assert seed.input_value() == second
    page.get_by_role("button", name="Keep this seed").click()
    page.get_by_role("button", name="Draw a seed").click()  # which keeps it
    expect(seed).not_to_have_value(second)
    third = seed.input_value()
    make(page)
    assert seed.input_value() == third
    expect(page.locator(".make-result-facts")).to_contain_text(f"seed {third} ")
    most = str((1 << 64) - 1)  # exactly, though a number of JavaScript does not hold it
    seed.fill(most)
    with page.expect_request("**/v1/images/generations") as asked:
        make(page)
    assert f'"seed":{most},' in (asked.value.post_data or "")
    expect(page.locator(".make-result-facts")).to_have_text(f"128 × 128 · seed {most} · 1 step")


def test_several_pictures_are_shown_beside_each_other(open_page: OpenPage) -> None:
    """Those that were kept before the connection was lost are not made again."""
    page = open_page()
    page.get_by_label("Pictures", exact=True).fill("3")
    page.get_by_label("Steps").fill("1")
    page.get_by_label("Seed", exact=True).fill("5")
    make(page, "a red circle")
    expect(page.locator(".make-thumb")).to_have_count(3)
    page.get_by_role("button", name="Show picture 2").click()
    expect(page.locator(".make-result-facts")).to_contain_text("seed 6")
    page.evaluate(CUT)
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda one: bodies.append(sent(one)) if "/v1/images" in one.url else None)
    make(page)
    expect(page.locator(".make-thumb")).to_have_count(3)
    assert [(one["n"], one["seed"]) for one in bodies] == [(1, 5), (2, 6)]
    count = "import('/page/gallery_store.js').then(async (it) => (await it.list()).length)"
    assert page.evaluate(count) == 6


def test_errors_are_beside_the_field_that_caused_them(open_page: OpenPage, watch: Watch) -> None:
    watch.allow("status of 400")
    page = open_page()
    page.keyboard.press("Control+Enter")
    prompt = page.get_by_label("Prompt", exact=True)
    expect(page.get_by_role("alert").filter(has_text="prompt is required")).to_be_visible()
    assert prompt.get_attribute("aria-invalid") == "true"
    write(page, "a red circle")
    assert prompt.get_attribute("aria-invalid") is None
    page.get_by_label("Steps").fill("2000")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert").filter(has_text="steps")).to_be_visible()
    assert page.get_by_label("Steps").get_attribute("aria-invalid") == "true"


def test_the_prompt_is_written_by_a_language_model_and_both_can_be_changed(
    open_page: OpenPage,
) -> None:
    page = open_page()
    page.get_by_label("Steps").fill("1")
    page.get_by_text("Enhance the prompt").click()
    expect(page.get_by_text("A longer prompt is written by words")).to_be_visible()
    make(page, "circle red")
    longer = page.get_by_label("Enhanced prompt", exact=True)
    written = longer.input_value()
    assert written
    make(page)  # with the prompt that was written
    longer.fill("a blue star")
    with page.expect_request("**/v1/images/generations") as asked:
        make(page)
    assert sent(asked.value)["prompt"] == "a blue star"
    assert "enhance" not in sent(asked.value)
    facts = page.evaluate(
        "import('/page/gallery_store.js').then((it) => it.list())"
        ".then((all) => all.map(({ facts }) => facts))"
    )
    assert [one["original_prompt"] for one in facts] == ["circle red"] * 3
    assert [one["prompt"] for one in facts] == ["a blue star", written, written]
    assert facts[1]["enhancer"] == facts[2]["enhancer"]
    assert "enhancer" not in facts[0]  # which a person wrote
    write(page, "square green")
    expect(page.get_by_text("This was written for another prompt")).to_be_visible()
    with page.expect_request("**/v1/images/generations") as asked:
        make(page)
    assert sent(asked.value)["enhance"] is True
    assert longer.input_value() != "a blue star"
    assert page.evaluate(ENHANCED) == [
        ["a long one", None, "short", "words@1"],
        ["other", None, None, None],
        ["other", "words:latest", None, None],
        ["a long one <lora:azure:1>", None, "short ", "words@1"],
        ["a long one", None, "short", "words@1"],
    ]


def test_earlier_prompts_are_offered(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_label("Steps").fill("1")
    make(page, "a red circle")
    make(page, "a green star")
    page.get_by_role("button", name="Earlier prompts").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".history-take")).to_have_text(["a green star", "a red circle"])
    dialog.get_by_label("Search prompts").fill("red")
    dialog.get_by_role("button", name="a red circle", exact=True).click()
    prompt = page.get_by_label("Prompt", exact=True)
    assert prompt.input_value() == "a red circle"
    prompt.press("Alt+ArrowUp")
    assert prompt.input_value() == "a green star"
    write(page, "not made yet")
    for key, shown in (
        ("Alt+ArrowUp", "a green star"),
        ("Alt+ArrowUp", "a red circle"),
        ("Alt+ArrowDown", "a green star"),
        ("Alt+ArrowDown", "not made yet"),
    ):
        prompt.press(key)
        expect(prompt).to_have_value(shown)


def test_escape_cancels(open_page: OpenPage, shapes_worker: Worker) -> None:
    page = open_page()
    write(page, "a red circle")
    page.get_by_label("Steps").fill("1000")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text(re.compile("Step [0-9]+ of 1,000"))
    page.keyboard.press("Escape")
    expect(page.locator(".make-state")).to_have_text("Cancelled")
    expect(page.get_by_role("button", name="Make")).to_be_visible()
    page.get_by_label("Steps").fill("1")  # the worker is free again
    make(page)


def test_what_was_typed_survives_a_reload_and_a_new_tab(
    open_page: OpenPage, context: BrowserContext
) -> None:
    page = open_page()
    write(page, "a red circle\nbelow a star")
    page.get_by_label("Steps").fill("3")
    page.get_by_label("4:3").check(force=True)
    page.reload()
    prompt = page.get_by_label("Prompt", exact=True)
    expect(prompt).to_have_value("a red circle\nbelow a star")
    assert page.get_by_label("Steps").input_value() == "3"
    assert page.get_by_label("4:3").is_checked()
    other = open_page()
    expect(other.get_by_label("Prompt", exact=True)).to_have_value("a red circle\nbelow a star")
    write(other, "a green star")
    page.reload()  # each tab has its own
    expect(prompt).to_have_value("a red circle\nbelow a star")


def test_a_reload_while_a_picture_forms_offers_to_make_it_again(open_page: OpenPage) -> None:
    page = open_page()
    write(page, "a red circle")
    page.get_by_label("Steps").fill("1000")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text("Step")
    page.reload()
    expect(page.locator(".make-state")).to_contain_text("reloaded while a picture")
    page.get_by_label("Steps").fill("1")
    page.get_by_role("button", name="Make it again").click()
    expect(page.locator(".make-state")).to_contain_text("Done in")


@pytest.fixture(scope="module")
def own_worker(start_worker: Callable[..., Worker]) -> Callable[[], Worker]:
    """Return a function that returns a worker with a queue of one place: one while it lives."""
    found: list[Worker] = []

    def current() -> Worker:
        if not found or found[-1].process.poll() is not None:
            found.append(start_worker("--queue", 1, "--max-wait", 0))
        return found[-1]

    return current


def test_a_full_queue_is_told_with_the_place_and_waited_for(
    open_page: OpenPage, own_worker: Callable[[], Worker], watch: Watch
) -> None:
    watch.allow("status of 503")
    worker = own_worker()
    pages = [open_page(url=worker.url) for _ in range(4)]
    pages[3].evaluate(IMPATIENT)
    for number, page in enumerate(pages):
        write(page, "a red circle")
        page.get_by_label("Steps").fill(str((1000, 1, 1, 1)[number]))
        page.bring_to_front()
        page.keyboard.press("Control+Enter")
        words = ("Step", "Next in the queue", "Waiting: 1 before", "The worker is busy")[number]
        expect(page.locator(".make-state")).to_contain_text(words)
    expect(pages[3].locator(".make-state")).to_contain_text("Trying again in")
    pages[0].bring_to_front()
    pages[0].keyboard.press("Escape")
    for page in pages[1:]:
        page.bring_to_front()
        expect(page.locator(".make-state")).to_contain_text("Done in", timeout=30_000)


def test_a_worker_that_restarts_makes_the_picture_once_it_is_back(
    open_page: OpenPage, own_worker: Callable[[], Worker], watch: Watch
) -> None:
    watch.allow("ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY|status of 503|network error")
    worker = own_worker()
    page = open_page(url=worker.url)
    page.evaluate(IMPATIENT)
    write(page, "a red circle")
    page.get_by_label("Steps").fill("200")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text("Step")
    worker.stop(signal.SIGKILL)
    expect(page.locator(".make-state")).to_contain_text("The worker does not answer")
    expect(page.get_by_role("status").filter(has_text="Trying again")).to_be_visible()
    here = Aimage(worker.store.parent, worker.store)
    again = begin(here, "--addr", worker.host, "--default-model", "shapes")
    try:
        expect(page.locator(".make-state")).to_contain_text("Done in", timeout=40_000)
    finally:
        again.end()


def test_a_model_that_was_unloaded_is_loaded_and_one_that_was_removed_is_named(
    open_page: OpenPage, shapes_worker: Worker, watch: Watch
) -> None:
    watch.allow("status of 404")
    shapes_worker.aimage("tag", "shapes", "removed:soon")
    page = open_page()
    page.get_by_label("Model", exact=True).select_option("removed:soon")
    page.get_by_label("Steps").fill("1")
    make(page, "a red circle")
    page.evaluate(
        "fetch('/api/generate', {method: 'POST', headers: {'Content-Type': 'application/json'},"
        " body: JSON.stringify({model: 'removed:soon', keep_alive: 0, stream: false})})"
        ".then((answer) => answer.json())"
    )
    make(page)
    shapes_worker.aimage("rm", "removed:soon")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert").filter(has_text="not found")).to_be_visible()
    assert page.get_by_label("Prompt", exact=True).input_value() == "a red circle"


@dataclass(frozen=True)
class Added:
    """A parameter that the tests add to the table."""

    noise_scale: Annotated[float, Gt(0), Le(2), Words("More noise.", field="noise")] = 1.0


def test_a_parameter_that_is_added_to_the_table_is_in_the_page(
    open_page: OpenPage, context: BrowserContext, watch: Watch
) -> None:
    """It is a field that is kept, sent, loaded from files, and shown with pictures."""
    watch.allow("status of 400")
    (added,) = list_parameters(Added)
    location = ParameterLocation("sampling", added)
    module = page_parameter.render_module({**map_parameter_locations(), "noise_scale": location})
    context.route(
        f"**/page/{page_parameter.NAME}",
        lambda route: route.fulfill(body=module, content_type="text/javascript"),
    )
    answer = {"error": {"message": "the worker refuses it", "param": "noise"}}
    context.route("**/v1/images/generations", lambda route: route.fulfill(status=400, json=answer))
    page = open_page()
    page.locator("summary", has_text="Advanced").click()
    field = page.get_by_label("Noise scale")
    expect(field).to_have_attribute("placeholder", "default: 1")
    expect(page.get_by_text("More noise.")).to_be_visible()
    field.fill("0.5")
    write(page, "a red circle")
    with page.expect_request("**/v1/images/generations") as asked:
        page.keyboard.press("Control+Enter")
    assert sent(asked.value)["noise"] == 0.5
    expect(page.get_by_role("alert").filter(has_text="refuses")).to_be_visible()
    page.reload()
    expect(field).to_have_value("0.5")
    for stated, shown in (9, ""), (0.75, "0.75"):
        facts = {"prompt": f"a picture with {stated}", "noise_scale": stated}
        give(page, "body", ("one.png", "image/png", with_facts(png(), facts)))
        expect(page.get_by_label("Prompt", exact=True)).to_have_value(str(facts["prompt"]))
        expect(field).to_have_value(shown)
    page.evaluate(
        """async () => {
            const { add } = await import('/page/gallery_store.js');
            const canvas = new OffscreenCanvas(8, 8);
            canvas.getContext('2d');
            const blob = await canvas.convertToBlob();
            const facts = { prompt: 'a star', noise_scale: 1.5 };
            await add({ blob, facts, model: '', digest: '', made: Date.now(), inputs: {} });
        }"""
    )
    page.evaluate("import('/page/lang.js').then((it) => it.speak('de'))")
    page.get_by_role("link", name="Galerie", exact=True).click()
    page.locator(".wall-open").click()
    expect(page.locator(".fact", has_text="Noise scale")).to_have_text("Noise scale1.5")


def test_a_draft_of_another_version_is_read_as_far_as_it_is_known(open_page: OpenPage) -> None:
    page = open_page()
    page.evaluate(
        """() => {
            const draft = { prompt: 'a red circle', guidanceEnd: 0.5, controlStrength: 1 };
            for (const place of [localStorage, sessionStorage]) {
                place.setItem('aimage.draft', JSON.stringify(draft));
            }
        }"""
    )
    page.reload()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a red circle")
    found = draft(page)
    assert (found["guidance_end"], found["control_strength"]) == (None, None)
    assert not {"guidanceEnd", "controlStrength"} & found.keys()


KEPT = """value => {
    const names = ['theme', 'language', 'draft', 'draft-key', 'chat', 'history', 'again', 'grid',
        'jobs', 'making', 'pull', 'token'];
    for (const place of [localStorage, sessionStorage]) {
        for (const name of names) place.setItem(`aimage.${name}`, value);
    }
}"""


@pytest.mark.parametrize(
    "value",
    [
        "5",
        "{",
        "[]",
        "{}",
        '"x"',
        "[null, 5, {}, [1]]",
        '"toString"',
        '{"prompt": 5, "negative": [], "loras": 5, "n": "x", "model": {}, "aspect": 1}',
        '{"scale": "x", "images": 5, "errors": 5, "previews": "x", "width": "x", "n": null}',
        '{"loras": [5], "messages": 5, "typed": {}, "seed": {"toString": 1}, "expand": {}}',
        '{"messages": [null, {"role": {}, "content": 5}], "thinks": "x", "name": "toString"}',
        '{"across": 5, "down": null, "id": 1, "text": {}, "length": 3, "filter": 1}',
    ],
)
def test_kept_values_of_another_shape_are_ignored(open_page: OpenPage, value: str) -> None:
    page = open_page()
    page.evaluate(KEPT, value)
    # A token of the wrong type is none
    page.reload()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("")
    page.get_by_label("Prompt", exact=True).fill("a fox")
    for name in ("Gallery", "Models", "Chat", "Make"):
        page.get_by_role("link", name=name, exact=True).click()
        expect(page.locator("#main")).not_to_be_empty()


WRONG: list[Any] = [{}, [], [{}], [[["x"]]], True, -1, 1e308, "x", {"toString": 1}, {"length": 1}]


def test_facts_of_another_shape_are_ignored(open_page: OpenPage) -> None:
    page = open_page()
    names = (
        "reference",
        "width",
        "seed",
        "guidance",
        "loras",
        "expand",
        "mask",
        "references",
        "fine",
    )
    for name in names:
        for value in WRONG:
            facts = {"prompt": f"{name} {value}", name: value}
            give(page, "body", ("one.png", "image/png", with_facts(png(), facts)))
            expect(page.get_by_label("Prompt", exact=True)).to_have_value(facts["prompt"])
    assert draft(page)["seed"] is None


def test_a_copied_line_takes_no_name_or_prompt_for_an_option(open_page: OpenPage) -> None:
    page = open_page()
    lines = page.evaluate(
        """async () => {
            const { runLine } = await import('/page/copy_text.js');
            const facts = { reference: '--output=/etc/x', width: 64, height: 64 };
            const line = (prompt) => runLine({ ...facts, prompt }, { host: 'localhost:11434' });
            return ['-x', 'a fox', '-'].map(line);
        }"""
    )
    start = "aimage run --size 64x64 -- '--output=/etc/x'"
    assert lines == [f"{start} '-x'", f"{start} 'a fox'", f"printf %s - | {start}"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 10])
def test_many_tabs_make_pictures_at_once(
    open_page: OpenPage, shapes_worker: Worker, count: int
) -> None:
    """A browser has six connections to a worker: the tabs share four for pictures."""
    pages = [open_page(is_awaited=number == 0) for number in range(count)]
    for number, page in enumerate(pages):
        write(page, f"a red circle {number}")
        page.get_by_label("Steps").fill("2")
        page.get_by_label("Seed", exact=True).fill(str(number))
    for page in pages:
        page.keyboard.press("Control+Enter")
    late = open_page()
    expect(late.get_by_label("Model", exact=True)).to_have_value("shapes:latest")
    for number, page in enumerate(pages):
        expect(page.locator(".make-state")).to_contain_text("Done in", timeout=60_000)
        expect(page.locator(".make-result-facts")).to_contain_text(f"seed {number} ")
    late.get_by_role("link", name="Gallery", exact=True).click()
    expect(late.get_by_role("button", name=re.compile("^Open: a red circle"))).to_have_count(count)
