"""The kind of the model that ``run`` uses, and the options that apply to it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from clowder_aimage.cli.console.option import TextOption, get_settings
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.worker.choice import find_default_worker
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.model.stored_ability import find_ability
from clowder_aimage.model.text.language_model import COMPLETION, EMBEDDING
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.model.text.text_facts import is_embedder

if TYPE_CHECKING:
    from clowder_aimage.dialect import AImage
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.layout.stored_aimage import StoredAImage
    from clowder_aimage.oci import Reference

# Options of both kinds.
_SHARED = ("seed", "dtype", "memory", "local", "remote")


def is_language_model(reference: Reference, client: WorkerClient | None, *, local: bool) -> bool:
    """Return True if an AImage is a language model.

    Raises UsageError if it only computes embeddings, and UnrunnableError if it is in the store and
    cannot run here.
    """
    capabilities = _find_capabilities(reference, client, local=local)
    if EMBEDDING in capabilities and COMPLETION not in capabilities:
        hint = f"aimage embed {reference} TEXT..."
        raise UsageError(f"{reference} is an embedding model: it cannot answer", hint=hint)
    return COMPLETION in capabilities


def check_embedder(reference: Reference, client: WorkerClient | None, *, local: bool) -> None:
    """Raise UsageError if an AImage is known to compute no embeddings; also UnrunnableError."""
    capabilities = _find_capabilities(reference, client, local=local)
    if capabilities and EMBEDDING not in capabilities:
        raise UsageError(
            f"{reference} computes no embeddings", hint=f"aimage run {reference} PROMPT"
        )


def _find_capabilities(
    reference: Reference, client: WorkerClient | None, *, local: bool
) -> tuple[str, ...]:
    """Return the capabilities of a model; none if they are unknown, or for an image model.

    It is known from the worker of ``client``; without one from the store, from the default worker
    unless ``local``, or from the registry. Raises UnrunnableError: its files do not permit it.
    """
    if client is not None:
        return _ask_worker(client, reference) or ()
    layout = get_settings().layout
    try:
        stored = _read_unpacked(reference)
    except NotFoundError:
        default = None if local else find_default_worker(reference)
        found = _ask_worker(default[0], reference) if default else None
        return _ask_registry(reference) if found is None else found
    except AImageError:
        # The error of the request for a picture is more specific.
        return ()
    if find_runtime(stored.aimage) is None:
        return ()
    ability = find_ability(layout, stored.descriptor.digest, stored.aimage)
    # Another process may have what is not installed here
    if ability.fault:
        ability.check(reference)
    return ability.capabilities


def _read_unpacked(reference: Reference) -> StoredAImage:
    """Return an AImage of the store; it is unpacked now if it is packed, which may take long."""
    from clowder_aimage.layout.stored_aimage import read_stored
    from clowder_aimage.layout.unpacking import needs_unpacking
    from clowder_aimage.model.runnable import read_model

    layout = get_settings().layout
    root = layout.resolve(reference)
    if needs_unpacking(layout, read_stored(layout, root)):
        remark(f"unpacking {reference}")
    return read_model(layout, root, unpacks=True)


def _ask_worker(client: WorkerClient, reference: Reference) -> tuple[str, ...] | None:
    """Return the answer of a worker; None if it does not have the AImage."""
    with contextlib.suppress(AImageError):
        answer = client.ask("POST", "/api/show", {"model": str(reference)})
        capabilities = answer.get("capabilities") if isinstance(answer, dict) else None
        return tuple(map(str, capabilities)) if isinstance(capabilities, list) else ()
    return None


def _ask_registry(reference: Reference) -> tuple[str, ...]:
    """Return the answer of the registry, from the manifest and the config."""
    with contextlib.suppress(AImageError):
        connection = get_settings().build_client_options()
        if connection.expand(reference).registry is None:
            return ()
        from clowder_aimage.content.platform import ManifestSelector, select
        from clowder_aimage.layout.stored_aimage import interpret
        from clowder_aimage.oci import Manifest
        from clowder_aimage.registry import Repository

        with Repository(connection.expand(reference), connection) as repository:
            root = repository.resolve(reference)
            base, manifest = select(repository, root, reference, ManifestSelector())
            if isinstance(manifest, Manifest):
                return _guess_capabilities(interpret(repository, base, manifest).aimage)
    return ()


def _guess_capabilities(aimage: AImage) -> tuple[str, ...]:
    if find_runtime(aimage) is None:
        return ()
    return (EMBEDDING,) if is_embedder(aimage) else (COMPLETION, EMBEDDING)


def _may_draw(reference: Reference) -> bool:
    """Return False for an AImage in the store that is not an image model."""
    from clowder_aimage.model.runnable import read_model
    from clowder_aimage.model.stored_ability import is_runnable

    layout = get_settings().layout
    with contextlib.suppress(AImageError):
        return is_runnable(read_model(layout, layout.resolve(reference)).aimage)
    return True


def check_options(reference: Reference, *, is_text: bool) -> None:
    """Reject options of the other kind of models on the command line. Raises UsageError."""
    context = click.get_current_context()
    for option in context.command.params:
        if not isinstance(option, click.Option) or not option.expose_value:
            continue
        if option.name in _SHARED or isinstance(option, TextOption) == is_text:
            continue
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            name = max(option.opts, key=len)
            if is_text:
                raise UsageError(f"{name} applies to pictures; {reference} is a language model")
            does = "generates pictures" if _may_draw(reference) else "is not one"
            raise UsageError(f"{name} applies to language models; {reference} {does}")
