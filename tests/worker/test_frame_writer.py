"""Frames of a model process: pieces of fast texts are joined, and none waits for long."""

from __future__ import annotations

import io
import os
import threading

from clowder_aimage.engine import frame
from clowder_aimage.engine.frame_writer import MIN_INTERVAL, FrameWriter
from clowder_aimage.model.text.language_model import TextDelta, Token


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def read_frames(target: io.BytesIO) -> list[tuple[object, ...]]:
    """Return the kind, the request and the text of each frame."""
    target.seek(0)
    found: list[tuple[object, ...]] = []
    while (one := frame.read(target)) is not None:
        found.append((one[0]["is"], one[0]["id"], one[0].get("text")))
    return found


def test_pieces_that_follow_soon_are_joined_and_the_first_one_does_not_wait() -> None:
    target, clock = io.BytesIO(), Clock()
    writer = FrameWriter(target, clock)

    def write(number: int, text: str) -> None:
        writer.hold(number, TextDelta(text))
        writer.flush()

    write(1, "a")
    assert read_frames(target) == [("piece", 1, "a")]
    write(1, "b")
    write(1, "c")
    assert len(read_frames(target)) == 1
    write(2, "x")  # the first one of another text
    assert read_frames(target)[1:] == [("piece", 1, "bc"), ("piece", 2, "x")]
    clock.now += 2 * MIN_INTERVAL
    write(1, "d")
    assert read_frames(target)[3:] == [("piece", 1, "d")]


def test_pieces_of_several_texts_are_one_write() -> None:
    class Target(io.BytesIO):
        writes = 0

        def flush(self) -> None:
            self.writes += 1

    target = Target()
    writer = FrameWriter(target, Clock())
    for number in range(8):
        writer.hold(number, TextDelta("a"))
    assert (target.writes, read_frames(target)) == (0, [])
    writer.flush()
    assert target.writes == 1
    assert read_frames(target) == [("piece", number, "a") for number in range(8)]


def test_thoughts_are_not_joined_to_the_answer_and_keep_their_tokens() -> None:
    target = io.BytesIO()
    writer = FrameWriter(target, Clock())
    one, two = Token("a", (97,), -0.5), Token("b", (98,), -1.5, (Token("c", (99,), -2.0),))
    writer.hold(1, TextDelta("-"))
    writer.flush()
    for piece in (
        TextDelta("hm", "thinking"),
        TextDelta("a", tokens=(one,)),
        TextDelta("b", tokens=(two,)),
    ):
        writer.hold(1, piece)
    writer.write({"is": "end", "id": 1})
    target.seek(0)
    _, (thought, _), (text, _), (end, _) = (frame.read(target) or ({}, b"") for _ in range(4))
    assert (thought["kind"], thought["text"], thought.get("tokens")) == ("thinking", "hm", None)
    assert (text.get("kind"), text["text"], end["is"]) == (None, "ab", "end")
    assert tuple(map(Token.from_json, text["tokens"])) == (one, two)


def test_a_new_text_with_the_number_of_one_that_has_ended_begins_at_once() -> None:
    target = io.BytesIO()
    writer = FrameWriter(target, Clock())
    for kind in ("done", "error"):
        writer.hold(1, TextDelta("a"))
        writer.flush()
        writer.write({"is": kind, "id": 1})
    assert [one[0] for one in read_frames(target)] == ["piece", "done", "piece", "error"]


def test_a_piece_that_is_held_back_is_written_while_the_model_computes() -> None:
    inner, outer = os.pipe()
    with os.fdopen(inner, "rb") as source, os.fdopen(outer, "wb", buffering=0) as target:
        writer = FrameWriter(target, Clock())  # time does not pass for the writer
        thread = threading.Thread(target=writer.write_in_time, daemon=True)
        thread.start()
        for text in ("a", "b"):
            writer.hold(1, TextDelta(text))
            found = frame.read(source)
            assert found is not None and found[0]["text"] == text
        source.close()  # as when the worker exits
        writer.hold(1, TextDelta("c"))
        thread.join(60)
        assert not thread.is_alive()
