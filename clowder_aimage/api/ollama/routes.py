"""ollama's API for the models of a worker (ollama, docs/api.md).

The JSON satisfies the ``ollama`` Python client and Open WebUI. The latter parses versions with
``int()``, requires ``name`` and ``model`` of every model, and parses ``expires_at`` with
``datetime.fromisoformat``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from aiohttp import web

from clowder_aimage import __version__
from clowder_aimage.api import model_list
from clowder_aimage.api.answer_stream import NdjsonStream
from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.api.model_details import build_details, list_capabilities
from clowder_aimage.api.model_kind import EMBEDDER, TEXT, classify_model
from clowder_aimage.api.model_list import describe_loras
from clowder_aimage.api.ollama import operation
from clowder_aimage.api.ollama.operation import CopyBody, LoadedModel, OllamaModel, ShownModel
from clowder_aimage.api.request_body import ModelBody, NamedBody, TransferBody, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.engine.queued_request import ModelSlot
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.http.api_error import ApiError, convert_registry_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import Route, serve, share
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.text.text_facts import read_text_facts
from clowder_aimage.oci import Descriptor, Reference, mediatype

# Expiry of a model that is never unloaded
FOR_EVER = timedelta(days=365 * 100)
_Lines = AsyncGenerator[dict[str, Any], None]


def build_routes(service: Service) -> list[Route]:
    """Return the routes of this interface that do not use a model."""
    return [
        *build_open_routes(),
        share(operation.TAGS, partial(_list_models, service)),
        share(operation.PS, partial(_list_loaded, service)),
        share(operation.SHOW, partial(_show, service)),
        share(operation.PULL, partial(_pull, service)),
        share(operation.PUSH, partial(_push, service)),
        share(operation.COPY, partial(_copy, service)),
        share(operation.DELETE, partial(_delete, service)),
    ]


def build_open_routes() -> list[Route]:
    """Return the routes that need no token: clients identify the server by them."""
    return [serve(operation.VERSION, _show_version)]


async def _show_version(_: Request) -> web.StreamResponse:
    match = re.match(r"[0-9]+(\.[0-9]+)*", __version__)
    number = match[0] if match else "0"
    return web.json_response({"version": number}, headers={"X-Aimage-Version": number})


# -- reading


async def _list_models(service: Service, _: Request) -> web.StreamResponse:
    def list_complete() -> list[OllamaModel]:
        complete = [entry for entry in model_list.list_entries(service.store) if not entry.missing]
        return model_list.describe_all(complete, partial(_describe_entry, service))

    return web.json_response({"models": await run_io(list_complete)})


def _describe_entry(service: Service, item: model_list.ModelEntry) -> OllamaModel:
    description = service.descriptions.find(item.descriptor)
    return {
        "name": str(item.reference),
        "model": str(item.reference),
        # ollama's digests have no algorithm
        "digest": item.descriptor.digest.encoded,
        "modified_at": model_list.read_stored_time(service.store, item.descriptor).isoformat(),
        "size": item.size,
        "details": description.details if description else build_details({}),
        "capabilities": list_capabilities(description.list_capabilities() if description else ()),
    }


async def _list_loaded(service: Service, _: Request) -> web.StreamResponse:
    slots = service.engine.list_loaded()
    describe = partial(_describe_loaded, service.descriptions)
    models = await run_io(lambda: model_list.describe_all(slots, describe))
    return web.json_response({"models": models})


def _describe_loaded(descriptions: ModelDescriptions, model: ModelSlot) -> LoadedModel:
    size = model.runner.size if model.runner is not None else 0
    device = model.runner.device if model.runner is not None else ""
    until = model.until or datetime.now(UTC) + FOR_EVER
    # ollama's clients show the share of size_vram as that of the GPU
    is_gpu = model.runner is not None and model.runner.is_on_gpu
    facts = descriptions.find(model.stored.descriptor)
    context = model.runner.context if model.runner is not None else 0
    description: LoadedModel = {
        "name": str(model.reference),
        "model": str(model.reference),
        "digest": model.digest.encoded,
        "size": size,
        "size_vram": size if is_gpu else 0,
        "device": device,
        "details": facts.details if facts else build_details({}),
        "expires_at": until.isoformat(),
    }
    if variants := model.list_names()[1:]:
        description["variants"] = variants
    if context:
        description["context_length"] = context
    if model.loras:
        description["loras"] = describe_loras(model.loras)
    return description


async def _show(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, ModelBody)
    reference = service.resolve_reference(body.reference)

    item = await run_io(model_list.find_entry, service.store, reference)
    if item is None:
        raise model_list.build_missing_error(reference)
    return web.json_response(await run_io(_describe_model, service, item))


def _describe_model(service: Service, item: model_list.ModelEntry) -> ShownModel:
    store, description = service.store, service.descriptions.find(item.descriptor)
    aimage = model_list.read_valid(store, item.descriptor) if description else None
    is_text = aimage is not None and classify_model(aimage) in (TEXT, EMBEDDER)
    text = read_text_facts(store, item.descriptor.digest, aimage) if aimage and is_text else None
    properties = aimage.properties if aimage else {}
    defaults = stated if isinstance(stated := properties.get("defaults"), dict) else {}
    family = build_details(properties)["family"]
    facts: dict[str, Any] = {"general.architecture": family}
    facts |= (
        {"general.parameter_count": properties["parameters"]} if "parameters" in properties else {}
    )
    facts |= {f"{family}.context_length": text.context} if text and text.context else {}
    facts |= {"aimage.digest": str(item.descriptor.digest)}
    keys = ("pipeline", "format", "name", "dtype", "source", "created")
    facts |= {f"aimage.{key}": properties[key] for key in keys if key in properties}
    return {
        "license": str(properties.get("license") or ""),
        "modelfile": f"FROM {item.reference}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in sorted(defaults.items())),
        "template": text.template if text else "",
        "details": build_details(properties),
        "model_info": facts,
        "capabilities": list_capabilities(description.list_capabilities() if description else ()),
        "modified_at": model_list.read_stored_time(store, item.descriptor).isoformat(),
    }


# -- changing


async def _delete(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, NamedBody)
    await model_list.delete(service, Reference.parse(body.reference))
    return web.Response()


async def _copy(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, CopyBody)
    source, target = Reference.parse(body.source), Reference.parse(body.destination)
    if not await run_locking(copy_name, service.store, source, target):
        raise model_list.build_missing_error(source)
    return web.Response()


def copy_name(store: ImageLayout, source: Reference, target: Reference) -> bool:
    """Give the AImage ``source`` another name; return False if it is missing. Run in a thread."""
    # Checked first: taking a lease would create a missing store
    if _find_source(store, source) is None:
        return False
    with store.keep():
        if (descriptor := _find_source(store, source)) is None:
            return False
        is_partial = descriptor.annotations.get(mediatype.PARTIAL) == "true"
        store.tag(descriptor, target, is_partial=is_partial)
    return True


def _find_source(store: ImageLayout, source: Reference) -> Descriptor | None:
    """Return the descriptor to copy: by its name, or by a digest alone."""
    descriptor = model_list.find_descriptor(store, source)
    if descriptor is None and source.digest is not None:
        with contextlib.suppress(NotFoundError):
            return store.resolve(source)
    return descriptor


async def _pull(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, TransferBody)
    reference = Reference.parse(body.reference)
    _check_insecure(service, body, reference)
    with service.transfers.pull(reference) as transfer:
        lines = _iter_progress(transfer, "pulling", "verifying sha256 digest", "writing manifest")
        return await _answer_lines(request, body.stream, lines)


async def _push(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, TransferBody)
    reference = Reference.parse(body.reference)
    _check_insecure(service, body, reference)
    if await run_io(model_list.find_descriptor, service.store, reference) is None:
        raise model_list.build_missing_error(reference)
    with service.transfers.push(reference) as transfer:
        lines = _iter_progress(transfer, "pushing", "pushing manifest")
        return await _answer_lines(request, body.stream, lines)


def _check_insecure(service: Service, body: TransferBody, reference: Reference) -> None:
    """Raise ApiError (403) for an insecure registry that is not configured as such."""
    if not body.insecure or reference.is_loopback:
        return
    host = service.connection.to(reference.registry or "")
    if not host.plain_http and not host.insecure:
        message = "a request cannot disable TLS for a registry: configure it for the worker"
        raise ApiError(403, message, code="insecure_registry")


async def _answer_lines(request: Request, is_streaming: bool, lines: _Lines) -> web.StreamResponse:
    answer, line = NdjsonStream(request), dict[str, Any]()
    async with contextlib.aclosing(lines):
        try:
            async for line in lines:
                if is_streaming:
                    await answer.write(line)
        except AImageError as error:
            return await answer.fail(convert_registry_error(error))
    return await answer.end() if is_streaming else web.json_response(line)


async def _iter_progress(transfer: SharedTransfer, verb: str, *final_statuses: str) -> _Lines:
    """Yield the lines of a transfer; ``size``, an extension, is that of all blobs."""
    yield {"status": "pulling manifest" if verb == "pulling" else "retrieving manifest"}
    async with contextlib.aclosing(transfer.watch()) as blobs:
        async for blob in blobs:
            yield {
                "status": f"{verb} {blob.digest.short}",
                "digest": str(blob.digest),
                "total": blob.total,
                "completed": blob.completed,
                "size": transfer.total,
            }
    for status in (*final_statuses, "success"):
        yield {"status": status}
