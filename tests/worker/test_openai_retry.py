"""Retries of OpenAI's SDK against a live worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("openai")

import openai

from tests.proxy import Passed, Proxy, Reply

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker


@pytest.mark.parametrize("status", [429, 503])
def test_the_sdk_retries_after_429_and_503(worker: LocalWorker, status: int) -> None:
    posts: list[Passed] = []

    def refuse_once(passed: Passed) -> Reply | None:
        if passed.method != "POST":
            return None
        posts.append(passed)
        return Reply(status, {"Retry-After": "0"}) if len(posts) == 1 else None

    with Proxy(worker.host).running() as proxy:
        proxy.instead = refuse_once
        client = openai.OpenAI(base_url=f"http://{proxy.host}/v1", api_key="none")
        made = client.images.generate(model="tiny", prompt="a dog", extra_body={"steps": 1})
        assert len(posts) == 2
        assert posts[1].headers["x-stainless-retry-count"] == "1"
        assert made.data and made.data[0].b64_json
        with pytest.raises(openai.RateLimitError if status == 429 else openai.InternalServerError):
            posts.clear()
            client.with_options(max_retries=0).images.generate(model="tiny", prompt="a dog")
