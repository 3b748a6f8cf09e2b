"""The fields of the HTTP API, one a line, from the OpenAPI documents of a worker and a gateway.

``python -m tests.api_listing`` writes ``tests/worker/api.txt``, in which changes of the API show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clowder_aimage.api.openapi import build_document
from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.engine.settings import Settings
from clowder_aimage.http.route import Route
from clowder_aimage.layout import ImageLayout
from clowder_aimage.registry import ClientOptions

LISTING = Path(__file__).parent / "worker" / "api.txt"
COMMAND = "python -m tests.api_listing"
_BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "multipleOf": "a multiple of {}",
    "minLength": "{} or more characters",
    "maxLength": "{} characters at most",
    "minItems": "{} or more",
    "maxItems": "{} at most",
    "maxProperties": "{} pairs at most",
    "pattern": "like {}",
    "default": "default {!r}",
}


def worker_routes(*, makes_pictures: bool = True) -> list[Route]:
    with tempfile.TemporaryDirectory() as place:
        service = make_service(Settings(), ImageLayout(Path(place)), ClientOptions())
        return WorkerRole(service, makes_pictures=makes_pictures).build_routes()


def gateway_routes() -> list[Route]:
    from clowder_aimage.fleet.gateway.metric import GatewayMetrics
    from clowder_aimage.fleet.gateway.role import GatewayRole
    from clowder_aimage.fleet.link import FleetAccess, FleetLink
    from clowder_aimage.fleet.name import GATEWAY, FleetNames
    from clowder_aimage.oci import Digest, Reference

    def resolve(reference: Reference) -> Digest:
        raise NotImplementedError(reference)

    link = FleetLink(FleetAccess(("nats://localhost",), FleetNames("listed")), GATEWAY)
    return GatewayRole(link, GatewayMetrics(), resolve=resolve).build_routes()


def listing() -> str:
    """Return the lines of a worker, and after "+" and "-" how those of a gateway differ."""
    own, other = (
        list(_lines(build_document(routes, title="", has_tokens=True)))
        for routes in (worker_routes(), gateway_routes())
    )
    more = [f"+ {line}" for line in other if line not in own]
    less = [f"- {line}" for line in own if line not in other and line.split()[0].isupper()]
    return "\n".join([*own, "", "A gateway:", *sorted(more + less, key=lambda line: line[2:]), ""])


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for path, methods in sorted(found["paths"].items()):
        for method, operation in sorted(methods.items()):
            yield from _of_operation(f"{method.upper()} {path}", operation)
    for name, schema in found["components"]["schemas"].items():
        yield from _fields(f"{name}.", schema)


def _fields(place: str, schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for field, one in schema["properties"].items():
        yield f"{place}{field}: {_kind(one)}{', required' if field in required else ''}"


def _of_operation(name: str, operation: dict[str, Any]) -> Iterator[str]:
    answers = operation["responses"]
    refusals = [status for status, answer in answers.items() if "$ref" in answer]
    yield f"{name}: scope {operation['x-aimage-scope']}, refused by {' '.join(refusals)}"
    for one in operation.get("parameters", ()):
        required = ", required" if one["required"] else ""
        yield f"{name} {one['in']} {one['name']}: {_kind(one['schema'])}{required}"
    yield from _contents(f"{name} body", operation.get("requestBody", {}))
    for status in sorted(answers.keys() - {*refusals}):
        yield from _contents(f"{name} {status}", answers[status])


def _contents(name: str, value: dict[str, Any]) -> Iterator[str]:
    for media, content in value.get("content", {}).items():
        schema = content.get("schema", {})
        if "properties" in schema:
            yield from _fields(f"{name} {media} ", schema)
        else:
            yield f"{name} {media}{': ' + _kind(schema) if schema else ''}"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema or "const" in schema:
        text = " | ".join(repr(each) for each in schema.get("enum", [schema.get("const")]))
    elif "anyOf" in schema:
        text = " | ".join(_kind(one) for one in schema["anyOf"])
    else:
        kinds = schema.get("type", "any")
        text = " | ".join([kinds] if isinstance(kinds, str) else kinds)
    for name, word in ("items", "of"), ("additionalProperties", "of"):
        if isinstance(schema.get(name), dict) and schema[name]:
            text += f" {word} ({_kind(schema[name])})"
    if "prefixItems" in schema:
        text += f" of ({', '.join(map(_kind, schema['prefixItems']))})"
    bounds = [how.format(schema[name]) for name, how in _BOUNDS.items() if name in schema]
    return ", ".join([text, *bounds])


if __name__ == "__main__":
    LISTING.write_text(listing(), "utf-8")
