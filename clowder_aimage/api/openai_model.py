"""The models of a store in OpenAI's interface: image models and aliases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from clowder_aimage.adapter_source import AdapterFile, is_adapter
from clowder_aimage.api.image_request import ImageRequest
from clowder_aimage.api.model_list import describe_all
from clowder_aimage.api.request_body import wrong
from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.admission import ALWAYS, IF_MISSING, NEVER
from clowder_aimage.engine.executor import run_generation, run_io
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, StoreError, UsageError
from clowder_aimage.formats.diffusers import FAMILIES
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage, read_aimage
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.oci.reference import DEFAULT_TAG
from clowder_aimage.pictures.picture_role import max_images

_PARTS = {"text_encoder", "transformer", "vae"}
_MAX_NAMED = 10  # models in a message
_MAX_KNOWN = 4096  # cached manifests


def is_runnable(aimage: AImage) -> bool:
    """Return whether the AImage belongs to a family of image models that can be run.

    An AImage of another tool may lack its family; then its components are checked.
    """
    properties = aimage.properties
    if "family" in properties:
        return bool(properties["family"] in FAMILIES)
    return "format" not in properties and properties.get("components", {}).keys() >= _PARTS


def read_model(store: ImageLayout, reference: Reference) -> StoredAImage:
    """Return the AImage with its validated config. Raises NotFoundError, ContentError."""
    stored = read_aimage(store, reference)
    stored.aimage.validate()
    return stored


def unknown_model(name: str) -> ApiError:
    """Return the error for a missing model."""
    message = f"model {name[:200]!r} not found; GET /v1/models lists the available models"
    return ApiError(404, message, code="model_not_found", param="model")


@dataclass(frozen=True, slots=True)
class SelectedModel:
    """The AImage of a request, if it is in the store, and when it may be pulled.

    ``is_default``: it replaces another model. ``adapter``: the request names an adapter, whose base
    model this is.
    """

    reference: Reference
    aimage: AImage | None
    pull: str
    is_default: bool = False
    adapter: Reference | None = None


async def choose_model(service: Service, body: ImageRequest, *, may_pull: bool) -> SelectedModel:
    """Return the model that generates the pictures.

    The worker's default replaces only unknown names that clients have built in, see ``default_for``
    of the settings. A name with a registry or a digest is never replaced. Raises ApiError.
    """
    pull = body.pull if may_pull else NEVER
    reference = _parse(service, body.model)
    aimage, is_default = await read_here(service, reference), False
    if aimage is None and not (reference.registry and pull != NEVER):
        is_exact = reference.registry is not None or reference.digest is not None
        is_literal = service.alias(body.model) is None if body.model else False
        is_built_in = body.model is None or _is_built_in(service, body.model)
        has_default = service.settings.default_model is not None
        if not (has_default and is_built_in) or (is_exact and is_literal):
            raise await run_io(_missing, service, body.model or str(reference))
        reference, is_default = service.reference(None), True
        aimage = await read_here(service, reference)
        if aimage is None and not (reference.registry and pull != NEVER):
            raise await run_io(_missing, service, body.model or str(reference))
    adapter = None
    if aimage is not None and is_adapter(aimage):
        adapter, reference = reference, await run_io(_base_of, service, reference, aimage)
    if reference.registry is None and pull == ALWAYS:
        pull = IF_MISSING
    return SelectedModel(reference, aimage, pull, is_default, adapter)


def _base_of(service: Service, reference: Reference, adapter: AImage) -> Reference:
    """Return a name of the base model of an adapter. Raises ApiError if the store has none."""
    digest = adapter.subject and adapter.subject.digest
    for name, descriptor in sorted(service.store.tags(), key=lambda tag: tag[0]):
        if descriptor.digest == digest:
            with contextlib.suppress(UsageError):  # another tool's name
                return Reference.parse(name)
    message = f"{reference} is an adapter, whose base model is not here: use it in loras"
    raise wrong("model", message, "model_not_supported")


def _is_built_in(service: Service, name: str) -> bool:
    plain = name.removesuffix(f":{DEFAULT_TAG}")
    return any(fnmatchcase(plain, pattern) for pattern in service.settings.default_for)


def _missing(service: Service, name: str) -> ApiError:
    """Return the error for a missing model, with the names of those that the store has."""
    models = ModelCatalog(service).all()
    names = [model["id"] for model in models if "adapter" not in model]
    if not names:
        return unknown_model(name)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    message = f"model {name[:200]!r} not found; available: {', '.join(names[:_MAX_NAMED])}{more}"
    return ApiError(404, message, code="model_not_found", param="model")


def _parse(service: Service, name: str | None) -> Reference:
    try:
        return service.reference(name)
    except UsageError as error:
        code = "invalid_value" if name else "missing_required_parameter"
        message = error.message.encode("ascii", "backslashreplace").decode()
        raise ApiError(400, message[:300], code=code, param="model") from None


async def read_here(service: Service, reference: Reference) -> AImage | None:
    """Return the AImage if it is in the store. Raises ApiError if it is not an image model."""
    try:
        stored = await run_generation(read_model, service.store, reference)
    except NotFoundError:
        return None
    except FormatError:
        raise no_pictures(reference) from None
    return stored.aimage


def no_pictures(reference: Reference) -> ApiError:
    """Return the error for an AImage that is not an image model."""
    return wrong("model", f"{reference} is not a supported image model", "model_not_supported")


class ModelCatalog:
    """The list of models, read from the store for each request; manifest facts are cached."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[Digest, dict[str, Any] | None] = {}

    def all(self) -> list[dict[str, Any]]:
        """Return all runnable models by name, their aliases, and the adapters of both places."""

        def described(tag: tuple[str, Descriptor]) -> tuple[str, dict[str, Any] | None]:
            with contextlib.suppress(UsageError):  # another tool's name, invalid in a request
                reference = Reference.parse(tag[0])
                return str(reference), self._facts(reference, tag[1].digest)
            return tag[0], None

        listed = describe_all(self._service.store.tags(), described)
        known = {name: facts for name, facts in listed if facts is not None}
        known = {name: known[name] for name in sorted(known)}
        found = {name: facts for name, facts in known.items() if "adapter" not in facts}
        models = [_model(name, facts) for name, facts in found.items()]
        models += [_model(alias, facts) for alias, facts in self._aliases(found)]
        rest = {name: facts for name, facts in known.items() if "adapter" in facts}
        files = {one.name: _file_facts(one) for one in self._service.adapters.files()}
        bases = self._names() if rest else {}
        adapters = {**files, **rest}.items()
        return models + [_adapter(name, facts, bases) for name, facts in adapters]

    def one(self, name: str) -> dict[str, Any]:
        """Return the model or adapter with the name of a request. Raises ApiError."""
        if (file := self._service.adapters.file(name)) is not None:
            return _adapter(name, _file_facts(file), {})
        try:
            reference = self._service.reference(name)
            descriptor = self._service.store.resolve(reference)
        except (UsageError, NotFoundError):
            raise unknown_model(name) from None
        facts = self._facts(reference, descriptor.digest)
        if facts is None:
            raise unknown_model(name)
        return _adapter(name, facts, self._names()) if "adapter" in facts else _model(name, facts)

    def _aliases(self, found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for alias in sorted(self._service.settings.aliases):
            try:
                name = str(self._service.reference(alias))
            except UsageError:
                continue
            if name in found and alias not in found:
                yield alias, found[name]

    def _facts(self, reference: Reference, digest: Digest) -> dict[str, Any] | None:
        """Return the facts of a model; None if it is not runnable or not readable."""
        try:
            facts = self._known[digest]
        except KeyError:
            try:
                facts = self._read(reference)
            except (NotFoundError, StoreError):
                return None  # it may be stored, or readable, later
            except AImageError:
                facts = None
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[digest] = facts
        return facts and {**facts, "owned_by": reference.registry or "local"}

    def _read(self, reference: Reference) -> dict[str, Any] | None:
        stored = read_model(self._service.store, reference)
        properties, facts = stored.aimage.properties, dict[str, Any]()
        if is_adapter(stored.aimage):
            subject = stored.aimage.subject
            facts = {"adapter": properties.get("adapter", {}), "base": subject and subject.digest}
        elif not is_runnable(stored.aimage):
            return None
        else:
            facts = {"max_images": max_images(properties)}
        with contextlib.suppress(KeyError, ValueError, OverflowError):  # an invalid date
            created = datetime.fromisoformat(properties["created"])
            return {"created": int(created.timestamp()), **facts}
        path = self._service.store.path(stored.descriptor)
        return {"created": int(path.stat().st_mtime), **facts}

    def _names(self) -> dict[Digest, str]:
        """Return a name of each manifest, the first in order."""
        tags = sorted(self._service.store.tags(), key=lambda tag: tag[0], reverse=True)
        return {descriptor.digest: name for name, descriptor in tags}


def _adapter(name: str, facts: dict[str, Any], names: Mapping[Digest, str]) -> dict[str, Any]:
    """Return the entry of an adapter: ``parent`` is a name of its base, if the store has it."""
    known = {key: value for key, value in facts.items() if key not in ("base", "adapter")}
    parent = None if facts["base"] is None else names.get(facts["base"])
    return _model(name, known) | {"parent": parent, "adapter": facts["adapter"]}


def _file_facts(file: AdapterFile) -> dict[str, Any]:
    """Return the facts of an adapter in the directory."""
    return {"created": int(file.changed), "owned_by": "local", "adapter": file.facts, "base": None}


def _model(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "model", **facts}
