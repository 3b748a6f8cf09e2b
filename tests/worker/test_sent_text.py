"""Texts that are generated a second time: what was sent is left out of them."""

from __future__ import annotations

import pytest

from clowder_aimage.engine.sent_text import SentText
from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.language_model import (
    TextEnd,
    TextEvent,
    TextPiece,
    Token,
    ToolCall,
)

END = TextEnd("stop", 1, 2)
CALL = ToolCall("look", "{}")


def token(text: str) -> Token:
    return Token(text, tuple(text.encode()), -1.0)


def sent(*events: TextEvent) -> SentText:
    found = SentText()
    for event in events:
        assert found.new(event) == event
    found.repeat()
    return found


def repeated(text: SentText, *events: TextEvent) -> list[TextEvent]:
    return [new for event in events if (new := text.new(event)) is not None]


def test_only_what_was_not_sent_is_new() -> None:
    text = sent(TextPiece("hm", "thinking"), TextPiece("a "), TextPiece("b"), CALL)
    assert repeated(text, TextPiece("hm", "thinking"), TextPiece("a b"), CALL) == []
    assert repeated(text, TextPiece(" c"), END) == [TextPiece(" c"), END]
    text.repeat()  # after another crash
    whole = (TextPiece("hm", "thinking"), TextPiece("a b"), CALL, TextPiece(" c d"))
    assert repeated(text, *whole, END) == [TextPiece(" d"), END]


def test_pieces_may_be_divided_in_another_way() -> None:
    text = sent(TextPiece("ab", tokens=(token("a"), token("b"))), TextPiece("c"))
    more = TextPiece("bcd", tokens=(token("b"), token("c"), token("d")))
    found = repeated(text, TextPiece("a", tokens=(token("a"),)), TextPiece(""), more)
    assert found == [TextPiece("d", tokens=(token("c"), token("d")))]


@pytest.mark.parametrize(
    "other",
    [
        [TextPiece("ax")],
        [TextPiece("ab", "thinking")],
        [CALL],
        [END],
        [TextPiece("ab"), ToolCall("look", '{"at": 1}')],
        [TextPiece("abc")],  # without the call
    ],
)
def test_another_text_is_an_error(other: list[TextEvent]) -> None:
    with pytest.raises(ModelError, match="it differs from the part that was sent"):
        repeated(sent(TextPiece("ab"), CALL), *other)
