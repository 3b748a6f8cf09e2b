"""Grammars of JSON Schemas, as llama.cpp accepts them.

llama.cpp serves no text while it prepares a grammar, and a few bytes of a schema can make that
endless. So each schema is tried first in a bounded process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import UsageError
from clowder_aimage.model.bounded_process import RefusedError, run_bounded
from clowder_aimage.model.llama.closed_schema import close_objects, drop_nulls

_MODULE = "clowder_aimage.model.llama.grammar_trial"
_MAX_CACHED = 256
# Bytes of a schema
_MAX_SIZE = 1 << 16
# Seconds that llama.cpp may take to prepare a grammar, while all texts wait
_MOST = 0.5
# Grammars that take less are used at once
_CHEAP = 0.06
# White space in a text is that of Python's json.dumps: otherwise it could go on for ever
_LAYOUT = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar; ``seconds`` is the time that llama.cpp takes to prepare it."""

    text: str
    seconds: float


class Grammars:
    """The grammars of recent schemas. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # The last one was used last; the reason for a schema that is refused
        self._cache: OrderedDict[str, Grammar | str] = OrderedDict()
        # When the next grammar that is not cheap may be used
        self._next = 0.0

    def build(
        self, schema: Mapping[str, Any], is_cancelled: Callable[[], bool] = lambda: False
    ) -> Grammar:
        """Return the grammar of a JSON Schema, of any object for an empty one. Blocks.

        Raises UsageError, with the field of the request as a fact, if it is unsupported.
        """
        key = _encode(schema)
        with self._lock:
            cached = self._cache.get(key)
        if cached is None:
            cached = self._try(key, is_cancelled)
        with self._lock:
            self._cache[key] = cached
            self._cache.move_to_end(key)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        if isinstance(cached, str):
            raise _build_schema_error(cached)
        return cached

    def reserve(self, grammar: Grammar) -> float:
        """Return the seconds to wait until a grammar may be used.

        Grammars that are not cheap take half of the model's time at most.
        """
        if grammar.seconds < _CHEAP:
            return 0.0
        with self._lock:
            begin = max(self._next, self._clock())
            self._next = begin + 2 * grammar.seconds
            return begin - self._clock()

    def _try(self, key: str, is_cancelled: Callable[[], bool]) -> Grammar | str:
        try:
            output = run_bounded(_MODULE, key.encode(), is_cancelled)
        except RefusedError as error:
            if is_cancelled():
                raise _build_schema_error(str(error)) from None
            return str(error)
        seconds, _, text = output.decode().partition("\n")
        grammar = Grammar(text, float(seconds))
        if grammar.seconds > _MOST:
            return f"preparing it takes more than {_MOST:g} seconds of processor time"
        return grammar


def _encode(schema: Mapping[str, Any]) -> str:
    """Return a schema with closed objects and the layout of texts, as JSON. Raises UsageError."""
    try:
        value = dict(close_objects(drop_nulls(schema))) or {"type": "object"}
        stated = value.get("x-guidance")
        value["x-guidance"] = {**(stated if isinstance(stated, dict) else {}), **_LAYOUT}
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _build_schema_error(str(error)) from None
    if len(text) > _MAX_SIZE:
        raise _build_schema_error(f"it has {len(text)} bytes; the limit is {_MAX_SIZE}")
    return text


def _build_schema_error(reason: str) -> UsageError:
    message = f"the JSON Schema cannot be used: {reason:.300}"
    return UsageError(message, field="response_format")
