"""One line for each request and for what else happens, on standard error: for people, or JSON.

At the level "info" no line holds a prompt, a user's name or a token; at "debug" neither, which
``redact`` sees to for fields of such names.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from aiohttp.http_exceptions import HttpProcessingError

CONSOLE, JSON = "console", "json"
FORMATS = (CONSOLE, JSON)
LEVELS = ("debug", "info", "warning", "error")
_SECRET = frozenset(
    "prompt negative_prompt user token tokens authorization password credentials api_key".split()
)


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Nothing that a client says in confidence is written down, whoever tries."""
    for key in event:
        if key.lower() in _SECRET:
            event[key] = "***"
    return event


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether it is more than a request that is no HTTP: that is answered, and may be anything."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


def configure(kind: str = CONSOLE, level: str = "info", *, file: TextIO | None = None) -> None:
    """Have everything that is logged, ours or a library's, written to ``file`` in one form."""
    target = file or sys.stderr
    shared: list[Any] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    sink = logging.StreamHandler(target)
    sink.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
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
        told = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        render = structlog.processors.ExceptionRenderer(told)
        return [render, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=plain)]
