"""Grammars of JSON Schemas, as llama.cpp accepts them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import xllamacpp

from clowder_aimage.errors import UsageError
from clowder_aimage.model.llama.server import LlamaServer

_WORD = "@#@#"
_MAX_CACHED = 64
# Bytes of a schema: all requests wait while its grammar is prepared
_MAX_SIZE = 1 << 16
_MAX_REPEATS = 10_000
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")


class Grammars:
    """The grammars of recent schemas, tried once each."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server
        self._cache: dict[str, str] = {}

    def of(self, schema: Mapping[str, Any]) -> str:
        """Return the grammar of a JSON Schema, of any object for an empty one.

        Raises UsageError, with the field of the request as a fact, if it is unsupported.
        """
        value = dict(schema) or {"type": "object"}
        try:
            key = json.dumps(value)
            _check_size(key, value)
            if key in self._cache:
                return self._cache[key]
            grammar: str = xllamacpp.json_schema_to_grammar(value)
        except (RuntimeError, TypeError, ValueError, RecursionError) as error:
            raise _build_schema_error(str(error)) from None
        self._try(grammar)
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[key] = grammar
        return grammar

    def _try(self, grammar: str) -> None:
        """Refuse a grammar that llama.cpp would ignore, as it does if LLGuidance rejects it.

        A text that must begin with a certain word does so only if the grammar is in use.
        """
        head, start, body_rule = grammar.partition("start: ")
        # Without this rule it is in llama.cpp's own notation, whose errors are reported
        if not start:
            return
        tried = f'{head}{start}"{_WORD}" {body_rule}'
        body = {"prompt": ".", "n_predict": 4, "temperature": 0, "grammar": tried, "stream": True}
        with closing(self._server.stream(body)) as batches:
            text = "".join(answer["choices"][0]["text"] for batch in batches for answer in batch)
        if not text or not _WORD.startswith(text[: len(_WORD)]):
            raise _build_schema_error("it is invalid, or has keywords that are not supported")


def _check_size(text: str, value: Any) -> None:
    """Refuse a large schema: llama.cpp serves no request while it prepares the grammar."""
    if len(text) > _MAX_SIZE:
        raise _build_schema_error(f"it has {len(text)} bytes; the limit is {_MAX_SIZE}")
    if (count := _repeats(value)) > _MAX_REPEATS:
        names = f"{', '.join(_COUNTS)} and the repetitions of patterns"
        raise _build_schema_error(f"{names} are {count:.6g} together; the limit is {_MAX_REPEATS}")


def _repeats(value: Any) -> float:
    """Return the sum of the numbers of items, and of the products of repetitions in patterns."""
    if isinstance(value, list):
        return sum(map(_repeats, value), 0.0)
    if not isinstance(value, dict):
        return 0.0
    counts = [float(count) for name in _COUNTS if isinstance(count := value.get(name), int | float)]
    ranges = _REPEATS.findall(pattern) if isinstance(pattern := value.get("pattern"), str) else []
    product = math.prod(float(most or least) for least, most in ranges) if ranges else 0.0
    return sum(counts) + product + sum(map(_repeats, value.values()))


def _build_schema_error(reason: str) -> UsageError:
    message = f"the JSON Schema cannot be used: {reason:.300}"
    return UsageError(message, field="response_format")
