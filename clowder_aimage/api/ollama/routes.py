"""ollama's API for the models of a worker (ollama, docs/api.md).

The JSON is what clients require: the ``ollama`` Python client, and Open WebUI, which parses
versions with ``int()``, requires ``name`` and ``model`` of every model, and parses ``expires_at``
with ``datetime.fromisoformat``.
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
from clowder_aimage.api.model_list import capabilities, details, used_loras
from clowder_aimage.api.ollama import operation
from clowder_aimage.api.ollama.operation import CopyBody, LoadedModel, OllamaModel, ShownModel
from clowder_aimage.api.request_body import ModelBody, NamedBody, TransferBody, read_body
from clowder_aimage.api.service import Service
from clowder_aimage.engine.executor import run_io, run_locking
from clowder_aimage.engine.queued_request import ModelSlot
from clowder_aimage.engine.shared_transfer import SharedTransfer
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.http.api_error import ApiError, registry_error
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import Route, serve, share
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype

FOR_EVER = timedelta(days=365 * 100)  # expiry of a model that is never unloaded
_Lines = AsyncGenerator[dict[str, Any], None]


def routes(service: Service) -> list[Route]:
    """Return the routes of this interface that do not use a model."""
    return [
        *open_routes(),
        share(operation.TAGS, partial(_tags, service)),
        share(operation.PS, partial(_ps, service)),
        share(operation.SHOW, partial(_show, service)),
        share(operation.PULL, partial(_pull, service)),
        share(operation.PUSH, partial(_push, service)),
        share(operation.COPY, partial(_copy, service)),
        share(operation.DELETE, partial(_delete, service)),
    ]


def open_routes() -> list[Route]:
    """Return the routes that need no token: they tell what this server is."""
    return [serve(operation.VERSION, _version)]


async def _version(_: Request) -> web.StreamResponse:
    found = re.match(r"[0-9]+(\.[0-9]+)*", __version__)
    number = found[0] if found else "0"
    return web.json_response({"version": number}, headers={"X-Aimage-Version": number})


# -- reading


async def _tags(service: Service, _: Request) -> web.StreamResponse:
    def models() -> list[OllamaModel]:
        found = [one for one in model_list.items(service.store) if not one.missing]
        return model_list.describe_all(found, partial(_model, service.store))

    return web.json_response({"models": await run_io(models)})


def _model(store: ImageLayout, item: model_list.ModelEntry) -> OllamaModel:
    known, aimage, facts = model_list.described_model(store, item.reference)
    return {
        "name": str(item.reference),
        "model": str(item.reference),
        "digest": item.descriptor.digest.encoded,  # without its algorithm, as in ollama
        "modified_at": model_list.changed(store, item.descriptor).isoformat(),
        "size": item.size,
        "details": details(known),
        "capabilities": capabilities(aimage, facts),
    }


async def _ps(service: Service, _: Request) -> web.StreamResponse:
    slots = service.engine.list_loaded()
    describe = partial(_loaded, service.store)
    models = await run_io(lambda: model_list.describe_all(slots, describe))
    return web.json_response({"models": models})


def _loaded(store: ImageLayout, model: ModelSlot) -> LoadedModel:
    size = model.runner.size if model.runner is not None else 0
    device = model.runner.device if model.runner is not None else ""
    until = model.until or datetime.now(UTC) + FOR_EVER
    is_gpu = "gpu" in device.lower() or "metal" in device.lower()
    known, _, _ = model_list.described_model(store, model.reference)
    context = model.runner.context if model.runner is not None else 0
    found: LoadedModel = {
        "name": str(model.reference),
        "model": str(model.reference),
        "digest": model.digest.encoded,
        "size": size,
        "size_vram": size if is_gpu else 0,
        "device": device,
        "details": details(known),
        "expires_at": until.isoformat(),
    }
    if context:
        found["context_length"] = context
    if model.loras:
        found["loras"] = used_loras(model.loras)
    return found


async def _show(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, ModelBody)
    reference = service.reference(body.reference)

    item = await run_io(model_list.item, service.store, reference)
    if item is None:
        raise model_list.unknown(reference)
    return web.json_response(await run_io(_shown, service.store, item))


def _shown(store: ImageLayout, item: model_list.ModelEntry) -> ShownModel:
    known, aimage, text = model_list.described_model(store, item.reference)
    defaults = given if isinstance(given := known.get("defaults"), dict) else {}
    family = details(known)["family"]
    facts: dict[str, Any] = {"general.architecture": family}
    facts |= {"general.parameter_count": known["parameters"]} if "parameters" in known else {}
    facts |= {f"{family}.context_length": text.context} if text and text.context else {}
    facts |= {"aimage.digest": str(item.descriptor.digest)}
    kept = ("pipeline", "format", "name", "dtype", "source", "created")
    facts |= {f"aimage.{key}": known[key] for key in kept if key in known}
    return {
        "license": str(known.get("license") or ""),
        "modelfile": f"FROM {item.reference}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in sorted(defaults.items())),
        "template": text.template if text else "",
        "details": details(known),
        "model_info": facts,
        "capabilities": capabilities(aimage, text),
        "modified_at": model_list.changed(store, item.descriptor).isoformat(),
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
        raise model_list.unknown(source)
    return web.Response()


def copy_name(store: ImageLayout, source: Reference, target: Reference) -> bool:
    """Give the AImage ``source`` another name; return whether it is there. Run in a thread."""
    if _source(store, source) is None:  # before a store is created for nothing
        return False
    with store.keep():
        if (found := _source(store, source)) is None:
            return False
        is_partial = found.annotations.get(mediatype.PARTIAL) == "true"
        store.tag(found, target, is_partial=is_partial)
    return True


def _source(store: ImageLayout, source: Reference) -> Descriptor | None:
    """Return the descriptor to copy: by its name, or by a digest alone."""
    found = model_list.entry(store, source)
    if found is None and source.digest is not None:
        with contextlib.suppress(NotFoundError):
            return store.resolve(source)
    return found


async def _pull(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, TransferBody)
    reference = Reference.parse(body.reference)
    _check_insecure(service, body, reference)
    with service.transfers.pull(reference) as transfer:
        lines = _progress(transfer, "pulling", "verifying sha256 digest", "writing manifest")
        return await _answer_lines(request, body.stream, lines)


async def _push(service: Service, request: Request) -> web.StreamResponse:
    body = await read_body(request, TransferBody)
    reference = Reference.parse(body.reference)
    _check_insecure(service, body, reference)
    if await run_io(model_list.entry, service.store, reference) is None:
        raise model_list.unknown(reference)
    with service.transfers.push(reference) as transfer:
        lines = _progress(transfer, "pushing", "pushing manifest")
        return await _answer_lines(request, body.stream, lines)


def _check_insecure(service: Service, body: TransferBody, reference: Reference) -> None:
    """Raise ApiError (403) for an insecure registry that is not configured as such."""
    if not body.insecure or reference.is_loopback:
        return
    known = service.connection.to(reference.registry or "")
    if not known.plain_http and not known.insecure:
        message = "a request cannot disable TLS for a registry: configure it for the worker"
        raise ApiError(403, message, code="insecure_registry")


async def _answer_lines(request: Request, is_streaming: bool, lines: _Lines) -> web.StreamResponse:
    answer, last = NdjsonStream(request), dict[str, Any]()
    async with contextlib.aclosing(lines):
        try:
            async for last in lines:
                if is_streaming:
                    await answer.write(last)
        except AImageError as error:
            return await answer.fail(registry_error(error))
    return await answer.end() if is_streaming else web.json_response(last)


async def _progress(transfer: SharedTransfer, verb: str, *last: str) -> _Lines:
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
    for status in (*last, "success"):
        yield {"status": status}
