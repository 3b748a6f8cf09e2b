"""Clowder's storage API: stored content addressed by URL.

The requests are those of Clowder's storage manager (aifoundry-org/storage-manager, README.md, "API"
and "Downloaders"), with the statuses that it documents: 200, 201, 204, 206, 404. All other
responses are described in docs/api.md.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from dataclasses import replace
from functools import partial

from aiohttp import web

from clowder_aimage.api import model_list
from clowder_aimage.api.request_body import build_field_error, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.api.store import storage_operation as operation
from clowder_aimage.api.store.storage_operation import Content, ContentBody
from clowder_aimage.engine.executor import run_io
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.engine.transfer_queue import Credentials
from clowder_aimage.errors import AImageError, FormatError, UnauthorizedError
from clowder_aimage.http.api_error import ApiError, convert_registry_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import Route, share
from clowder_aimage.importer.ollama_store import HOST as OLLAMA
from clowder_aimage.importer.ollama_store import NAMESPACE
from clowder_aimage.layout.snapshot import find_descriptor
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.pull import resolve_stored_name
from clowder_aimage.registry.docker_config import Credential

# Seconds for a pull to end when its content is deleted
STOP_TIMEOUT = 3.0
_MAX_URL = 1500  # characters of a URL
# Schemes that the storage manager supports, and this worker does not
_OTHERS = ("hf", "huggingface", "http", "https")


def build_routes(service: Service) -> list[Route]:
    """Return the routes of this interface."""
    return [
        share(operation.LIST, partial(_list, service)),
        share(operation.ADD, partial(_post, service)),
        share(operation.GET, partial(_get, service)),
        share(operation.DELETE, partial(_delete, service)),
    ]


# -- URLs


def encode(url: str) -> str:
    """Encode a URL as a path segment."""
    return base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def decode(segment: str) -> str:
    """Decode a URL from base64 in either alphabet (RFC 4648, 4 and 5), padded or not.

    Raises ApiError (404): nothing can have this name.
    """
    # Clients differ in the alphabet and in the padding: accept all
    plain = segment.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        message = "not found: the path does not end in a URL in base64"
        raise ApiError(404, message, code="content_not_found") from None


def parse(url: str) -> Reference:
    """Return the reference of a URL.

    It is ``oci://REGISTRY/REPOSITORY[:TAG][@DIGEST]``, or ``ollama://[NAMESPACE/]MODEL[:TAG]`` for
    ollama's own registry.

    Raises ApiError: 422 for an unsupported scheme, 400 for a malformed URL; UsageError.
    """
    scheme, separator, name = url.partition("://")
    scheme = scheme.lower()
    if not separator or re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) is None or len(url) > _MAX_URL:
        raise _build_url_error("url must be a URL such as oci://registry.example.com/team/model:v1")
    if scheme in _OTHERS:
        message = f"{scheme}:// is not supported; push the model to a registry, and use oci://"
        raise ApiError(422, message, code="unsupported_scheme", param="url")
    if scheme not in ("oci", "ollama"):
        raise _build_url_error("url must begin with oci:// or ollama://")
    _check_user(name)
    reference = Reference.parse(name.lstrip("/") if scheme == "ollama" else name)
    if scheme == "oci" or reference.registry is not None:
        return reference
    name = reference.repository
    full = name if "/" in name else f"{NAMESPACE}/{name}"
    return replace(reference, registry=OLLAMA, repository=full)


def _check_user(name: str) -> None:
    """Raise ApiError unless a digest follows the @; credentials are not repeated."""
    _, at, digest = name.partition("@")
    try:
        if at:
            Digest.parse(digest)
    except FormatError:
        text = "url must have a digest after the @; send credentials in the field 'credentials'"
        raise _build_url_error(text) from None


def _build_url_error(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_url", param="url")


def _format_url(reference: Reference) -> str:
    return f"oci://{reference}"


def _parse_credentials(body: ContentBody) -> Credentials | None:
    """Return the credentials of a body, if any.

    They are a token, or base64 of ``user:password`` if ``credentialsType`` is ``Basic``. Raises
    ApiError without repeating them.
    """
    value, kind = body.credentials, body.credentialsType.lower()
    if kind not in ("", "bearer", "basic"):
        raise build_field_error("credentialsType", "must be Bearer or Basic")
    if not value:
        return None
    if kind == "basic":
        if Credential.of_basic(value) is None:
            raise build_field_error("credentials", "must be base64 of 'user:password'")
        return Credentials(("auth", value))
    if re.fullmatch(r"[!-~]+", value) is None:
        raise build_field_error("credentials", "must be a token without spaces")
    return Credentials(("registrytoken", value))


# -- requests


async def _list(service: Service, _: Request) -> web.StreamResponse:
    entries = await run_io(model_list.list_entries, service.store)
    listed = [_describe_entry(entry) for entry in entries]
    complete = {str(entry.reference) for entry in entries if not entry.missing}
    pulls = [
        entry for entry in service.transfers.list_pulls() if str(entry.reference) not in complete
    ]
    listed = [
        entry
        for entry in listed
        if entry["url"] not in {_format_url(pull.reference) for pull in pulls}
    ]
    return web.json_response({"content": listed + [_describe_pull(pull) for pull in pulls]})


async def _get(service: Service, request: Request) -> web.StreamResponse:
    reference = _of_path(request)
    item = await run_io(model_list.find_entry, service.store, reference)
    if item is not None and not item.missing:
        return web.json_response(_describe_entry(item))
    if (pull := service.transfers.find_pull(reference)) is not None:
        return web.json_response(_describe_pull(pull), status=206)
    if item is None:
        raise _build_unknown_error(reference)
    return web.json_response(_describe_entry(item), status=206)


async def _post(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, ContentBody)
    reference, credentials = parse(body.url), _parse_credentials(body)
    item = await run_io(model_list.find_entry, service.store, reference)
    if item is not None and not item.missing:
        return _respond_created(item, 200)
    with service.transfers.pull(reference, credentials) as pull:
        # The pull goes on if the client disconnects: it may poll later
        pull.is_kept = True
        try:
            root = await pull.wait()
        except UnauthorizedError as error:
            raise ApiError(403, error.message, code="registry_unauthorized") from None
        except AImageError as error:
            raise convert_registry_error(error) from None
    item = await run_io(model_list.find_entry, service.store, resolve_stored_name(reference, root))
    if item is None:
        # Another request has deleted it
        raise _build_unknown_error(reference)
    return _respond_created(item, 201)


async def _delete(service: Service, request: Request) -> web.StreamResponse:
    reference = _of_path(request)
    was_pulled = await _stop_pulls(service, reference)
    descriptor = await run_io(find_descriptor, service.store, reference)
    if descriptor is not None or not was_pulled:
        await model_list.delete(service, reference)
    return web.Response(status=204)


async def _stop_pulls(service: Service, reference: Reference) -> bool:
    """Stop the pulls of content that is being deleted; return False if there was none.

    Raises ApiError (409) if a pull does not end.
    """
    pulls = [pull for pull in service.transfers.list_pulls() if pull.reference == reference]
    for pull in pulls:
        pull.stop()
    if pulls:
        _, pending = await asyncio.wait([pull.result for pull in pulls], timeout=STOP_TIMEOUT)
        if pending:
            message = f"{reference} is being pulled, and the pull did not stop; try again later"
            later = {"Retry-After": "10"}
            raise ApiError(409, message, code="pull_under_way", headers=later)
    return bool(pulls)


def _of_path(request: Request) -> Reference:
    """Return the reference of the URL in a path. Raises ApiError (404): nothing can have it."""
    try:
        return parse(decode(request.match_info["url"]))
    except AImageError as error:
        raise ApiError(404, error.message, code="content_not_found") from None


def _build_unknown_error(reference: Reference) -> ApiError:
    return ApiError(404, f"{_format_url(reference)} not found", code="content_not_found")


def _respond_created(item: model_list.ModelEntry, status: int) -> web.Response:
    location = f"/content/{encode(_format_url(item.reference))}"
    return web.json_response(_describe_entry(item), status=status, headers={"Location": location})


def _describe_entry(item: model_list.ModelEntry) -> Content:
    value: Content = {
        "url": _format_url(item.reference),
        "digest": str(item.descriptor.digest),
        "size": item.size,
        "status": "partial" if item.missing else "complete",
    }
    if item.missing:
        size = sum(blob.size for blob in item.missing)
        value["missing"] = {"blobs": len(item.missing), "size": size}
    return value


def _describe_pull(pull: SharedTransfer) -> Content:
    url, completed = _format_url(pull.reference), min(pull.completed, pull.total)
    return {"url": url, "status": "pulling", "completed": completed, "total": pull.total}
