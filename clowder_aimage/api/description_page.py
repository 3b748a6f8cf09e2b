"""The OpenAPI description as one HTML page, without scripts and without other files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer; overflow-wrap: anywhere }
code { font: .92em ui-monospace, monospace }
b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse; width: 100% }
td, th { border-top: 1px solid #8884; padding: .3rem .6rem .3rem 0; text-align: left;
  vertical-align: top }
small { opacity: .75 }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; frame-ancestors 'none'"
_Json = Mapping[str, Any]


def render_page(document: _Json) -> str:
    """Return the page for an OpenAPI 3.1 document."""
    info = document["info"]
    sections = "".join(_render_section(document, tag) for tag in document["tags"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(info['title'])}</h1><p>{_render_text(info['description'])}</p>"
        '<p>The document: <a href="openapi.json">openapi.json</a></p>'
        f"{sections}</body></html>\n"
    )


def _render_section(document: _Json, tag: _Json) -> str:
    operations = [
        _render_operation(document, method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if tag["name"] in operation["tags"]
    ]
    about = _render_text(tag.get("description", ""))
    return f"<h2>{escape(tag['name'])}</h2><p>{about}</p>{''.join(operations)}"


def _render_operation(document: _Json, method: str, path: str, operation: _Json) -> str:
    parts = (
        [f"<p>{_render_text(operation['description'])}</p>"] if "description" in operation else []
    )
    parts.append(f"<p><small>Scope: {escape(operation['x-aimage-scope'])}</small></p>")
    parameters = [
        (parameter["name"], _format_type(parameter["schema"]), parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    parts.append(_render_table("Parameter", parameters))
    for media, body in operation.get("requestBody", {}).get("content", {}).items():
        title = "Field" if media == "application/json" else "Part"
        for schema in body["schema"].get("anyOf", [body["schema"]]):
            parts.append(_render_fields(document, title, schema))
    answers = [
        (code, "", _resolve(document, answer)["description"])
        for code, answer in operation["responses"].items()
    ]
    parts.append(_render_table("Status", answers))
    head = (
        f"<b>{method.upper()}</b> <code>{escape(path)}</code> {_render_text(operation['summary'])}"
    )
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _render_fields(document: _Json, title: str, schema: _Json) -> str:
    """Return the description of an object, and the table of its fields."""
    component = _resolve(document, schema)
    fields = component["properties"].items()
    rows = ((name, _format_type(field), field.get("description", "")) for name, field in fields)
    return f"<p>{_render_text(component['description'])}</p>{_render_table(title, rows)}"


def _resolve(document: _Json, value: _Json) -> _Json:
    """Return the component that a ``$ref`` names, else the value."""
    component: Any = document if "$ref" in value else value
    for key in value.get("$ref", "").split("/")[1:]:
        component = component[key]
    return component  # type: ignore[no-any-return]


def _format_type(schema: _Json) -> str:
    """Return the values of a field, without null: it counts as absent."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(str(choice) or '""' for choice in values if choice is not None)
    if "anyOf" in schema:
        return " | ".join(filter(None, map(_format_type, schema["anyOf"])))
    if "$ref" in schema:
        return "object"
    kinds = schema.get("type", "")
    listed = [kinds] if isinstance(kinds, str) else kinds
    return " | ".join(kind for kind in listed if kind != "null")


def _render_table(title: str, rows: Iterable[tuple[str, str, str]]) -> str:
    lines = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{_render_text(about)}"
        for name, kind, about in rows
    ]
    head = f"<tr><th>{title}<th><th>"
    return f"<table>{head}{''.join(lines)}</table>" if lines else ""


def _render_text(text: str) -> str:
    """Escape a text; its words in backticks become code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
