"""The models of a store in OpenAI's interface, and their aliases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from clowder_aimage.api.model_description import ModelDescription
from clowder_aimage.api.model_kind import EMBEDDER, PICTURES, TEXT
from clowder_aimage.api.model_list import describe_all, read_stored_time
from clowder_aimage.api.service import Service
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.model.adapter_source import AdapterFile
from clowder_aimage.oci import Descriptor, Reference


def build_unknown_error(name: str) -> ApiError:
    """Return the error for a missing model."""
    message = f"model {name[:200]!r} not found; GET /v1/models lists the available models"
    return ApiError(404, message, code="model_not_found", param="model")


class ModelCatalog:
    """The list of models: names are read for each request, and models are described once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_all(self) -> list[dict[str, Any]]:
        """Return all runnable models by name, their aliases, and the adapters of both places."""

        def describe(tag: tuple[str, Descriptor]) -> tuple[str, dict[str, Any] | None]:
            # Another tool's name, invalid in a request
            with contextlib.suppress(UsageError):
                reference = Reference.parse(tag[0])
                return str(reference), self._find_facts(reference, tag[1])
            return tag[0], None

        listed = describe_all(self._service.store.list_tags(), describe)
        facts_by_name = {name: facts for name, facts in listed if facts is not None}
        facts_by_name = {name: facts_by_name[name] for name in sorted(facts_by_name)}
        runnable = {name: facts for name, facts in facts_by_name.items() if "adapter" not in facts}
        models = [_describe_model(name, facts) for name, facts in runnable.items()]
        models += [_describe_model(alias, facts) for alias, facts in self._iter_aliases(runnable)]
        stored = {name: facts for name, facts in facts_by_name.items() if "adapter" in facts}
        files = {file.name: _describe_file(file) for file in self._service.adapters.list_files()}
        bases = self._index_names() if stored else {}
        adapters = {**files, **stored}.items()
        return models + [_describe_adapter(name, facts, bases) for name, facts in adapters]

    def find(self, name: str) -> dict[str, Any]:
        """Return the model or adapter with the name of a request. Raises ApiError."""
        if (file := self._service.adapters.find_file(name)) is not None:
            return _describe_adapter(name, _describe_file(file), {})
        try:
            reference = self._service.resolve_reference(name)
            descriptor = self._service.store.resolve(reference)
        except NotFoundError:
            raise build_unknown_error(name) from None
        facts = self._find_facts(reference, descriptor)
        if facts is None:
            raise build_unknown_error(name)
        return (
            _describe_adapter(name, facts, self._index_names())
            if "adapter" in facts
            else _describe_model(name, facts)
        )

    def _iter_aliases(
        self, models: dict[str, dict[str, Any]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for alias in sorted(self._service.settings.aliases):
            try:
                name = str(self._service.resolve_reference(alias))
            except NotFoundError:
                continue
            if name in models and alias not in models:
                yield alias, models[name]

    def _find_facts(self, reference: Reference, descriptor: Descriptor) -> dict[str, Any] | None:
        """Return the facts of a model; None if it is not runnable or not readable."""
        description = self._service.descriptions.find(descriptor)
        facts = None if description is None else _collect_facts(description)
        if description is None or facts is None:
            return None
        created = description.created
        if created is None:
            created = int(read_stored_time(self._service.store, descriptor).timestamp())
        return {"created": created, **facts, "owned_by": reference.registry or "local"}

    def _index_names(self) -> dict[str, str]:
        """Return a name of each manifest, the first in order."""
        tags = sorted(self._service.store.list_tags(), key=lambda tag: tag[0], reverse=True)
        return {str(descriptor.digest): name for name, descriptor in tags}


def _collect_facts(description: ModelDescription) -> dict[str, Any] | None:
    capabilities = {"capabilities": list(description.list_capabilities())}
    if description.adapter is not None:
        return {"adapter": description.adapter, "base": description.subject}
    if description.kind in (TEXT, EMBEDDER):
        context = {"context_length": description.context} if description.context else {}
        return capabilities | context
    if description.kind == PICTURES:
        most = {"max_images": description.max_images}
        return capabilities | most | {"defaults": description.defaults}
    return None


def _describe_adapter(name: str, facts: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of an adapter: ``parent`` is a name of its base, if the store has it."""
    fields = {key: value for key, value in facts.items() if key not in ("base", "adapter")}
    parent = None if facts["base"] is None else names.get(facts["base"])
    return _describe_model(name, fields) | {"parent": parent, "adapter": facts["adapter"]}


def _describe_file(file: AdapterFile) -> dict[str, Any]:
    """Return the facts of an adapter in the directory."""
    return {
        "created": int(file.changed),
        "owned_by": "local",
        "adapter": file.metadata,
        "base": None,
    }


def _describe_model(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "model", **facts}
