"""Chat templates of published models are rendered as transformers renders them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.errors import ChatTemplateError, UsageError
from clowder_aimage.model.text import template_variant
from clowder_aimage.model.text.language_model import TextRequest
from tests.text.published_template import (
    CONTINUED,
    CONVERSATIONS,
    FAILURE,
    NOW,
    digest,
    make_published,
    read_digests,
    read_templates,
)

# transformers cannot write an iterator as JSON
MORE = {"llama-cpp-deepseek-r1": {3, 4}}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_variant, "datetime", SimpleNamespace(now=lambda: NOW))


def render(name: str, messages: Any, tools: Any) -> str | None:
    is_continued = messages is CONTINUED
    request = TextRequest(messages=tuple(messages), tools=tuple(tools), is_continued=is_continued)
    try:
        return make_published(name).compose(request)[0]
    except (UsageError, ChatTemplateError):
        return None


@pytest.mark.parametrize("name", read_templates())
def test_prompts_are_those_of_transformers(name: str) -> None:
    for index, (conversation, expected) in enumerate(
        zip((*CONVERSATIONS, (CONTINUED, [])), read_digests()[name], strict=True)
    ):
        prompt = render(name, *conversation)
        if index in MORE.get(name, ()):
            assert prompt is not None and json.dumps(expected) == json.dumps(FAILURE)
        else:
            assert (FAILURE if prompt is None else digest(prompt)) == expected, index
