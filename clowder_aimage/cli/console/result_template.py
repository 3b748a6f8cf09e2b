"""Templates of results, in Jinja's sandbox (``--format``). Import this on use: it needs jinja2."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import traceback
from collections.abc import Iterator, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clowder_aimage.cli.console.output import printable
from clowder_aimage.errors import UsageError

_MAX_TEXT = 16 << 20  # characters
_MAX_NUMBER = 1 << 63
_SECONDS = 5.0
_FILES: tuple[type[nodes.Node], ...] = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
)


class ResultTemplate:
    r"""A template that is rendered with the fields of a result as its variables.

    Args:
        source: Jinja's syntax, in which ``\n`` and ``\t`` stand for a line end and a tab.

    Raises:
        UsageError: the template is invalid.
    """

    def __init__(self, source: str) -> None:
        source = source.replace("\\n", "\n").replace("\\t", "\t")
        if not source.strip():
            raise UsageError("the template is empty", hint=_HINT)
        environment = _Environment(undefined=jinja2.StrictUndefined, finalize=_text)
        environment.filters["tojson"] = _json
        try:
            with _limited_time():
                tree = environment.parse(source)
                if (found := next(tree.find_all(_FILES), None)) is not None:
                    raise jinja2.TemplateSyntaxError("no other templates", found.lineno)
                self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = f"invalid template, line {error.lineno}: {(error.message or '').rstrip('.')}"
            raise UsageError(message, hint=_HINT) from None
        except (ArithmeticError, RecursionError, SyntaxError, ValueError) as error:
            raise UsageError(f"invalid template: {error}", hint=_HINT) from None

    def render(self, value: dict[str, Any]) -> str:
        """Return the text for a result. Raises UsageError."""
        value, parts, length = _clean(value), [], 0
        try:
            with _limited_time():
                for part in self._template.generate(value):
                    parts.append(part)
                    length += len(part)
                    if length > _MAX_TEXT:
                        raise ValueError(f"its text exceeds {_MAX_TEXT} characters")
        except Exception as error:  # an expression may raise anything
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame.lineno for frame in frames if frame.filename == "<template>"][-1:]
            where = f"line {line[0]} of the template" if line else "the template"
            raise UsageError(
                f"done, but the result cannot be printed: {where}: {error or type(error).__name__}",
                hint=f"the fields of the result are {', '.join(value)}",
            ) from None
        return "".join(parts)


_HINT = "templates are Jinja's, for example: {{ digest }}"


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose products are limited, since one operation cannot be interrupted."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(each) if isinstance(each, Sized) else abs(each) for each in (left, right)]
        is_text = isinstance(left, Sized) or isinstance(right, Sized)
        if operator == "**" or sizes[0] * sizes[1] > (_MAX_TEXT if is_text else _MAX_NUMBER):
            raise ValueError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raise TimeoutError in the context after some seconds. Other threads have no limit."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {_SECONDS:.0f} seconds")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _clean(value: Any) -> Any:
    """Return ``value`` without control characters, which may come from a registry."""
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """Return lists, objects, true, false and null as JSON, as with ``--json``."""
    return _json(value) if value is None or isinstance(value, bool | dict | list) else value


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
