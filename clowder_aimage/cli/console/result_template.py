"""Templates of results, in Jinja's sandbox (``--format``). Import this on use: it needs jinja2."""

from __future__ import annotations

import json
from typing import Any

import jinja2

from clowder_aimage.cli.console.output import clean_line
from clowder_aimage.document.template import RenderError, SandboxedTemplate, TemplateLimits
from clowder_aimage.errors import UsageError

_LIMITS = TemplateLimits(steps=5_000_000, text=16 << 20, size=512 << 20, seconds=5.0)
# The words of columns, and the fields that have these values in results.
_COLUMNS = {
    "key": ("public",),
    "name": ("reference", "ref", "references"),
    "type": ("artifactType", "mediaType"),
}
_HINT = "templates are Jinja's, for example: {{ digest }}"


class Fields(dict[str, Any]):
    """The fields of an object, which are also found by the words of their columns in tables."""

    def __missing__(self, word: str) -> Any:
        for name in _COLUMNS.get(word, ()):
            if name in self:
                return self[name]
        raise KeyError(word)

    @property
    def words(self) -> list[str]:
        """The names of the fields, and the words of columns that are other ones."""
        return [*self, *(word for word, names in _COLUMNS.items() if self.keys() & {*names})]


class ResultTemplate:
    r"""A template that is rendered with the fields of a result as its variables.

    Args:
        source: Jinja's syntax; ``\n`` and ``\t`` stand for a line end and a tab.

    Raises:
        UsageError: the template is invalid.
    """

    def __init__(self, source: str) -> None:
        source = source.replace("\\n", "\n").replace("\\t", "\t")
        if not source.strip():
            raise UsageError("the template is empty", hint=_HINT)
        try:
            self._template = SandboxedTemplate(
                source, limits=_LIMITS, finalize=_encode_value, undefined=jinja2.StrictUndefined
            )
        except RenderError as error:
            line = "" if error.line is None else f", line {error.line}"
            raise UsageError(f"invalid template{line}: {error}", hint=_HINT) from None

    def render(self, value: dict[str, Any]) -> str:
        """Return the text for a result. Raises UsageError."""
        fields = _clean(value)
        words = list(dict.fromkeys(fields.words))
        try:
            return self._template.render({word: fields[word] for word in words})
        except RenderError as error:
            location = (
                "the template" if error.line is None else f"line {error.line} of the template"
            )
            raise UsageError(
                f"done, but the result cannot be printed: {location}: {error}",
                hint=f"the fields of the result are {', '.join(words)}",
            ) from None


def _clean(value: Any) -> Any:
    """Return a value, perhaps of a registry, without control characters and line ends."""
    if isinstance(value, dict):
        return Fields((_clean(key), _clean(element)) for key, element in value.items())
    if isinstance(value, list | tuple):
        return [_clean(element) for element in value]
    return clean_line(value) if isinstance(value, str) else value


def _encode_value(value: Any) -> Any:
    """Return lists, objects, true, false and null as JSON, as with ``--json``."""
    is_json = value is None or isinstance(value, bool | dict | list)
    return json.dumps(value, ensure_ascii=False) if is_json else value
