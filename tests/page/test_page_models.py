"""Models and adapters: the store, pulls, memory, jobs, referrers, and what a token allows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

import numpy as np
from playwright.sync_api import expect
from safetensors.numpy import save_file

from tests.lora_file import write_lora
from tests.page.conftest import SHAPES, Watch
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.store import copy_store
from tests.worker.conftest import Worker, begin

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

pytestmark = pytest.mark.integration
ADMIN, INFER = "admin-token-of-the-test", "infer-token-of-the-test"
HOSTILE = "<img src=x onerror=alert(1)>"
WHOLE = "team/a-name-that-is-much-longer-than-the-names-of-other-models/shapes:v1"
OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="module")
def host(
    registry: RealRegistry, shapes_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Return a registry that has the models ``shapes``, with an attached file, and ``noise``."""
    home = tmp_path_factory.mktemp("pushed")
    copy_store(shapes_store, home / "store")
    here = Aimage(home, home / "store")
    values = np.random.default_rng(0).normal(size=(3, 250_000)).astype(np.float32)
    save_file({str(index): row for index, row in enumerate(values)}, home / "noise.safetensors")
    here("create", "-q", "noise", home / "noise.safetensors")
    for name, path in ("shapes", WHOLE), ("noise", "noise:v1"):
        here("tag", name, f"{registry.host}/{path}")
        here("push", "-q", f"{registry.host}/{path}")
    (home / "note.txt").write_text("about")
    here("attach", f"{registry.host}/{WHOLE}", home / "note.txt", "--type", "text/spdx")
    return registry.host


@pytest.fixture(scope="module")
def shapes_worker(
    host: str, shapes_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    """Return a worker with adapters, a slow connection to the registry, and two tokens."""
    home = tmp_path_factory.mktemp("models")
    copy_store(shapes_store, home / "store")
    here = Aimage(home, home / "store")
    here("create", "-q", "azure", SHAPES / "azure.safetensors", "--base", "shapes")
    here("tag", "shapes", f"{host}/{WHOLE}")
    words = f"ink, {HOSTILE}"
    write_lora(home / "loras" / "styles" / "ink.safetensors", trigger_words=words)
    shutil.copy(SHAPES / "azure.safetensors", home / "loras" / "styles" / "sky.safetensors")
    config = {"registries": {host: {"limitRate": "2M", "jobs": 1}}}
    (home / "config.json").write_text(json.dumps(config))
    (home / "tokens").write_text(f"admin {ADMIN}\ninfer {INFER}\n")
    options = ("--default-model", "shapes", "--max-models", 2, "--lora-dir", home / "loras")
    tokens = ("--token-file", home / "tokens")
    worker = begin(here, *options, *tokens, AIMAGE_CONFIG=str(home / "config.json"))
    yield worker
    worker.end()


@pytest.fixture
def open_part(open_page: OpenPage, watch: Watch) -> Callable[..., Page]:
    """Return a function that opens a part of the page, signed in."""

    def open_tab(part: str, token: str = ADMIN) -> Page:
        watch.allow("401")
        page = open_page(part)
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_label("Token")).to_be_hidden()
        return page

    return open_tab


def entry(page: Page, name: str) -> Locator:
    return page.locator(f'[data-name="{name}"]')


def test_adapters_have_groups_weights_words_and_reasons_and_are_text(open_part: OpenPage) -> None:
    page = open_part("make")
    page.get_by_label("Prompt", exact=True).fill("a circle")
    page.get_by_text("LoRA adapters").click()
    styles = page.get_by_role("region", name="styles")
    unfit = styles.get_by_role("switch", name="ink")
    expect(unfit).to_be_disabled()
    expect(
        styles.get_by_text("Not for this model: styles/ink does not match shapes")
    ).to_be_visible()
    expect(styles.get_by_role("button", name=HOSTILE)).to_be_hidden()
    sky = styles.get_by_role("switch", name="Shapes in azure")
    sky.check()
    weight = styles.get_by_role("slider", name="Weight")
    expect(weight).to_have_value("1")
    for _ in range(3):
        weight.press("ArrowRight")
    expect(page.get_by_text("<lora:styles/sky:1.15>")).to_be_visible()
    for key, value in ("Home", "0"), ("End", "2"), ("ArrowLeft", "1.95"):
        weight.press(key)
        expect(weight).to_have_value(value)
    chip = styles.get_by_role("button", name="azure")
    chip.click()
    prompt = page.get_by_label("Prompt", exact=True)
    expect(prompt).to_have_value("a circle, azure")
    expect(chip).to_have_attribute("aria-pressed", "true")
    chip.click()
    expect(prompt).to_have_value("a circle")
    with page.expect_response("**/v1/images/generations") as answered:
        page.keyboard.press("Control+Enter")
    assert answered.value.status == 200
    body = json.loads(answered.value.request.post_data or "")
    assert body["loras"] == [{"model": "styles/sky", "strength": 1.95}]
    page.reload()
    expect(page.get_by_role("slider", name="Weight")).to_have_value("1.95")
    expect(sky).to_be_checked()
    page.evaluate(
        "import('/page/state.js').then((s) => s.change({loras: [{model: 'styles/ink', strength: 1,"
        f" on: true}}, {{model: '{HOSTILE}', strength: 1, on: true}}]}}))"
    )
    expect(page.get_by_text(f"The worker does not have the adapter {HOSTILE}.")).to_be_visible()
    page.get_by_role("region", name="styles").get_by_role("button", name=HOSTILE).click()
    expect(prompt).to_have_value(f"a circle, {HOSTILE}")
    assert page.locator("img[src='x']").count() == 0
    page.get_by_role("button", name=f"Remove {HOSTILE}").click()
    expect(page.get_by_text("does not have the adapter")).to_be_hidden()


def test_models_have_sizes_and_are_loaded_and_unloaded(
    open_part: OpenPage, host: str, shapes_worker: Worker
) -> None:
    page = open_part("models")
    shapes = entry(page, "shapes:latest")
    expect(shapes).to_contain_text(f"Also {host}/{WHOLE}")
    expect(shapes).to_contain_text(re.compile("z-image.*8 MB.* kB shared", re.S))
    expect(
        page.get_by_role("img", name=re.compile("Disk of the store: Models .* MB"))
    ).to_be_visible()
    shapes.get_by_role("button", name="Load").click()
    expect(shapes.get_by_text("In memory")).to_be_visible()
    memory = page.get_by_role("img", name=re.compile("Memory for models: In use .* MB, Free"))
    expect(memory).to_be_visible()
    shapes.get_by_role("button", name="Unload").click()
    expect(shapes.get_by_text("In memory")).to_be_hidden()
    load = shapes.get_by_role("button", name="Load", exact=True)
    load.click()
    shapes.get_by_role("button", name="Cancel loading shapes:latest").click()
    expect(load).to_be_enabled()
    expect(shapes.get_by_text("In memory")).to_be_hidden()
    page.get_by_role("radio", name="Adapters").check()
    expect(page.locator(".models-one")).to_have_count(1)


def test_a_pull_shows_its_progress_and_is_cancelled(
    open_part: OpenPage, host: str, watch: Watch
) -> None:
    page = open_part("models")
    name = page.get_by_label("Name", exact=True)
    name.fill(f"{host}/noise:v1")
    name.press("Enter")
    bar = page.get_by_role("progressbar", name=f"Pull of {host}/noise:v1")
    expect(bar).to_have_attribute("aria-valuetext", re.compile(r"^[\d.]+ [kM]B of 3(\.\d)? MB$"))
    page.get_by_role("link", name="Gallery").click()  # it goes on meanwhile
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=f"Cancel the pull of {host}/noise:v1").click()
    expect(bar).to_be_hidden()
    assert entry(page, f"{host}/noise:v1").count() == 0
    name.fill(f"{host}/noise:v")
    page.get_by_role("link", name="Gallery").click()
    page.get_by_role("link", name="Models").click()
    expect(name).to_have_value(f"{host}/noise:v")  # what was typed is kept
    name.fill(f"{host}/noise:v1")
    page.get_by_role("button", name="Pull", exact=True).click()
    expect(page.get_by_text(f"{host}/noise:v1 is in the store.")).to_be_visible()
    expect(entry(page, f"{host}/noise:v1")).to_contain_text("3 MB")
    name.fill("localhost:1/nothing")
    name.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("cannot reach localhost:1")
    page.get_by_role("button", name="Remove localhost:1/nothing from the list").click()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_deleting_asks_and_says_what_it_frees(open_part: OpenPage, host: str) -> None:
    page = open_part("models")
    entry(page, "shapes:latest").get_by_role("button", name="Delete shapes:latest").click()
    dialog = page.get_by_role("dialog")
    remove = dialog.get_by_role("button", name="Delete")
    expect(remove).to_be_disabled()
    dialog.get_by_label(f"{host}/{WHOLE}").check()
    text = "The content stays, because another name refers to it."
    expect(dialog.get_by_text(text)).to_be_visible()
    dialog.get_by_label("shapes:latest").check()
    expect(dialog.get_by_text(re.compile(r"This frees [\d.]+ MB\."))).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    entry(page, "azure:latest").get_by_role("button", name="Delete azure:latest").click()
    remove.click()
    expect(entry(page, "azure:latest")).to_have_count(0)
    expect(page.get_by_text("azure:latest was deleted.")).to_be_visible()


def test_jobs_quantize_and_fuse(open_part: OpenPage, watch: Watch) -> None:
    watch.allow("409")
    page = open_part("models")
    shapes = entry(page, "shapes:latest")
    shapes.get_by_role("button", name="Quantize").click()
    dialog = page.get_by_role("dialog")
    target = dialog.get_by_label("Name of the result")
    expect(target).to_have_value("shapes:int8")
    dialog.get_by_role("radio", name="int4").check()
    expect(target).to_have_value("shapes:int4")
    target.fill("shapes")
    page.reload()  # what was typed is kept
    shapes.get_by_role("button", name="Quantize").click()
    expect(target).to_have_value("shapes")
    expect(dialog.get_by_role("radio", name="int4")).to_be_checked()
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.get_by_role("alert")).to_contain_text("exists already")
    target.fill("shapes:int4")
    dialog.get_by_role("button", name="Start").click()
    shapes.get_by_role("button", name="Fuse LoRA").click()
    expect(dialog.get_by_text("ink", exact=True)).to_have_count(0)  # it is not for this model
    dialog.get_by_role("switch", name="styles/sky").check()
    page.reload()
    shapes.get_by_role("button", name="Fuse LoRA").click()
    expect(dialog.get_by_role("switch", name="styles/sky")).to_be_checked()
    expect(target).to_have_value("shapes:fused")
    dialog.get_by_role("button", name="Start").click()
    jobs = page.get_by_role("region", name="Jobs")
    expect(jobs.get_by_role("listitem")).to_have_count(2)
    expect(jobs.get_by_role("progressbar").first).to_be_visible()
    expect(jobs.get_by_text("Done")).to_have_count(2, timeout=40_000)
    expect(entry(page, "shapes:int4")).to_contain_text("int4")
    expect(entry(page, "shapes:fused")).to_be_visible()
    jobs.get_by_role("button", name="Remove the job for shapes:int4 from the list").click()
    expect(jobs.get_by_role("listitem")).to_have_count(1)
    shapes.get_by_role("button", name="Referrers").click()
    expect(dialog.get_by_text("Variant")).to_be_visible()
    expect(dialog.get_by_text("shapes:int4")).to_be_visible()


def test_a_job_is_cancelled_and_a_restart_ends_it(open_part: OpenPage) -> None:
    """The jobs are those of a scripted worker: real ones may end before the page is asked."""
    day = "2026-01-02T03:04:05Z"
    job = {"kind": "quantize", "model": "words:latest", "created": day, "started": day}
    jobs = {
        key: {**job, "id": key, "target": f"words:{key}", "status": "running"}
        for key in ("q0", "q1")
    }

    def answer(route: Route) -> None:
        if route.request.method == "DELETE":
            jobs[route.request.url.rpartition("/")[2]] |= {"status": "cancelled", "ended": day}
        route.fulfill(json={"object": "list", "data": list(jobs.values())})

    page = open_part("models")
    page.route(re.compile("/v1/jobs"), answer)
    page.reload()
    page.get_by_role("button", name="Cancel the job for words:q1").click()
    expect(page.get_by_role("region", name="Jobs").get_by_text("Cancelled")).to_be_visible()
    jobs.clear()
    text = "The job for words:q0 ended with a restart of the worker."
    expect(page.get_by_text(text)).to_be_visible()
    expect(page.get_by_text("The job for words:q1 ended")).to_be_hidden()


def test_referrers_of_the_registry(open_part: OpenPage) -> None:
    page = open_part("models")
    entry(page, "shapes:latest").get_by_role("button", name="Referrers").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Ask the registry too").click()
    expect(dialog.get_by_text("in the registry only")).to_be_visible()
    expect(dialog.get_by_text("Bill of materials")).to_be_visible()
    expect(dialog.get_by_text("text/spdx")).to_be_visible()


def test_a_token_for_pictures_shows_no_changes(open_part: OpenPage) -> None:
    page = open_part("models", INFER)
    expect(page.get_by_text("Your token does not allow changes to the store.")).to_be_visible()
    shapes = entry(page, "shapes:latest")
    expect(shapes.get_by_role("button")).to_have_text(["Load", "Referrers"])
    assert page.get_by_role("button", name="Pull").count() == 0
    shapes.get_by_role("button", name="Load").click()
    expect(shapes.get_by_text("In memory")).to_be_visible()
    expect(shapes.get_by_role("button")).to_have_text(["Referrers"])


def test_a_language_model_of_the_store_answers(open_part: OpenPage) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    page = open_part("chat", INFER)
    message = page.get_by_label("Message", exact=True)
    message.fill("2 blue boxes, black bg")
    message.press("Enter")
    answer = page.locator(".chat-assistant")
    expect(answer).to_contain_text(re.compile("two blue squares .* black background"))
    expect(answer).to_contain_text(re.compile(r"\d+ tokens, [\d.,]+ per second"))
