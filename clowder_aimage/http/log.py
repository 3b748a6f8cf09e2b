"""The log: a line for each request and event on standard error, as text or as JSON.

Modules log with the standard library, with fields in ``extra``; structlog only formats. No line
contains a prompt, a user's name or a token: ``redact`` masks fields with such names.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from aiohttp.http_exceptions import HttpProcessingError

CONSOLE, JSON = "console", "json"
_SECRET = frozenset(
    "prompt negative_prompt user token tokens authorization password credentials api_key".split()
)


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask confidential fields."""
    for key in event:
        if key.lower() in _SECRET:
            event[key] = "***"
    return event


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a request that is not HTTP, as its error may contain arbitrary data."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


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
                *_renderers(kind, target),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [sink]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    for name in ("urllib3", "asyncio", "requests"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _renderers(kind: str, target: TextIO) -> list[Any]:
    if kind == JSON:
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        render = structlog.processors.ExceptionRenderer(transformer)
        return [render, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=plain)]
