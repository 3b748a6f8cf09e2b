"""The page for browsers at ``/``: static files that use the public routes only."""

from __future__ import annotations

import functools
import gzip
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web
from pydantic import Field

from clowder_aimage.api import page_parameter
from clowder_aimage.api.health_operation import HELLO
from clowder_aimage.api.request_body import Parameters
from clowder_aimage.engine.executor import run_io
from clowder_aimage.generation.request import map_parameter_locations
from clowder_aimage.http import PRODUCT
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.operation import PAGE, Answer, Operation
from clowder_aimage.http.route import OPEN, Route, serve

DIRECTORY = Path(__file__).parents[1] / "page"
INDEX = "index.html"
# Content Security Policy Level 3: own scripts and styles, own requests, pictures made by scripts
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_TYPES |= {".svg": "image/svg+xml"}


class PagePath(Parameters):
    """The place of a file of the page."""

    name: str = Field(description="The path of the file.", examples=["main.js"])


_FILE = Operation(
    "GET",
    "/page/{name:.+}",
    OPEN,
    PAGE,
    "pageFile",
    "Send a file of the page.",
    (
        Answer("The file.", media=tuple(_TYPES.values())),
        Answer("The browser has the file.", status=304),
    ),
    path_fields=PagePath,
    refusals=(404,),
)
# Types that a browser shows by themselves
_DOCUMENTS = (".html", ".svg")
_OF_DOCUMENTS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
# Headers of every file: few, as there are many files
_HEADERS = {
    # The browser validates its copy by the ETag
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, also compressed (RFC 1952)."""

    data: bytes
    compressed: bytes
    tag: str
    media_type: str


def build_routes(*, is_shown: bool) -> list[Route]:
    """Return the routes of the page; without it, ``/`` responds with a line of text only."""
    root = serve(HELLO, partial(_send_root, is_shown))
    if not is_shown:
        return [root]
    paths = sorted(path for path in DIRECTORY.rglob("*") if path.suffix in _TYPES)
    names = {path.relative_to(DIRECTORY).as_posix() for path in paths} | {page_parameter.NAME}
    return [root, serve(_FILE, partial(_send_file, frozenset(names)))]


async def _send_root(is_shown: bool, request: web.Request) -> web.StreamResponse:
    """Respond to a browser with the page, to others as ollama does."""
    if is_shown and "text/html" in request.headers.get("Accept", ""):
        answer = await _respond(request, INDEX)
    else:
        answer = web.Response(text=f"{PRODUCT} is running")
    if is_shown:
        answer.headers["Vary"] = "Accept, Accept-Encoding"
    return answer


async def _send_file(names: frozenset[str], request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    if name not in names:
        raise ApiError(404, "the page does not have this file", code="unknown_url")
    return await _respond(request, name)


async def _respond(request: web.Request, name: str) -> web.Response:
    """Respond with a file, unless the browser has it (RFC 9110, 13.1.2)."""
    file = (
        _build_parameters()
        if name == page_parameter.NAME
        else await run_io(_read, DIRECTORY / name)
    )
    headers = _HEADERS | {"ETag": file.tag}
    headers |= _OF_DOCUMENTS if name.endswith(_DOCUMENTS) else {}
    if file.tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    data = file.data
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        data, headers["Content-Encoding"] = file.compressed, "gzip"
    return web.Response(body=data, headers=headers, content_type=file.media_type, charset="utf-8")


def _read(path: Path) -> PageFile:
    """Return a file as it is now: a change of the source shows when the page is loaded again."""
    return _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=128)
def _load(path: Path, _: int) -> PageFile:
    return _build_file(path.read_bytes(), _TYPES[path.suffix])


@functools.cache
def _build_parameters() -> PageFile:
    return _build_file(
        page_parameter.render_module(map_parameter_locations()).encode(), _TYPES[".js"]
    )


def _build_file(data: bytes, media_type: str) -> PageFile:
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    return PageFile(data, gzip.compress(data, 9, mtime=0), tag, media_type)
