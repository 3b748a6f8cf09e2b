"""The log: a line for each request and event on standard error, as text or as JSON.

Modules log with the standard library, with fields in ``extra``; structlog only formats. No line
contains a prompt, a user's name or a token: all records pass ``LogFilter`` and ``redact``.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog
from aiohttp.hdrs import METH_ALL
from aiohttp.http_exceptions import HttpProcessingError

from clowder_aimage.errors import AImageError

CONSOLE, JSON = "console", "json"
_SECRET = frozenset(
    "prompt negative_prompt user token tokens authorization password credentials api_key".split()
)
_CREDENTIALS = re.compile(
    r"(?i)(authorization\W*:\W*(?:\w+\s+)?|\b(?:bearer|basic)\s+(?=\S*\d|\S{20}))[^\s'\"]{8,}"
    r"|(://)[^\s@/]+(?=@)"
)
_MAX_TEXT = 2000  # characters
# Seconds between two equal messages of a library
_INTERVAL = 10.0


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask confidential fields and credentials in texts; make each text one short line."""
    for key in event:
        event[key] = "***" if key.lower() in _SECRET else _clean(event[key])
    return event


def _clean(value: Any) -> Any:
    if not isinstance(value, str):
        if isinstance(value, Mapping):
            return {_clean(key): _clean(nested) for key, nested in value.items()}
        return [_clean(nested) for nested in value] if isinstance(value, list | tuple) else value
    text = value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}..."
    is_printable = text.isprintable()
    # All credentials follow a colon or a space
    if not is_printable or ":" in text or " " in text:
        text = _CREDENTIALS.sub(r"\1\2***", text)
    if is_printable:
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class LogFilter:
    """A filter that all records pass.

    Errors are logged as their type and the last frames: texts may contain a prompt or a header.
    Only the texts of AImageError and OSError are logged. Requests that are not valid HTTP are not
    logged. An equal message of a library is logged once in some seconds, with the number of
    suppressed messages.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The time of the last logged message, and the number suppressed since then
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            return False
        if record.name == "asyncio":
            # The other lines represent tasks and exceptions, with their texts
            record.msg, record.args = str(record.msg).partition("\n")[0], ()
        if not record.name.startswith("aimage"):
            key, timestamp = (record.name, str(record.msg).partition("\n")[0][:100]), self._clock()
            since, count = self._logged.get(key, (timestamp - _INTERVAL, 0))
            if timestamp - since < _INTERVAL:
                self._logged[key] = (since, count + 1)
                return False
            if count:
                record.suppressed = count
            # Clients can cause any number of different messages
            if len(self._logged) >= _MAX_TEXT:
                self._logged.clear()
            self._logged[key] = (timestamp, 0)
        if error is not None:
            record.at = list_frames(error)
            text = error.strerror if isinstance(error, OSError) else None
            text = error.message if isinstance(error, AImageError) else text
            record.error = f"{type(error).__name__}: {text}" if text else type(error).__name__
        record.exc_info = record.exc_text = record.stack_info = None
        return True


def name_method(method: str) -> str:
    """Return a method of HTTP, or "_OTHER" for another text of a client (OpenTelemetry's name)."""
    return method if method in METH_ALL else "_OTHER"


def list_frames(error: BaseException) -> list[str]:
    """Return the last frames of a traceback, without text and variables: they may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-5:]]


def configure(kind: str = CONSOLE, level: str = "info", *, file: TextIO | None = None) -> None:
    """Write all log records, including those of libraries, to ``file`` in one form."""
    target = file or sys.stderr
    sink = logging.StreamHandler(target)
    sink.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.ExtraAdder(),
                structlog.stdlib.add_logger_name,
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                redact,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_build_renderers(kind, target),
            ],
        )
    )
    root = logging.getLogger()
    sink.addFilter(LogFilter())
    root.handlers[:] = [sink]
    root.setLevel(level.upper())
    for name in ("urllib3", "asyncio", "requests"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _build_renderers(kind: str, target: TextIO) -> list[Any]:
    if kind == JSON:
        return [structlog.processors.JSONRenderer()]
    return [structlog.dev.ConsoleRenderer(colors=target.isatty())]
