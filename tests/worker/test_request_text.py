"""Lines of a model process that repeat a text of a request."""

from __future__ import annotations

import pytest

from clowder_aimage.engine.request_text import RequestTexts

REQUEST = {
    "prompt": "a red fox\nin the snow",
    "messages": [{"role": "user", "content": "my secret"}],
    "schema": {"properties": {"diagnosis": {"type": "string"}}},
    "seed": 7,
    "short": "ab",
}


@pytest.mark.parametrize(
    ("line", "is_confidential"),
    [
        ("ValueError: a red fox\\nin the snow", True),
        ("in the snow", True),
        ("parse: error at diagnosis ::=", True),
        ("Traceback: my secret", True),
        ("secret", True),
        ("out of memory: 7 GB", False),
        ("ab", False),
        ("prompt", False),
    ],
)
def test_a_line_with_a_text_of_a_request_is_confidential(line: str, is_confidential: bool) -> None:
    texts = RequestTexts()
    texts.add(REQUEST)
    texts.add({})
    assert texts.occur_in(line) is is_confidential
