"""The kind of the model that ``run`` uses, and the options that apply to it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from clowder_aimage.cli.console.option import TextOption, get_settings
from clowder_aimage.cli.worker.choice import find_default_worker
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.model.text.runtime import find_runtime

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.oci import Reference

# A capability in ollama's API.
_TEXT = "completion"
# Options of both kinds.
_SHARED = ("seed", "dtype", "memory", "local", "remote")


def is_language_model(reference: Reference, client: WorkerClient | None, *, local: bool) -> bool:
    """Return True if an AImage is a language model.

    It is known from the worker of ``client``; without one from the store, from the default worker
    unless ``local``, or from the registry. If it is unknown there, the answer is no.
    """
    if client is not None:
        return _ask_worker(client, reference) or False
    from clowder_aimage.layout.stored_aimage import read_aimage

    try:
        return find_runtime(read_aimage(get_settings().layout, reference).aimage) is not None
    except NotFoundError:
        pass
    except AImageError:
        # The error of the request for a picture is more specific.
        return False
    default = None if local else find_default_worker(reference)
    is_text = _ask_worker(default[0], reference) if default else None
    return _ask_registry(reference) if is_text is None else is_text


def _ask_worker(client: WorkerClient, reference: Reference) -> bool | None:
    """Return the answer of a worker; None if it does not have the AImage."""
    with contextlib.suppress(AImageError):
        answer = client.ask("POST", "/api/show", {"model": str(reference)})
        capabilities = answer.get("capabilities") if isinstance(answer, dict) else None
        return isinstance(capabilities, list) and _TEXT in capabilities
    return None


def _ask_registry(reference: Reference) -> bool:
    """Return the answer of the registry, from the manifest and the config."""
    with contextlib.suppress(AImageError):
        connection = get_settings().build_client_options()
        if connection.expand(reference).registry is None:
            return False
        from clowder_aimage.content.platform import ManifestSelector, select
        from clowder_aimage.layout.stored_aimage import interpret
        from clowder_aimage.oci import Manifest
        from clowder_aimage.registry import Repository

        with Repository(connection.expand(reference), connection) as repository:
            root = repository.resolve(reference)
            base, manifest = select(repository, root, reference, ManifestSelector())
            if isinstance(manifest, Manifest):
                return find_runtime(interpret(repository, base, manifest).aimage) is not None
    return False


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
            raise UsageError(f"{name} applies to language models; {reference} generates pictures")
