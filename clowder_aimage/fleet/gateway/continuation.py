"""Deduplicate the events of a streamed response across attempts.

The seed of a job is fixed, so a later attempt makes what the earlier one made. Of its events only
those are passed on that the client does not have: later steps, later pictures, and the text after
the characters that were sent. Events are passed on whole.
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
MAX_UNIT = 256 << 20  # bytes of an event
_STEP = re.compile(rb": step (\d+) of \d+\n")
_TEXTS = ("content", "reasoning_content", "text", "response", "thinking")


def is_stream(content_type: str) -> bool:
    """Return whether a response is passed on while it arrives."""
    return content_type.partition(";")[0].strip().lower() in (SSE, NDJSON)


class Continuation:
    """The stream of one response. ``feed`` returns what to send of the bytes of an attempt."""

    def __init__(self, content_type: str) -> None:
        self._is_sse = content_type.startswith(SSE)
        self._end = b"\n\n" if self._is_sse else b"\n"
        self._rest = b""  # of an event whose end has not arrived
        self._sent: Counter[str] = Counter()  # what the client has
        self._seen: Counter[str] = Counter()  # what this attempt has made
        self._is_again = False
        self._names: dict[str, Any] = {}  # id and time of the first attempt

    def begin(self) -> None:
        """Begin another attempt; what was not passed on is dropped."""
        self._rest = b""
        self._seen.clear()
        self._is_again = True

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to send. Raises FormatError if an event is too large."""
        start = max(0, len(self._rest) - 1)
        self._rest += data
        if self._rest.find(self._end, start) < 0:
            if len(self._rest) > MAX_UNIT:
                raise FormatError("an event of the response is too large")
            return b""
        *units, self._rest = self._rest.split(self._end)
        return b"".join(self._passed(unit + self._end) for unit in units)

    def error(self, status: int, error: dict[str, Any], code: str | None) -> bytes:
        """Return the event for an error after the response has begun."""
        if self._is_sse:
            return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
        facts = {**error, "status": status, **({"code": code} if code else {})}
        return json.dumps(facts).encode() + b"\n"

    def _passed(self, unit: bytes) -> bytes:
        if unit.startswith(b":") or unit == b"\n":
            return self._comment(unit)
        if not self._is_sse:
            return self._json(b"", unit)
        head, found, data = unit.partition(b"data: ")
        if not found or data.startswith(b"[DONE]"):
            return unit
        return self._json(head + found, data)

    def _comment(self, unit: bytes) -> bytes:
        step = _STEP.match(unit)
        if step is None:
            return b"" if self._is_again else unit
        return unit if self._counts("step", int(step[1])) else b""

    def _counts(self, what: str, value: int) -> bool:
        """Return whether a value is higher than those that were sent."""
        is_new = value > self._sent[what]
        self._sent[what] = max(value, self._sent[what])
        return is_new

    def _next(self, what: str) -> bool:
        """Return whether the next one of its kind was not sent."""
        self._seen[what] += 1
        return self._counts(what, self._seen[what])

    def _json(self, head: bytes, data: bytes) -> bytes:
        if not self._is_again and len(data) > 1 << 16:  # a picture
            match = re.match(rb'\s*{"type": "([a-z_.]+)"', data)
            if match:
                self._next(match[1].decode())
                return head + data
        try:
            value = read_json(data, "an event", MAX_UNIT)
        except FormatError:
            return head + data
        if not isinstance(value, dict):
            return head + data
        is_new, is_changed = self._value(value)
        if not is_new:
            return b""
        return head + json.dumps(value).encode() + self._end if is_changed else head + data

    def _value(self, value: dict[str, Any]) -> tuple[bool, bool]:
        """Return whether an event is passed on, and whether it was changed for that."""
        kind = value.get("type")
        if isinstance(kind, str) and kind.endswith((".completed", ".partial_image")):
            return self._next(kind), False
        for name in ("step", "completed"):
            if isinstance(value.get(name), int):
                return self._counts(name, value[name]), False
        if "total" in value or "status" in value:  # of a pull
            return not self._is_again, False
        if isinstance(value.get("choices"), list):
            return self._choices(value)
        if value.get("done") is False:
            part = value.get("message") if isinstance(value.get("message"), dict) else value
            return self._text(part or {}, "0"), self._is_again
        return True, False

    def _choices(self, value: dict[str, Any]) -> tuple[bool, bool]:
        for name in ("id", "created"):
            if name in value:
                value[name] = self._names.setdefault(name, value[name])
        is_new = not value["choices"]  # the last one, with the counts of tokens
        for choice in value["choices"]:
            with contextlib.suppress(AttributeError):
                at = str(choice.get("index", 0))
                delta = choice.get("delta", choice)
                is_new |= self._text(delta, at)
                if choice.get("finish_reason"):
                    is_new |= self._next(f"end {at}")
        return is_new, self._is_again

    def _text(self, part: dict[str, Any], at: str) -> bool:
        """Cut what was sent from the texts of a part; return whether anything is left."""
        is_new = False
        for name in _TEXTS:
            if isinstance(text := part.get(name), str) and text:
                key = f"{name} {at}"
                before, self._seen[key] = self._seen[key], self._seen[key] + len(text)
                part[name] = text[max(0, self._sent[key] - before) :]
                self._sent[key] = max(self._sent[key], self._seen[key])
                is_new |= bool(part[name])
        for name in ("tool_calls", "role"):
            if part.get(name):
                is_new |= self._next(f"{name} {at}")
        return is_new or not self._is_again
