"""The part of a text that is passed on, and the request for the rest of it."""

from __future__ import annotations

from clowder_aimage.engine.sent_text import SentText
from clowder_aimage.model.text.language_model import (
    DrawnTokens,
    TextDelta,
    TextEnd,
    TextRequest,
    Token,
    ToolCall,
)

REQUEST = TextRequest(prompt="the", max_tokens=9)
HELD = Token("<", (60,), -1.0)


def piece(
    text: str, *numbers: int | str, kind: str = "content", is_partial: bool = False
) -> TextDelta:
    drawn = DrawnTokens(numbers, len(numbers), text, is_partial=is_partial)
    return TextDelta(text, kind, drawn=drawn)


def test_the_rest_follows_all_tokens_of_what_was_passed_on() -> None:
    sent = SentText()
    for event in (piece("hm", 1, kind="thinking"), piece("a b", 2, "b"), piece("<", 4)):
        assert [*sent.add(event, 0.0)] == [event]
    rest = sent.continue_request(REQUEST)
    assert rest.begun == DrawnTokens((1, 2, "b", 4), 4, "hma b<")
    assert (rest.prompt, rest.max_tokens) == ("the", 9)
    last = ToolCall("look", "{}", DrawnTokens((5, 6), 2, "<look>", (HELD,)))
    assert [*sent.add(last, 1.0)] == [last]
    assert sent.continue_request(rest).begun == DrawnTokens(
        (1, 2, "b", 4, 5, 6), 6, "hma b<<look>", (HELD,)
    )


def test_events_of_the_same_tokens_are_passed_on_together() -> None:
    sent = SentText()
    first = piece("hm", 1, kind="thinking")
    assert [*sent.add(first, 0.0)] == [first]
    parts = piece("so", kind="thinking", is_partial=True), piece("a", 2, 3)
    assert not sent.add(parts[0], 0.0)
    assert sent.continue_request(REQUEST).begun.numbers == (1,)  # the process dies between them
    assert not sent.add(parts[0], 0.0)
    assert [*sent.add(parts[1], 0.0)] == [*parts]
    assert sent.continue_request(REQUEST).begun.numbers == (1, 2, 3)


def test_the_end_counts_the_whole_text_once() -> None:
    sent = SentText()
    sent.add(piece("a", 1), 10.0)
    sent.add(piece("b", 2, 3), 12.0)
    sent.continue_request(REQUEST)
    sent.add(piece("c", 4), 20.0)
    end = TextEnd("length", 7 + 3, 1, cached_tokens=9, prompt_seconds=0.5, seconds=0.25)
    rest = piece("d", is_partial=True)
    assert not sent.add(rest, 20.0) and not sent.is_ended
    whole = TextEnd("length", 7, 4, cached_tokens=7, prompt_seconds=0.5, seconds=2.25)
    assert [*sent.add(end, 20.0)] == [rest, whole]
    assert sent.is_ended
