"""Messages of a hostile program of a fleet: one table for all readers of what workers send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

HTML = "<img src=x onerror=alert(1)>"
TEXTS = (
    "",
    "x",
    "a" * 5000,
    "a.b",
    "a b",
    "*",
    ">",
    "../../x",
    "x 0\r\n\r\nPUB aimage.job.x",
    "b\r\nSet-Cookie: a=b",
    "x\0",
    "\x1b[2J",
    "\u202eevil",
    "\u2066x\u2069",
    "é" * 65,
    "\ud800",
    "__proto__",
    "constructor",
    HTML,
    "sha256:" + "g" * 64,
    "sha256:" + "A" * 64,
    "sha256:" + "3" * 63,
    "sha256:" + "3" * 64 + "\n",
)
NUMBERS = (-1, 0, True, 99, 100, 10**9, 1 << 63, 10**300, 1e308, 0.5, float("nan"), float("inf"))
VALUES: tuple[Any, ...] = (
    *TEXTS,
    *NUMBERS,
    None,
    [],
    {},
    [[]],
    [{}],
    [["a"]],
    [["a", "b", "c"]],
    [["a", 5]],
    [None],
    ["x", 5],
    {"a": 5},
    {"a": {}},
    {"": ""},
    {"__proto__": {"a": 1}},
    {"\ud800": "\ud800"},
    [0] * 5000,
    {f"m{number}:latest": f"sha256:{number:064x}" for number in range(5000)},
)
RAW = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe",
    "not JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "deep": b"[" * 5000,
    "deep in a field": b'{"later": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "large": b'{"later":"' + b"a" * (2 << 20) + b'"}',
    "a number of 400 digits": b'{"later":' + b"9" * 400 + b"}",
    "HTML": b"<script>alert(1)</script>",
}


def list_hostile_messages(valid: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield names and texts: each field of a valid message with each value, and other texts."""
    yield from RAW.items()
    text = json.dumps(valid)
    yield "each field twice", f"{text[:-1]}, {text[1:]}".encode()
    for field in valid:
        yield f"{field} is missing", json.dumps({**valid, field: None}).encode()
        for value in VALUES:
            yield f"{field}={str(value)[:40]!a}", json.dumps({**valid, field: value}).encode()
    for value in VALUES:
        yield f"unknown={str(value)[:40]!a}", json.dumps({**valid, "unknown": value}).encode()
