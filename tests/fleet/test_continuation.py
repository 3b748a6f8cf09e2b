"""Streams of responses over several attempts."""

from __future__ import annotations

import json

from clowder_aimage.fleet.gateway.continuation import NDJSON, SSE, Continuation, is_stream


def sse(*events: object) -> bytes:
    return b"".join(
        f": {one}\n\n".encode() if isinstance(one, str) else b"data: " + _text(one) + b"\n\n"
        for one in events
    )


def _text(value: object) -> bytes:
    return json.dumps(value).encode()


def picture(kind: str, text: str) -> dict[str, str]:
    return {"type": f"image_generation.{kind}", "b64_json": text}


def test_progress_of_a_second_attempt_begins_where_the_first_one_ended() -> None:
    stream = Continuation(SSE)
    first = sse("queued behind 0", "step 1 of 4", "step 2 of 4", picture("partial_image", "p1"))
    assert stream.deduplicate(first[:50]) + stream.deduplicate(first[50:]) == first
    assert stream.deduplicate(b"data: {half of an ev") == b""
    stream.begin()
    again = sse("queued behind 2", "loading", "step 1 of 4", "step 2 of 4")
    assert stream.deduplicate(again + sse(picture("partial_image", "p1"))) == b""
    rest = sse("step 3 of 4", picture("partial_image", "p2"), picture("completed", "x" * 99_999))
    assert stream.deduplicate(rest) == rest


def test_a_finished_picture_is_not_sent_twice() -> None:
    stream = Continuation(SSE)
    large = sse(picture("completed", "x" * 99_999), {"step": 1, "total": 2})
    assert stream.deduplicate(large) == large
    stream.begin()
    assert stream.deduplicate(large) == b""
    assert stream.deduplicate(sse(picture("completed", "y"))) == sse(picture("completed", "y"))


def chunk(text: str, name: str, **more: object) -> dict[str, object]:
    return {"id": name, "choices": [{"index": 0, "delta": {"content": text}, **more}]}


def test_a_text_goes_on_after_its_last_character() -> None:
    stream = Continuation(SSE)
    stream.deduplicate(sse(chunk("The c", "a"), chunk("at s", "a")))
    stream.begin()
    assert stream.deduplicate(sse(chunk("The", "b"), chunk(" cat ", "b"))) == b""
    found = stream.deduplicate(sse(chunk("sat", "b"), chunk("", "b", finish_reason="stop")))
    assert found == sse(chunk("at", "a"), chunk("", "a", finish_reason="stop"))
    assert stream.deduplicate(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


def test_lines_of_ollama_go_on_too() -> None:
    def lines(*values: object) -> bytes:
        return b"".join(_text(one) + b"\n" for one in values)

    stream = Continuation(NDJSON)
    stream.deduplicate(lines({"completed": 1, "done": False}, {"completed": 2, "done": False}))
    stream.begin()
    assert stream.deduplicate(lines({"completed": 1, "done": False})) == b""
    rest = lines({"completed": 3, "done": False}, {"image": "x", "done": True})
    assert stream.deduplicate(rest) == rest
    stream = Continuation(NDJSON)
    stream.deduplicate(lines({"message": {"role": "assistant", "content": "Hel"}, "done": False}))
    stream.begin()
    found = stream.deduplicate(
        lines({"message": {"role": "assistant", "content": "Hello"}, "done": False})
    )
    assert found == lines({"message": {"role": "assistant", "content": "lo"}, "done": False})


def test_errors_have_the_form_of_the_stream() -> None:
    assert (
        Continuation(SSE).encode_error(500, {"error": {}}, None).startswith(b"event: error\ndata: ")
    )
    assert json.loads(Continuation(NDJSON).encode_error(500, {"error": "no"}, "x")) == {
        "error": "no",
        "status": 500,
        "code": "x",
    }
    assert is_stream("text/event-stream; charset=utf-8") and not is_stream("application/json")
