"""Hooks of mkdocs: pages from other places of the repository, and generated references.

Links to files that are not pages of the site lead to copies of them under ``files/``.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# pages of the site that are outside docs/
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "deploy/README.md": "deploy.md",
    "examples/shapes/README.md": "example-shapes.md",
    "schemas/README.md": "schemas.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)|(\]\()([^)\s]+)\)")
_FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
_REQUEST = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'>\s]+"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\"'>\s]+|url\([\"']?https?://[^)]+|@import[^;]*https?:"
)


def on_config(config: Any) -> Any:
    """Complete the navigation: the decisions, and pages that it does not name."""
    text = json.dumps(config["nav"])
    names = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    decisions = sorted(name for name in names if name.startswith("adr/"))
    config["nav"] = _replaced(config["nav"], "adr/*", decisions)
    missing = sorted(name for name in names - {*decisions} if f'"{name}"' not in text)
    if missing:
        config["nav"].append({"More": missing})
    return config


def _replaced(nav: Any, name: str, names: list[str]) -> Any:
    if isinstance(nav, Mapping):
        return {key: _replaced(value, name, names) for key, value in nav.items()}
    if isinstance(nav, list):
        return [_replaced(each, name, names) for each in nav]
    return names if nav == name else nav


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that are not in docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for name, text in references().items():
        files.append(File.generated(config, name, content=text))
    for source in sorted(copies()):
        path = str(ROOT / source)
        files.append(File.generated(config, f"files/{source}", abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links for the places of pages and files in the site."""
    return rewritten(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Refuse a site that makes a browser ask another host."""
    from mkdocs.exceptions import Abort

    site = Path(config["site_dir"])
    for path in (path for kind in ("html", "css") for path in sorted(site.rglob(f"*.{kind}"))):
        found = _REQUEST.search(path.read_text("utf-8"))
        if found is not None:
            raise Abort(f"{path.name} has a request to another host: {found[0][:200]}")


def rewritten(markdown: str, page: str) -> str:
    """Return the text of a page in which links lead to places in the site."""
    source = _source(page)
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_linked(markdown[end : fence.start()], source, page), fence[0]]
        end = fence.end()
    return "".join([*parts, _linked(markdown[end:], source, page)])


def _source(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return _SOURCES.get(page, f"docs/{page}")


def _linked(text: str, source: str, page: str) -> str:
    def replace(match: re.Match[str]) -> str:
        link = match[2] or match[4]
        target, _, anchor = link.partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        place = _place(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if place is None:
            return match[1] if match[2] else match[0]
        new = posixpath.relpath(place, posixpath.dirname(page) or ".")
        new += f"#{anchor}" if anchor else ""
        return f"[{match[1]}]({new})" if match[2] else f"{match[3]}{new})"

    return _LINK.sub(replace, text)


def _place(path: str) -> str | None:
    """Return the place in the site of a file of the repository; None if it has none."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    is_page = path.endswith(".md")
    return f"files/{path}" if (ROOT / path).is_file() and not is_page else None


def copies() -> set[str]:
    """Return the files of the repository that pages link to."""
    found = set()
    pages = [*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    for source in pages:
        text = _FENCE.sub("", (ROOT / source).read_text("utf-8"))
        for match in _LINK.finditer(text):
            target = (match[2] or match[4]).partition("#")[0]
            if target and not re.match(r"[a-z]+:", target):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
                if (_place(path) or "").startswith("files/"):
                    found.add(path)
    return found


def references() -> dict[str, str]:
    """Return the generated pages."""
    sys.path.insert(0, str(ROOT))
    try:
        return {
            "reference/cli.md": _command_line(),
            "reference/api.md": _http_api(),
            "reference/python.md": _python(),
            "reference/configuration.md": _configuration(),
        }
    finally:
        sys.path.remove(str(ROOT))


def _command_line() -> str:
    import hatch_build as pages
    from clowder_aimage.cli.main import cli

    lines = ["# Options of all verbs", "The help of each verb. [Explanations](../cli.md)."]
    for context in pages.contexts(cli):
        usage = " ".join(context.command.collect_usage_pieces(context))
        lines += [f"## {context.command_path}", f"```text\n{context.command_path} {usage}\n```"]
        for text, is_kept in pages.paragraphs(context):
            lines.append(f"```text\n{text}\n```" if is_kept else _escaped(" ".join(text.split())))
        if shown := pages.examples(context):
            lines.append("```sh\n" + "\n".join(shown) + "\n```")
        for items in (pages.commands(context), pages.records(context)):
            if items:
                lines.append(
                    _table(("", ""), ((f"`{_cell(a)}`", _escaped(_cell(b))) for a, b in items))
                )
    return "\n\n".join(lines) + "\n"


def _http_api() -> str:
    from clowder_aimage.api.description_page import page

    path = ROOT / "clowder_aimage" / "api" / "openapi.json"
    text = page(json.loads(path.read_text("utf-8")))
    title, _, body = text.partition("<body><h1>")[2].partition("</h1>")
    body = re.sub(r"<p>The document: .*?</p>", "", body.partition("</body>")[0])
    return f"# {title}\n\n[Explanations](../api.md).\n\n<div>{' '.join(body.split())}</div>\n"


def _python() -> str:
    import clowder_aimage
    from clowder_aimage import AImageError

    lines = ["# Python", "[Explanations and examples](../python.md)."]
    for name in sorted(clowder_aimage.__all__, key=str.lower):
        if name != AImageError.__name__:
            lines.append(f"::: {getattr(clowder_aimage, name).__module__}.{name}")
    return "\n\n".join([*lines, "::: clowder_aimage.errors"]) + "\n"


def _configuration() -> str:
    path = ROOT / "schemas" / "config.schema.json"
    schema = json.loads(path.read_text("utf-8"))
    lines = [f"# {schema['title']}", schema["description"], "[Explanations](../operations.md)."]
    tables = [("The file", schema), *((f"`{name}`", one) for name, one in schema["$defs"].items())]
    for name, value in tables:
        lines += [f"## {name}", _escaped(value.get("description", ""))]
        rows = [
            (f"`{key}`", _kind(each), _default(each), _escaped(each.get("description", "")))
            for key, each in value.get("properties", {}).items()
        ]
        lines.append(_table(("key", "type", "default", ""), rows) if rows else _kind(value))
    return "\n\n".join(line for line in lines if line) + "\n"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kinds = schema.get("type", [])
    text = " or ".join([kinds] if isinstance(kinds, str) else kinds)
    inner = schema.get("items", schema.get("additionalProperties"))
    text += f" of {_kind(inner)}" if isinstance(inner, Mapping) and inner else ""
    return (
        f"{text}: `{schema['pattern']}`"
        if "pattern" in schema and "|" not in schema["pattern"]
        else text
    )


def _default(schema: Mapping[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _table(titles: tuple[str, ...], rows: Any) -> str:
    lines: Iterator[str] = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Escape text for Markdown."""
    return re.sub(r"([*_\[\]`])", r"\\\1", html.escape(text, quote=False))
