"""Deduplicate the events of a streamed response across attempts.

The seed of a job is fixed, so a later attempt repeats the events of the earlier one. Only events
that the client does not have are sent: later steps, later pictures, and the text after the
characters that were sent. Events are sent complete.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json

SSE, NDJSON = "text/event-stream", "application/x-ndjson"
# Bytes of an event.
MAX_EVENT = 256 << 20
_STEP = re.compile(rb": step (\d{1,9}) of \d{1,9}\n")
_TEXTS = ("content", "reasoning_content", "text", "response", "thinking")


def is_stream(content_type: str) -> bool:
    """Return True if a response is sent to the client while it arrives."""
    return content_type.partition(";")[0].strip().lower() in (SSE, NDJSON)


class Continuation:
    """The stream of one response. ``deduplicate`` returns the bytes of an attempt to send."""

    def __init__(self, content_type: str) -> None:
        self._is_sse = content_type.startswith(SSE)
        self._end = b"\n\n" if self._is_sse else b"\n"
        # The bytes of an incomplete event.
        self._buffer = bytearray()
        # Events by kind, and characters by field and choice, that the client has.
        self._sent: Counter[str] = Counter()
        # The same of the current attempt.
        self._received: Counter[str] = Counter()
        self._is_later_attempt = False
        # Id and time of the first attempt.
        self._names: dict[str, Any] = {}

    def begin(self) -> None:
        """Begin another attempt; drop the bytes of an incomplete event."""
        self._buffer.clear()
        self._received.clear()
        self._is_later_attempt = True

    def deduplicate(self, data: bytes) -> bytes:
        """Return the bytes to send. Raises FormatError if an event is too large."""
        start = max(0, len(self._buffer) - 1)
        self._buffer += data
        if self._buffer.find(self._end, start) < 0:
            if len(self._buffer) > MAX_EVENT:
                raise FormatError("an event of the response is too large")
            return b""
        *events, self._buffer = self._buffer.split(self._end)
        return b"".join(self._filter(bytes(event + self._end)) for event in events)

    def encode_error(self, status: int, error: dict[str, Any], code: str | None) -> bytes:
        """Return the event for an error after the response has begun."""
        if self._is_sse:
            return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
        facts = {**error, "status": status, **({"code": code} if code else {})}
        return json.dumps(facts).encode() + b"\n"

    def _filter(self, event: bytes) -> bytes:
        if event.startswith(b":") or event == b"\n":
            return self._filter_comment(event)
        if not self._is_sse:
            return self._filter_json(b"", event)
        head, separator, data = event.partition(b"data: ")
        if not separator or data.startswith(b"[DONE]"):
            return event
        return self._filter_json(head + separator, data)

    def _filter_comment(self, event: bytes) -> bytes:
        step = _STEP.match(event)
        if step is None:
            return b"" if self._is_later_attempt else event
        return event if self._is_beyond_sent("step", int(step[1])) else b""

    def _is_beyond_sent(self, kind: str, value: int) -> bool:
        """Return True if a number is higher than all sent ones of its kind."""
        is_new = value > self._sent[kind]
        self._sent[kind] = max(value, self._sent[kind])
        return is_new

    def _is_next_unsent(self, kind: str) -> bool:
        """Count an event of a kind; return True if it was not sent."""
        self._received[kind] += 1
        return self._is_beyond_sent(kind, self._received[kind])

    def _filter_json(self, head: bytes, data: bytes) -> bytes:
        if not self._is_later_attempt and len(data) > 1 << 16:  # a picture
            match = re.match(rb'\s*{"type": "([a-z_.]+)"', data)
            if match:
                self._is_next_unsent(match[1].decode())
                return head + data
        try:
            value = read_json(data, "an event", MAX_EVENT)
        except FormatError:
            return head + data
        if not isinstance(value, dict):
            return head + data
        is_new, is_changed = self._filter_value(value)
        if not is_new:
            return b""
        return head + json.dumps(value).encode() + self._end if is_changed else head + data

    def _filter_value(self, value: dict[str, Any]) -> tuple[bool, bool]:
        """Return True if an event is sent, and True if it was changed."""
        kind = value.get("type")
        if isinstance(kind, str) and kind.endswith((".completed", ".partial_image")):
            return self._is_next_unsent(kind), False
        for name in ("step", "completed"):
            if isinstance(value.get(name), int):
                return self._is_beyond_sent(name, value[name]), False
        # A line of a pull: a later attempt repeats them all.
        if "total" in value or "status" in value:
            return not self._is_later_attempt, False
        if isinstance(value.get("choices"), list):
            return self._filter_choices(value)
        if value.get("done") is False:
            message = value.get("message") if isinstance(value.get("message"), dict) else value
            return self._cut_texts(message or {}, "0"), self._is_later_attempt
        return True, False

    def _filter_choices(self, value: dict[str, Any]) -> tuple[bool, bool]:
        for name in ("id", "created"):
            if name in value:
                value[name] = self._names.setdefault(name, value[name])
        # The last one, with the counts of tokens.
        is_new = not value["choices"]
        for choice in value["choices"]:
            with contextlib.suppress(AttributeError):
                index = str(choice.get("index", 0))
                delta = choice.get("delta", choice)
                is_new |= self._cut_texts(delta, index)
                if choice.get("finish_reason"):
                    is_new |= self._is_next_unsent(f"end {index}")
        return is_new, self._is_later_attempt

    def _cut_texts(self, delta: dict[str, Any], choice: str) -> bool:
        """Cut the sent characters from the texts of a delta; return True if anything is left."""
        is_new = False
        for name in _TEXTS:
            if isinstance(text := delta.get(name), str) and text:
                key = f"{name} {choice}"
                before, self._received[key] = self._received[key], self._received[key] + len(text)
                delta[name] = text[max(0, self._sent[key] - before) :]
                self._sent[key] = max(self._sent[key], self._received[key])
                is_new |= bool(delta[name])
        for name in ("tool_calls", "role"):
            if delta.get(name):
                is_new |= self._is_next_unsent(f"{name} {choice}")
        return is_new or not self._is_later_attempt
