"""Chats: streamed, stopped, made again, kept, and shown as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.page.conftest import Watch
from tests.process import Aimage
from tests.worker.conftest import LocalWorker
from tests.worker.text_worker import add_models, scripted_worker

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

pytestmark = pytest.mark.integration
HOSTILE = "<img src=x onerror=alert(1)>"
OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="module")
def shapes_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker whose language models say the words of the last message."""
    home = tmp_path_factory.mktemp("scripted")
    here = Aimage(home, home / "store")
    add_models(here, home / "models")
    with scripted_worker(here) as worker:
        yield worker


@pytest.fixture
def chat(open_page: OpenPage) -> Callable[[], Page]:
    """Return a function that opens the chat of the scripted worker."""
    return lambda: open_page("chat")


def say(page: Page, text: str) -> None:
    field = page.get_by_label("Message", exact=True)
    field.fill(text)
    field.press("Enter")


def answer(page: Page, index: int = -1) -> str:
    """Wait for the end of all answers, and return the text of one of them."""
    expect(page.locator(".chat-message[aria-busy=true]")).to_have_count(0)
    return page.locator(".chat-assistant").nth(index).locator("> .chat-text").inner_text().strip()


def sent(request: Request) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = json.loads(request.post_data or "")["messages"]
    return messages


def test_an_answer_is_streamed_stopped_and_made_again(chat: Callable[[], Page]) -> None:
    page = chat()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_label("Message", exact=True).press("Shift+Enter")
    assert page.locator(".chat-message").count() == 0
    say(page, "one " + "slow " * 400)
    last = page.locator(".chat-assistant").last
    expect(last).to_contain_text("one slow slow")
    expect(last).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(last).to_contain_text("Stopped")
    assert 0 < answer(page).count("slow") < 400
    page.get_by_role("button", name="Regenerate").click()
    expect(last).to_contain_text("one slow")
    page.keyboard.press("Escape")
    expect(last).to_contain_text("Stopped")
    assert page.locator(".chat-message").count() == 2
    say(page, "two three")
    assert answer(page) == "two three"
    assert page.get_by_role("button", name="Regenerate").count() == 1
    say(page, "late " + "slow " * 400)
    expect(last).to_contain_text("late slow")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Delete messages").click()
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    assert page.locator(".chat-message").count() == 0
    say(page, "new")
    assert answer(page) == "new"
    assert page.locator(".chat-message").count() == 2


def test_a_system_prompt_and_what_was_said_are_sent_and_kept(chat: Callable[[], Page]) -> None:
    page = chat()
    page.get_by_text("System prompt").click()
    page.get_by_label("Instructions for all answers").fill("Be brief.")
    say(page, "first")
    assert answer(page) == "first"
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "second")
    roles = [(one["role"], one["content"].strip()) for one in sent(asked.value)]
    said = [("user", "first"), ("assistant", "first"), ("user", "second")]
    assert roles == [("system", "Be brief."), *said]
    assert answer(page) == "second"
    page.get_by_label("Message", exact=True).fill("half a sente")
    page.reload()
    expect(page.locator(".chat-message")).to_have_count(4)
    expect(page.get_by_label("Message", exact=True)).to_have_value("half a sente")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Delete messages").click()
    expect(page.locator(".chat-message")).to_have_count(0)
    page.get_by_text("System prompt").click()
    expect(page.get_by_label("Instructions for all answers")).to_have_value("Be brief.")
    page.evaluate("localStorage.filler = 'x'.repeat(5_200_000)")
    page.get_by_label("Message", exact=True).fill("a" * 100_000)
    expect(page.get_by_text("has no room to keep this conversation")).to_be_visible()


def test_a_reload_during_an_answer_says_that_it_is_incomplete(chat: Callable[[], Page]) -> None:
    page = chat()
    say(page, "begin " + "slow " * 400)
    expect(page.locator(".chat-assistant")).to_contain_text("begin slow")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("The page was reloaded")
    expect(page.locator(".chat-assistant")).to_contain_text("begin slow")
    expect(page.get_by_role("button", name="Regenerate")).to_be_enabled()


def test_thoughts_are_folded_and_code_and_markup_are_text(chat: Callable[[], Page]) -> None:
    page = chat()
    say(page, f"hm hm {HOSTILE} `{HOSTILE}`")
    assert answer(page) == f"{HOSTILE} {HOSTILE}"
    thoughts = page.locator(".chat-thoughts div")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Thoughts").click()
    expect(thoughts).to_have_text("hm hm")
    content = f"Before\n\n```html\n{HOSTILE}\n```\n\nafter ~~~ and\n```\nopen & <b>"
    message = {"role": "assistant", "model": HOSTILE, "content": content, "end": "length"}
    page.evaluate(
        "(message) => import('/page/chat_request.js').then((chat) =>"
        " chat.say({messages: [{role: 'user', content: message.content}, message]}))",
        message,
    )
    blocks = page.locator(".chat-code pre")
    expect(blocks).to_have_text([HOSTILE, "open & <b>"])
    expect(page.locator(".chat-code figcaption").first).to_contain_text("html")
    expect(page.get_by_text("Ended at the token limit")).to_be_visible()
    assert page.locator("img, .chat-text b").count() == 0
    page.get_by_role("button", name="Copy the code").first.click()
    expect(page.get_by_text("Copied.")).to_be_visible()


def test_failures_are_said_and_a_full_queue_is_asked_again(
    chat: Callable[[], Page], watch: Watch
) -> None:
    watch.allow("503|Failed to load resource|ERR_")
    page = chat()
    say(page, "one fail two")
    expect(page.get_by_role("alert")).to_contain_text("the model failed")
    assert answer(page) == "one"
    error = {"error": {"message": "the queue is full", "code": "overloaded"}}
    refusals = iter([True, False])

    def refuse(route: object) -> None:
        if next(refusals):
            route.fulfill(status=503, headers={"Retry-After": "1"}, json=error)  # type: ignore[attr-defined]
        else:
            route.continue_()  # type: ignore[attr-defined]

    page.route("**/v1/chat/completions", refuse)
    say(page, "patience")
    expect(page.get_by_text("The queue is full. Trying again in 1 s.")).to_be_visible()
    assert answer(page) == "patience"
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionfailed"))
    say(page, "lost")
    alert = page.get_by_role("alert").last
    expect(alert).to_contain_text("The connection to the worker was lost.")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "found")  # what was not answered is not sent again: roles alternate
    said = [("user", "one fail two"), ("assistant", "one"), ("user", "patience")]
    said += [("assistant", "patience"), ("user", "found")]
    assert [(one["role"], one["content"].strip()) for one in sent(asked.value)] == said
    expect(page.get_by_role("alert")).to_have_count(3)
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Regenerate").click()
    assert answer(page) == "found"


def test_the_model_is_chosen_among_those_that_chat(
    chat: Callable[[], Page], shapes_worker: LocalWorker
) -> None:
    shapes_worker.aimage("tag", "words", "spare")
    page = chat()
    choice = page.get_by_label("Model")
    options = choice.locator("option")
    expect(options).to_have_count(2)  # "plain" has no template, "vectors" only embeds
    choice.select_option("spare:latest")
    say(page, "which")
    assert answer(page) == "which"
    expect(page.locator(".chat-who").last).to_have_text("spare:latest")
    shapes_worker.aimage("rm", "spare")
    page.reload()
    text = "The worker does not have spare:latest any more. Choose another model."
    expect(page.get_by_text(text)).to_be_visible()
    page.get_by_label("Message", exact=True).fill("hello")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    choice.select_option("words:latest")
    say(page, "hello")
    assert answer(page) == "hello"


def test_a_worker_without_language_models_says_so(open_page: OpenPage, tmp_path: Path) -> None:
    worker = LocalWorker(Aimage(tmp_path, tmp_path / "store"))
    try:
        page = open_page("chat", worker.url)
        expect(page.get_by_text("No language model")).to_be_visible()
        page.get_by_role("link", name="Models").click()
        expect(page.get_by_text("The store is empty")).to_be_visible()
        page.close()
    finally:
        worker.end()
