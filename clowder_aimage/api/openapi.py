"""The OpenAPI 3.1 document of a server, made of its routes and the types of their fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from clowder_aimage.api.health_operation import DESCRIBE, SHOW
from clowder_aimage.api.openapi_schema import build_schemas
from clowder_aimage.api.request_body import IGNORED
from clowder_aimage.engine.executor import run_io
from clowder_aimage.http import PRODUCT
from clowder_aimage.http.operation import JSON, Answer, Operation
from clowder_aimage.http.route import OPEN, Route, serve

_RESPONSES = "#/components/responses/"
_ABOUT = (
    "Pictures and texts by AI models stored as OCI artifacts: OpenAI's images API and its APIs for "
    "text, ollama's API, and Clowder's storage API."
)
_REFUSALS = {
    400: ("BadRequest", "The request is invalid."),
    401: ("Unauthorized", "A token is required."),
    403: (
        "Forbidden",
        "The scope of the token is insufficient, the request is cross-site, or the host or a "
        "picture's source is not allowed.",
    ),
    404: ("NotFound", "Not found."),
    408: ("Timeout", "Timed out reading the request body."),
    409: ("Conflict", "The request conflicts with the current state."),
    410: ("Gone", "The link has expired."),
    413: ("TooLarge", "The request body is too large."),
    415: ("WrongType", "The media type of the body, or of a picture, is not supported."),
    422: (
        "Unusable",
        "An adapter, a picture or the chat template of a model cannot be used, a URL has an "
        "unsupported scheme, or an idempotency key was used for another request.",
    ),
    429: ("TooMuch", "This client has as much of something as it may have; the message names it."),
    500: ("Failed", "Internal error."),
    502: ("Registry", "The registry denied access, failed, or is unreachable."),
    503: ("Busy", "The queue is full, or the server cannot work at the moment."),
    504: ("Deadline", "The request exceeded the deadline."),
    507: ("NoSpace", "The disk is full."),
}
_HEADERS = {
    401: {"WWW-Authenticate": "The scheme."},
    429: {"Retry-After": "Seconds, if waiting helps."},
    503: {"Retry-After": "Seconds."},
}


class OpenAIFault(TypedDict):
    """The fault of a request or of the server."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """An error in OpenAI's form."""

    error: OpenAIFault


class OllamaError(TypedDict):
    """An error in ollama's form."""

    error: str


def build_description_routes(kind: str) -> list[Route]:
    """Return the routes of the description of a kind of server: as JSON, and as a page."""
    # The document, made at the first request
    documents: list[dict[str, Any]] = []

    async def make_document(app: web.Application) -> dict[str, Any]:
        if not documents:
            make = partial(
                build_document,
                app["routes"],
                title=f"{PRODUCT} {kind}",
                has_tokens=app["has_tokens"],
            )
            documents.append(await run_io(make))
        return documents[0]

    async def describe(request: web.Request) -> web.Response:
        return web.json_response(await make_document(request.app))

    async def show(request: web.Request) -> web.Response:
        from clowder_aimage.api.description_page import POLICY, render_page

        headers = {"Content-Security-Policy": POLICY}
        shown = render_page(await make_document(request.app))
        return web.Response(text=shown, content_type="text/html", headers=headers)

    return [serve(DESCRIBE, describe), serve(SHOW, show)]


def build_document(routes: Iterable[Route], *, title: str, has_tokens: bool) -> dict[str, Any]:
    """Return the description of the routes that have an operation."""
    listed = list(routes)
    operations = [route.operation for route in listed if route.operation is not None]
    schemas, components = build_schemas(operations, OpenAIError, OllamaError)
    refusals: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for operation in operations:
        description = _describe(operation, schemas, refusals, has_tokens=has_tokens)
        paths.setdefault(_format_path(operation), {})[operation.method.lower()] = description
    tags = {operation.tag.name: operation.tag.description for operation in operations}
    about = _ABOUT + (
        " `x-aimage-scope` is the scope that an operation requires: `open` requires no token, and "
        "`admin` includes `infer`."
        if has_tokens
        else " This server has no tokens: requests need no authorization."
    )
    if any(route.path.startswith("/v2/") for route in listed):
        about += " `/v2/` is the API of the OCI Distribution Specification."
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": "1",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": about,
        },
        "tags": [{"name": name, "description": text} for name, text in tags.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": dict(sorted(refusals.items())),
            **({"securitySchemes": _SECURITY} if has_tokens else {}),
        },
    }


_SECURITY = {
    "token": {"type": "http", "scheme": "bearer"},
    "password": {
        "type": "http",
        "scheme": "basic",
        "description": "The token as the password of any user.",
    },
}


def _format_path(operation: Operation) -> str:
    return re.sub(r":[^}]*\}", "}", operation.path)


# -- operations


def _describe(
    operation: Operation,
    schemas: Mapping[int, Any],
    refusals: dict[str, Any],
    *,
    has_tokens: bool,
) -> dict[str, Any]:
    needs_token = has_tokens and operation.scope != OPEN
    description: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag.name],
        "summary": operation.summary,
    }
    if operation.details:
        description["description"] = operation.details
    description["x-aimage-scope"] = operation.scope
    if has_tokens:
        scopes = [operation.scope]
        description["security"] = [{"token": scopes}, {"password": scopes}] if needs_token else []
    if parameters := list(_iter_parameters(operation, schemas)):
        description["parameters"] = parameters
    bodies = {JSON: operation.body, "multipart/form-data": operation.form}
    content = {name: {"schema": schemas[id(kind)]} for name, kind in bodies.items() if kind}
    if content:
        description["requestBody"] = {"required": True, "content": content}
    answers = {
        str(answer.status): _describe_answer(answer, schemas, IGNORED if content else {})
        for answer in operation.answers
    }
    prefix = "Ollama" if operation.path.startswith("/api/") else ""
    for status in _list_statuses(operation, needs_token=needs_token):
        if str(status) not in answers:
            name = prefix + _REFUSALS[status][0]
            error = schemas[id(OllamaError if prefix else OpenAIError)]
            refusals[name] = _describe_refusal(status, error)
            answers[str(status)] = {"$ref": _RESPONSES + name}
    description["responses"] = dict(sorted(answers.items()))
    return description


def _list_statuses(operation: Operation, *, needs_token: bool) -> list[int]:
    """Return the statuses of refusals: also those that follow from the scope and the body."""
    statuses = {403, 500, *operation.refusals, *([401] if needs_token else [])}
    if operation.body or operation.form:
        statuses |= {400, 408, 413, 415, 429}
    return sorted(statuses | {400} if operation.query else statuses)


def _iter_parameters(operation: Operation, schemas: Mapping[int, Any]) -> Iterable[dict[str, Any]]:
    types = (
        ("path", operation.path_fields),
        ("query", operation.query),
        ("header", operation.headers),
    )
    for location, kind in types:
        if kind is None:
            continue
        fields: dict[str, Any] = schemas[id(kind)]
        for name, schema in fields["properties"].items():
            schema = dict(schema)
            text = {"description": schema.pop("description")} if "description" in schema else {}
            is_required = name in fields.get("required", ())
            yield {"name": name, "in": location, "required": is_required, **text, "schema": schema}


def _describe_answer(
    answer: Answer, schemas: Mapping[int, Any], common_headers: Mapping[str, str]
) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if answer.body is not None:
        content[JSON] = {"schema": schemas[id(answer.body)]}
    content |= {name: {} for name in answer.media}
    description: dict[str, Any] = {"description": answer.description}
    if headers := {**(answer.headers or {}), **common_headers}:
        description["headers"] = _describe_headers(headers)
    return description | ({"content": content} if content else {})


def _describe_refusal(status: int, error: Any) -> dict[str, Any]:
    description: dict[str, Any] = {"description": _REFUSALS[status][1]}
    if status in _HEADERS:
        description["headers"] = _describe_headers(_HEADERS[status])
    return description | {"content": {JSON: {"schema": error}}}


def _describe_headers(descriptions: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: {"description": text, "schema": {"type": "string"}}
        for name, text in descriptions.items()
    }
