"""The model of a request: found in the store, pulled, or the worker's default."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Protocol
from urllib.parse import quote

from clowder_aimage.api.model_catalog import ModelCatalog, build_unknown_error
from clowder_aimage.api.model_kind import PICTURES, build_unsupported_error, check_kind
from clowder_aimage.api.service import Service
from clowder_aimage.dialect import AImage
from clowder_aimage.engine.admission import ALWAYS, IF_MISSING, NEVER
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.adapter_source import is_adapter
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DEFAULT_TAG

MODEL_HEADERS = {
    "X-Aimage-Model": "The AImage that did the work.",
    "X-Aimage-Alias": "The requested name, if it is an alias.",
}
# Models in a message
_MAX_NAMED = 10


class ModelChoice(Protocol):
    """The fields of a request that choose its model."""

    @property
    def model(self) -> str | None: ...

    @property
    def pull(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SelectedModel:
    """The AImage of a request, if it is in the store, and its pull policy.

    ``is_default``: it replaces another model. ``adapter``: the request names an adapter of this
    base model.
    """

    reference: Reference
    stored: StoredAImage | None
    pull: str
    is_default: bool = False
    adapter: Reference | None = None

    @property
    def aimage(self) -> AImage | None:
        return self.stored.aimage if self.stored else None

    def build_headers(self, service: Service, body: ModelChoice) -> dict[str, str]:
        """Return the headers with the name of the model, and the alias that was requested."""
        fields = {"X-Aimage-Model": str(self.reference)}
        if body.model and service.resolve_alias(body.model) and not self.is_default:
            fields["X-Aimage-Alias"] = quote(body.model, safe="/:@ ")
        return fields


async def choose_model(
    service: Service, body: ModelChoice, kinds: Sequence[str], *, may_pull: bool
) -> SelectedModel:
    """Return the model that serves a request, of one of ``kinds``.

    The worker's default replaces only unknown names that clients have built in, see ``default_for``
    of the settings. A name with a registry or a digest is never replaced. Raises ApiError, also if
    the model is in the store and of another kind.
    """
    pull = body.pull if may_pull else NEVER
    reference = _parse(service, body.model)
    stored, is_default = await _read(service, reference, kinds[0]), False
    if stored is None and not (reference.registry and pull != NEVER):
        is_exact = reference.registry is not None or reference.digest is not None
        is_literal = service.resolve_alias(body.model) is None if body.model else False
        is_built_in = body.model is None or _is_built_in(service, body.model)
        has_default = service.settings.default_model is not None
        missing = partial(_build_missing_error, service, body.model or str(reference), kinds)
        if not (has_default and is_built_in) or (is_exact and is_literal):
            raise await run_io(missing)
        reference, is_default = service.resolve_reference(None), True
        stored = await _read(service, reference, kinds[0])
        if stored is None and not (reference.registry and pull != NEVER):
            raise await run_io(missing)
    adapter = None
    if stored is not None and is_adapter(stored.aimage) and PICTURES in kinds:
        adapter, reference = reference, await run_io(_find_base, service, reference, stored.aimage)
        stored = await _read(service, reference, kinds[0])
    elif stored is not None:
        check_kind(reference, stored.aimage, *kinds)
    if reference.registry is None and pull == ALWAYS:
        pull = IF_MISSING
    return SelectedModel(reference, stored, pull, is_default, adapter)


def _find_base(service: Service, reference: Reference, adapter: AImage) -> Reference:
    """Return a name of the base model of an adapter. Raises ApiError if the store has none."""
    digest = adapter.subject and adapter.subject.digest
    for name, descriptor in sorted(service.store.list_tags(), key=lambda tag: tag[0]):
        if descriptor.digest == digest:
            # Another tool's name
            with contextlib.suppress(UsageError):
                return Reference.parse(name)
    message = f"model {reference} is an adapter, whose base model is not here: use it in loras"
    raise ApiError(422, message, code="model_not_supported", param="model")


def _is_built_in(service: Service, name: str) -> bool:
    plain = name.removesuffix(f":{DEFAULT_TAG}")
    return any(fnmatchcase(plain, pattern) for pattern in service.settings.default_for)


def _build_missing_error(service: Service, name: str, kinds: Sequence[str]) -> ApiError:
    """Return the error for a missing model, with the names of suitable models."""
    models = [model for model in ModelCatalog(service).list_all() if "adapter" not in model]
    is_picture = PICTURES in kinds
    names = [
        model["id"]
        for model in models
        if model["capabilities"] and (PICTURES in model["capabilities"]) == is_picture
    ]
    if not names:
        return build_unknown_error(name)
    suffix = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    message = f"model {name[:200]!r} not found; available: {', '.join(names[:_MAX_NAMED])}{suffix}"
    return ApiError(404, message, code="model_not_found", param="model")


def _parse(service: Service, name: str | None) -> Reference:
    try:
        return service.resolve_reference(name)
    except NotFoundError as error:
        raise ApiError(404, error.message, code="model_not_found", param="model") from None
    except UsageError as error:
        code = "missing_required_parameter"
        raise ApiError(400, error.message, code=code, param="model") from None


async def _read(service: Service, reference: Reference, kind: str) -> StoredAImage | None:
    """Return the AImage if it is in the store. Raises ApiError if its config is invalid."""
    try:
        return await service.engine.read(reference)
    except NotFoundError:
        return None
    except FormatError:
        raise build_unsupported_error(reference, expected=kind) from None
