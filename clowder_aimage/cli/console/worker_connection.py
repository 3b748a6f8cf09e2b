"""Requests to a worker: its address, its lists, and options that apply to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import get_settings, list_explicit_options
from clowder_aimage.cli.console.output import META, format_count, note
from clowder_aimage.config.user_directory import read_worker_host, read_worker_token
from clowder_aimage.errors import AccessError, FormatError, UsageError
from clowder_aimage.oci.descriptor import MAX_SIZE

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient


def connect_worker() -> WorkerClient:
    """Return a client of the worker in AIMAGE_HOST, else of the default worker.

    Raises:
        NetworkError: no worker answers.
        AccessError: the server is another program.
    """
    from clowder_aimage.engine.worker_client import detect_program

    client = create_client(read_worker_host())
    if not client.is_worker():
        name = detect_program(client.endpoint)
        message = f"the server at {client.endpoint} is not an aimage worker"
        message += f"; {name} answers there" if name else ""
        raise AccessError(message, remedy="worker_address")
    return client


def create_client(host: str | None) -> WorkerClient:
    """Return a client of ``host``, else of the default worker, without a request."""
    from clowder_aimage.engine.endpoint import DEFAULT_HOST
    from clowder_aimage.engine.worker_client import WorkerClient

    tracer = None
    if level := get_settings().verbose:
        from clowder_aimage.cli.console.connection import Tracer

        tracer = Tracer(with_headers=level > 1)
    return WorkerClient(host or DEFAULT_HOST, read_worker_token(), tracer)


def refuse_options(hint: str, *, exclude: Collection[str] = ()) -> None:
    """Reject options that apply to this process and are not sent to a worker.

    Raises:
        UsageError: one is on the command line; ``hint`` is the error's.
    """
    if stated := list_local_options(*exclude):
        raise UsageError(f"{stated[0]} does not apply to a worker", hint=hint)


def list_local_options(*exclude: str) -> list[str]:
    """Return the options on the command line that apply to this process, except ``exclude``."""
    everywhere = ("remote", "as_json", "template", "quiet", "verbose", "yes")
    stated = list_explicit_options(*everywhere, *exclude)
    if not stated and click.get_current_context().meta.get(f"{META}store"):
        stated = ["--store"]
    return stated


def list_models(client: WorkerClient, path: str) -> list[dict[str, Any]]:
    """Return the list at ``path``, ``/api/tags`` or ``/api/ps``. Raises FormatError.

    Adds the algorithm to digests: ollama omits it. Leaves out models without a name, a digest or a
    size, and prints their number.
    """
    answer = client.ask("GET", path)
    listed = answer.get("models") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or (listed and not any(map(_is_model, listed))):
        message = f"the server at {client.endpoint} did not return a list of models"
        raise FormatError(message, remedy="worker_address")
    described = [model for model in listed if _is_model(model)]
    if len(described) < len(listed):
        count = format_count(len(listed) - len(described), "model")
        note(f"left out {count} that the server at {client.endpoint} does not describe")
    for model in described:
        if ":" not in model["digest"]:
            model["digest"] = f"sha256:{model['digest']}"
    return described


def _is_model(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("digest"), str)
        and type(item.get("size")) is int
        and 0 <= item["size"] <= MAX_SIZE
    )


def get_detail(model: Mapping[str, Any], key: str) -> str | None:
    """Return a detail of a model, such as its family; None if the worker does not send it."""
    details = model.get("details")
    detail = details.get(key) if isinstance(details, dict) else None
    return detail if isinstance(detail, str) and detail else None
