"""The adapters of a worker: their groups and words, and their suitability for a model.

The check is that of a request: the layers of an adapter are compared with the tensors of a model.
It reads headers only, and its outcome is cached.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from clowder_aimage.api.model_catalog import build_unknown_error
from clowder_aimage.api.request_body import build_field_error, read_query
from clowder_aimage.api.service import Service
from clowder_aimage.api.store import operation as store_operation
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.generation.request import LoraUse
from clowder_aimage.http.local_request import Request
from clowder_aimage.http.route import Route, share
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage, interpret, read_manifest
from clowder_aimage.model.adapter_source import AdapterFinder, is_adapter
from clowder_aimage.model.runnable import read_model
from clowder_aimage.oci import Descriptor, Digest, Reference

# The components that adapters change
ADAPTED = ("text_encoder", "transformer")
# Limit of the cached outcomes
_MAX_OUTCOMES = 8192
# Trigger words of an adapter
_MAX_WORDS = 64
_MAX_REASON = 600  # characters

Shapes = Mapping[str, tuple[int, ...]]


def build_routes(service: Service) -> list[Route]:
    """Return the route of the list."""
    catalog = AdapterCatalog(service)

    async def answer(request: Request) -> web.StreamResponse:
        query = read_query(request, store_operation.AdaptersQuery)
        data = await run_io(catalog.list_all, query.model or None)
        return web.json_response({"object": "list", "data": data})

    return [share(store_operation.ADAPTERS, answer)]


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter: its name and group, its metadata, and a mark of its content.

    ``open`` returns the file of its weights and its configuration, and raises AImageError.
    """

    name: str
    group: str
    facts: Mapping[str, Any]
    mark: str
    open: Any = field(repr=False)

    def describe(self) -> dict[str, Any]:
        """Return the adapter in the form of the list, without its suitability."""
        words = self.facts.get("triggerWords")
        keys = ("title", "weight", "type", "rank", "base")
        return {
            "id": self.name,
            "group": self.group,
            "triggers": [str(word) for word in words[:_MAX_WORDS]] if words else [],
            **{key: self.facts.get(key) for key in keys},
        }


class AdapterCatalog:
    """The adapters in the directory and in the store, and the outcome of comparisons."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._outcomes: dict[tuple[str, str, str], str] = {}
        self._can_check = importlib.util.find_spec("numpy") is not None

    def list_all(self, model: str | None) -> list[dict[str, Any]]:
        """Return all adapters, with their suitability for a model. Raises ApiError."""
        base = None if model is None else self._read_base(model)
        shapes = _collect_shapes(base) if base is not None and self._can_check else {}
        adapters = [*self._iter_files(), *self._list_stored()]
        adapters.sort(key=lambda adapter: (adapter.group, adapter.name))
        key = model or "", "" if base is None else str(base.descriptor.digest)
        return [
            adapter.describe() | self._describe_suitability(adapter, shapes, *key)
            for adapter in adapters
        ]

    def _read_base(self, model: str) -> StoredAImage:
        try:
            reference = self._service.resolve_reference(model)
            store = self._service.store
            return read_model(store, store.resolve(reference))
        except NotFoundError:
            raise build_unknown_error(model) from None
        except FormatError:
            raise build_field_error("model", f"{model[:200]!a} is not an AImage") from None

    def _iter_files(self) -> Iterator[ListedAdapter]:
        for file in self._service.adapters.list_files():
            group = file.name.rpartition("/")[0]
            mark = f"{file.path} {file.changed}"
            at = (file.path, None)
            yield ListedAdapter(file.name, group, file.metadata, mark, lambda at=at: at)

    def _list_stored(self) -> Iterator[ListedAdapter]:
        store, finder = self._service.store, self._service.adapters
        facts_by_digest: dict[Digest, Mapping[str, Any] | None] = {}
        for name, descriptor in store.list_tags():
            if descriptor.digest not in facts_by_digest:
                facts_by_digest[descriptor.digest] = _read_metadata(store, descriptor)
            if (facts := facts_by_digest[descriptor.digest]) is None:
                continue
            try:
                reference = Reference.parse(name)
            except UsageError:
                # Another tool's name
                continue
            group = reference.repository.rpartition("/")[0]
            at = partial(_find_file, finder, str(reference))
            yield ListedAdapter(str(reference), group, facts, str(descriptor.digest), at)

    def _describe_suitability(
        self, adapter: ListedAdapter, shapes: Shapes, name: str, digest: str
    ) -> dict[str, Any]:
        """Return ``suitable``, None if it is unknown, and the ``reason`` against it."""
        if not shapes:
            return {"suitable": None, "reason": None}
        key = adapter.mark, name, digest
        if key not in self._outcomes:
            if len(self._outcomes) >= _MAX_OUTCOMES:
                self._outcomes.clear()
            self._outcomes[key] = _find_misfit(adapter, shapes, name)
        reason = self._outcomes[key]
        return {"suitable": not reason, "reason": reason or None}


def _read_metadata(store: ImageLayout, descriptor: Descriptor) -> Mapping[str, Any] | None:
    """Return the metadata of an adapter; None if the manifest is not that of an adapter."""
    try:
        aimage = interpret(store, descriptor, read_manifest(store, descriptor)).aimage
        aimage.validate()
    except AImageError:
        # Another artifact, or an incomplete one
        return None
    return aimage.properties.get("adapter", {}) if is_adapter(aimage) else None


def _collect_shapes(base: StoredAImage) -> Shapes:
    layers = base.aimage.layers
    return {
        layer.name: layer.shape for layer in layers if layer.shape and layer.component in ADAPTED
    }


def _find_misfit(adapter: ListedAdapter, shapes: Shapes, base: str) -> str:
    """Return the reason why an adapter does not suit a model; empty if it does."""
    # Imported here, as they import numpy
    from clowder_aimage.adapter.file import open_adapter
    from clowder_aimage.adapter.reader import match_adapter

    try:
        path, config = adapter.open()
        with open_adapter(path, adapter.name, config) as source:
            source.check_size(shapes)
            match_adapter(source, shapes, base)
    except AImageError as error:
        return error.message[:_MAX_REASON]
    except OSError as error:
        return f"cannot read {adapter.name}: {error.strerror or 'it failed'}"
    return ""


def _find_file(finder: AdapterFinder, name: str) -> tuple[Path, Mapping[str, Any] | None]:
    adapter = finder.find(LoraUse(name))
    return adapter.path, adapter.config
