"""Clowder's storage API: every documented status, against real registries."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("aiohttp")

from clowder_aimage.oci import Digest
from clowder_aimage.registry.client_options import DEFAULT_CONNECTIONS
from tests.model_script import TINY
from tests.proxy import Passed, Proxy, Reply
from tests.real_registry import PASSWORD, USER, RealRegistry
from tests.worker.conftest import LocalWorker

PATH = "tests/content:v1"


class Asker:
    """Requests to a worker's storage API."""

    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection(self.worker.host, timeout=60)) as connection:
            sent = json.dumps(body) if isinstance(body, dict | list) else body
            connection.request(method, path, sent)
            answer = connection.getresponse()
            self.headers = dict(answer.getheaders())
            text = answer.read()
            return answer.status, json.loads(text) if text else None

    def get(self, url: str) -> tuple[int, Any]:
        return self("GET", part(url))

    def delete(self, url: str) -> tuple[int, Any]:
        return self("DELETE", part(url))

    def post(self, url: object, **more: object) -> tuple[int, Any]:
        return self("POST", "/content/", {"url": url, **more})

    def listed(self) -> list[dict[str, Any]]:
        status, answer = self("GET", "/content/")
        assert status == 200
        found: list[dict[str, Any]] = answer["content"]
        return found


def part(url: str) -> str:
    return "/content/" + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


@pytest.fixture(scope="module")
def pushed(worker: LocalWorker, registry: RealRegistry) -> str:
    """Push the embedded model to the registry and return its digest."""
    return push(worker, f"{registry.host}/{PATH}")


def push(worker: LocalWorker, name: str) -> str:
    worker.aimage("create", "-q", name, TINY, "--whole-files")  # a few blobs
    digest: str = worker.aimage("push", "-q", name).line
    worker.aimage("rm", name)
    return digest


@pytest.fixture(scope="module")
def shared(worker: LocalWorker) -> Asker:
    """Return a client for read-only tests; the worker's store has ``tiny``."""
    return Asker(worker)


@pytest.fixture
def ask(empty: LocalWorker) -> Asker:
    """Return a client of a worker with an empty store."""
    return Asker(empty)


@pytest.fixture
def proxy(registry: RealRegistry, pushed: str) -> Iterator[Proxy]:
    with Proxy(registry.host).running() as running:
        yield running


# -- the life of content


def test_content_is_pulled_listed_and_deleted(
    ask: Asker, registry: RealRegistry, pushed: str
) -> None:
    url = f"oci://{registry.host}/{PATH}"
    assert ask.get(url)[0] == 404 and ask.listed() == []
    status, made = ask.post(url)
    assert status == 201
    assert made["url"] == url and made["digest"] == pushed and made["status"] == "complete"
    assert made["size"] > 1_000_000
    assert ask.headers["Location"] == part(url)
    assert ask.get(url) == (200, made)
    assert ask.listed() == [made]
    assert ask.post(url) == (200, made)
    assert ask.delete(url) == (204, None)
    assert ask.get(url)[0] == 404 and ask.listed() == []
    assert ask.delete(url)[0] == 404


def test_pulled_content_can_generate_pictures(
    ask: Asker, registry: RealRegistry, worker: LocalWorker
) -> None:
    name = f"{registry.host}/tests/content-of-tensors:v1"
    worker.aimage("tag", "tiny", name)
    worker.aimage("push", "-q", name)
    worker.aimage("rm", name)
    ask.post(f"oci://{name}")
    body = {"model": name, "prompt": "a dog", "steps": 1, "stream": False}
    status, answer = ask("POST", "/api/generate", body | {"width": 32, "height": 32})
    assert status == 200 and answer["image"]


def test_content_is_206_with_progress_while_it_is_pulled(
    ask: Asker, proxy: Proxy, pushed: str
) -> None:
    url = f"oci://{proxy.host}/{PATH}"
    proxy.hold = 1
    with ThreadPoolExecutor() as threads:
        posted = threads.submit(Asker(ask.worker).post, url)
        proxy.wait_until(lambda: proxy.held > 0)
        status, answer = ask.get(url)
        assert status == 206 and answer["status"] == "pulling" and answer["url"] == url
        assert 0 <= answer["completed"] < answer["total"]
        assert ask.listed() == [answer]
        proxy.release()
        assert posted.result()[0] == 201
    assert ask.get(url)[0] == 200


def test_concurrent_posts_share_one_pull(ask: Asker, proxy: Proxy) -> None:
    url = f"oci://{proxy.host}/{PATH}"
    proxy.hold = 1
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(Asker(ask.worker).post, url) for _ in range(2)]
        proxy.wait_until(lambda: proxy.held > 0)
        proxy.release()
        assert sorted(each.result()[0] for each in both) in ([201, 201], [200, 201])
    blobs = [passed.path for passed in proxy.seen if passed.is_blob]
    assert len(blobs) == len(set(blobs)) > 10


def test_a_pull_continues_after_its_client_disconnects(ask: Asker, proxy: Proxy) -> None:
    url = f"oci://{proxy.host}/{PATH}"
    proxy.hold = 1
    with closing(http.client.HTTPConnection(ask.worker.host, timeout=60)) as connection:
        connection.request("POST", "/content/", json.dumps({"url": url}))
        proxy.wait_until(lambda: proxy.held > 0)
    assert ask.get(url)[0] == 206
    proxy.release()
    assert ask.post(url)[0] in (200, 201)  # waits for the same pull
    assert ask.get(url)[0] == 200
    blobs = [passed.path for passed in proxy.seen if passed.is_blob]
    assert len(blobs) == len(set(blobs))


def test_deleting_content_cancels_its_pull(ask: Asker, proxy: Proxy) -> None:
    url = f"oci://{proxy.host}/{PATH}"
    proxy.hold = 1
    with ThreadPoolExecutor() as threads:
        posted = threads.submit(Asker(ask.worker).post, url)
        proxy.wait_until(lambda: proxy.held > 0)
        deleted = threads.submit(Asker(ask.worker).delete, url)
        heard = any(ask.get(url)[0] == 404 for _ in range(10_000))  # the deletion has begun
        proxy.release()
        assert heard and deleted.result() == (204, None)
        assert posted.result()[0] == 503
    assert ask.get(url)[0] == 404 and ask.listed() == []
    assert ask.post(url)[0] == 201


def test_deleting_a_stalled_pull_is_409(ask: Asker, proxy: Proxy) -> None:
    url = f"oci://{proxy.host}/{PATH}"
    proxy.hold = 1
    with ThreadPoolExecutor() as threads:
        posted = threads.submit(Asker(ask.worker).post, url)
        proxy.wait_until(lambda: proxy.held >= DEFAULT_CONNECTIONS)  # every connection is stalled
        status, answer = ask.delete(url)
        assert status == 409 and "did not stop" in answer["error"]["message"]
        assert int(ask.headers["Retry-After"]) > 0
        proxy.release()
        assert posted.result()[0] == 503


def test_partial_content_is_206_with_the_missing_size(
    ask: Asker, registry: RealRegistry, pushed: str
) -> None:
    name = f"{registry.host}/{PATH}"
    ask.worker.aimage("pull", "-q", name, "--component", "vae")
    status, answer = ask.get(f"oci://{name}")
    assert status == 206 and answer["status"] == "partial"
    assert answer["missing"]["blobs"] > 0 and answer["missing"]["size"] < answer["size"]
    assert ask.post(f"oci://{name}")[0] == 201
    assert ask.get(f"oci://{name}")[0] == 200


# -- names


def test_content_is_addressed_by_digest(ask: Asker, registry: RealRegistry, pushed: str) -> None:
    url = f"oci://{registry.host}/{PATH.partition(':')[0]}@{pushed}"
    assert ask.get(url)[0] == 404
    status, made = ask.post(url)
    assert (status, made["digest"], made["url"]) == (201, pushed, url)
    assert ask.get(url) == (200, made)
    by_tag = f"oci://{registry.host}/{PATH}"
    assert ask.get(by_tag)[0] == 404  # the tag was not pulled
    assert ask.delete(url) == (204, None)
    assert ask.get(url)[0] == 404


def test_an_unknown_digest_is_404(shared: Asker, registry: RealRegistry, pushed: str) -> None:
    url = f"oci://{registry.host}/tests/content@{Digest.of(b'nothing')}"
    assert shared.post(url)[0] == 404 and shared.get(url)[0] == 404


def test_a_name_without_a_tag_means_latest(
    ask: Asker, registry: RealRegistry, worker: LocalWorker
) -> None:
    push(worker, f"{registry.host}/tests/content-latest:latest")
    url = f"oci://{registry.host}/tests/content-latest"
    assert ask.post(url)[1]["url"] == f"{url}:latest"
    assert ask.get(url)[0] == 200 and ask.delete(url)[0] == 204


def test_both_base64_alphabets_are_accepted_in_paths(
    ask: Asker, registry: RealRegistry, pushed: str
) -> None:
    url = f"oci://{registry.host}/{PATH}"
    ask.post(url)
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(url.encode()).decode()
        for each in (text, text.rstrip("=")):
            assert ask("GET", f"/content/{each}")[0] == 200
    assert ask("HEAD", part(url)) == (200, None)


def test_base64_with_a_slash_is_accepted_in_paths(shared: Asker) -> None:
    url = next(
        url
        for tag in range(1000)
        if b"/" in base64.b64encode((url := f"oci://h.example/x?{tag}").encode())
    )
    status, answer = shared("GET", "/content/" + base64.b64encode(url.encode()).decode())
    assert status == 404 and "reference" in answer["error"]["message"]  # the path was decoded


def test_a_local_name_is_content_but_is_not_pulled(shared: Asker) -> None:
    assert [each["url"] for each in shared.listed()] == ["oci://tiny:latest"]
    assert shared.get("oci://tiny")[0] == 200 and shared.post("oci://tiny")[0] == 200
    status, answer = shared.post("oci://nothing")
    assert status == 400 and "registry" in answer["error"]["message"]


def test_ollama_urls_are_mapped_to_its_registry() -> None:
    from clowder_aimage.api.store.storage import parse

    home = "registry.ollama.ai"
    for said, meant in {
        "ollama://gemma:2b": f"{home}/library/gemma:2b",
        "ollama:///gemma": f"{home}/library/gemma:latest",
        "OLLAMA://x/z-image:latest": f"{home}/x/z-image:latest",
        "ollama://host.example/a/b:c": "host.example/a/b:c",
    }.items():
        assert str(parse(said)) == meant


# -- invalid requests


@pytest.mark.parametrize("scheme", ["hf", "HTTP"])
def test_an_unsupported_scheme_is_422_with_a_hint(shared: Asker, scheme: str) -> None:
    status, answer = shared.post(f"{scheme}://host.example/model/file.gguf")
    assert status == 422 and "oci://" in answer["error"]["message"]


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "ftp://host/x", "oci://host.example/X Y", "oci://host.example/x@sha256:../../x"),
        *("oci://host.example/" + "x" * 3000, 5),
    ],
)
def test_an_invalid_url_is_400(shared: Asker, url: str | int) -> None:
    assert shared.post(url)[0] == 400
    if isinstance(url, str) and url:
        assert shared.get(url)[0] == 404 and shared.delete(url)[0] == 404


@pytest.mark.parametrize("path", ["!", "____"])
def test_a_path_that_is_not_base64_is_404(shared: Asker, path: str) -> None:
    assert shared("GET", f"/content/{path}")[0] == 404
    assert shared("DELETE", f"/content/{path}")[0] == 404


@pytest.mark.parametrize("body", ["{", "[]"])
def test_an_invalid_body_is_400(shared: Asker, body: str) -> None:
    assert shared("POST", "/content/", body)[0] == 400


def test_a_body_that_is_too_large_is_413(shared: Asker) -> None:
    assert shared.post("oci://host.example/x", credentials="x" * (1 << 21))[0] == 413


def test_other_methods_are_405(shared: Asker) -> None:
    assert shared("PUT", "/content/", {})[0] == 405
    assert shared("POST", part("oci://host.example/x"), {})[0] == 405


# -- failures


def test_content_that_the_registry_lacks_is_404(
    shared: Asker, registry: RealRegistry, pushed: str
) -> None:
    url = f"oci://{registry.host}/tests/nothing:v1"
    status, answer = shared.post(url)
    assert status == 404 and "nothing" in answer["error"]["message"]
    assert shared.get(url)[0] == 404


def test_an_unreachable_registry_is_502(shared: Asker) -> None:
    assert shared.post("oci://127.0.0.1:1/tests/x:v1")[0] == 502


def test_content_with_a_wrong_digest_is_502_and_not_tagged(ask: Asker, proxy: Proxy) -> None:
    def spoil(passed: Passed, reply: Reply) -> None:
        if passed.is_blob and reply.body:
            reply.put(bytes(len(reply.body)))

    proxy.change = spoil
    assert ask.post(f"oci://{proxy.host}/{PATH}")[0] == 502
    assert ask.listed() == []


def test_deleting_pinned_content_is_409(ask: Asker, registry: RealRegistry, pushed: str) -> None:
    name = f"{registry.host}/{PATH}"
    ask.post(f"oci://{name}")
    ask.worker.aimage("pin", name)
    status, answer = ask.delete(f"oci://{name}")
    assert status == 409 and "pinned" in answer["error"]["message"]
    assert ask.get(f"oci://{name}")[0] == 200


def test_an_infer_token_is_403(ask: Asker, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"admin {'a' * 32}\ninfer {'i' * 32}\n")
    other = ask.worker.start("--token-file", path)
    with closing(http.client.HTTPConnection(other.host, timeout=60)) as connection:
        for method, where in (
            *(("GET", "/content/"), ("POST", "/content/")),
            *(("GET", part("oci://x")), ("DELETE", part("oci://x"))),
        ):
            connection.request(method, where, headers={"Authorization": f"Bearer {'i' * 32}"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 403
            connection.request(method, where)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 401


# -- credentials


@pytest.fixture(scope="module")
def private(worker: LocalWorker, private_registry: RealRegistry) -> str:
    """Push the model to a registry with a password and return its URL."""
    host = private_registry.host
    worker.aimage("login", host, "-u", USER, "--password-stdin", stdin=PASSWORD)
    push(worker, f"{host}/{PATH}")
    worker.aimage("logout", host)
    return f"oci://{host}/{PATH}"


def basic(password: str) -> dict[str, str]:
    credentials = base64.b64encode(f"{USER}:{password}".encode()).decode()
    return {"credentials": credentials, "credentialsType": "Basic"}


def test_a_pull_without_required_credentials_is_403(ask: Asker, private: str) -> None:
    status, answer = ask.post(private)
    assert status == 403 and "authentication" in answer["error"]["message"]
    assert ask.post(private, **basic("wrong"))[0] == 403
    assert ask.get(private)[0] == 404


def test_credentials_are_used_for_one_pull_and_not_stored(ask: Asker, private: str) -> None:
    said = basic(PASSWORD)
    assert ask.post(private, **said)[0] == 201
    assert ask.delete(private)[0] == 204
    assert ask.post(private)[0] == 403  # the credentials were not kept
    home = ask.worker.aimage.home
    secrets = (PASSWORD, said["credentials"])
    for path in home.rglob("*"):
        if path.is_file():
            assert not any(secret.encode() in path.read_bytes() for secret in secrets), path


def test_a_bearer_token_is_sent_to_the_registry_unchanged(ask: Asker, proxy: Proxy) -> None:
    def guard(passed: Passed) -> Reply | None:
        if passed.headers.get("Authorization") == "Bearer of-good-news":
            return None
        challenge = f'Bearer realm="http://{proxy.host}/token",service="x"'
        return Reply(401, {"WWW-Authenticate": challenge}, b"{}")

    proxy.instead = guard
    url = f"oci://{proxy.host}/{PATH}"
    assert ask.post(url, credentials="of-bad-news")[0] == 403
    assert ask.post(url, credentials="of-good-news", credentialsType="bearer")[0] == 201


def test_wrong_credentials_do_not_fail_a_pull_of_another_client(ask: Asker, proxy: Proxy) -> None:
    good, bad = "Bearer of-good-news", "Bearer of-bad-news"

    def guard(passed: Passed) -> Reply | None:
        if passed.headers.get("Authorization") == good:
            return None
        return Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{proxy.host}/token"'}, b"{}")

    proxy.instead, proxy.hold = guard, 1
    url = f"oci://{proxy.host}/{PATH}"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(Asker(ask.worker).post, url, credentials=good[7:])
        proxy.wait_until(lambda: proxy.held > 0)
        assert ask.post(url, credentials=bad[7:])[0] == 403
        assert ask.get(url)[0] == 206
        proxy.release()
        assert first.result()[0] == 201


@pytest.mark.parametrize(
    "more",
    [
        {"credentials": 5},
        {"credentials": "new\nline"},
        {"credentials": "x", "credentialsType": "Digest"},
        {"credentials": "not base64!", "credentialsType": "Basic"},
        {"credentials": "bm9jb2xvbg==", "credentialsType": "Basic"},
    ],
)
def test_invalid_credentials_are_400_and_not_echoed(shared: Asker, more: dict[str, Any]) -> None:
    status, answer = shared.post("oci://host.example/x", **more)
    assert status == 400
    said = more["credentials"]
    assert not isinstance(said, str) or len(said) < 2 or said not in json.dumps(answer)


def test_credentials_in_a_url_are_400_and_not_echoed(shared: Asker) -> None:
    for url in ("oci://user:open-sesame@host.example/x", "oci://host.example/x@open-sesame"):
        status, answer = shared.post(url)
        assert status == 400 and "open-sesame" not in json.dumps(answer)
        assert shared.get(url)[0] == 404
