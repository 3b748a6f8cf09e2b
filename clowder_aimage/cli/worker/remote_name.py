"""Pulls by a worker: of AImages, and of short names whose variants are in a registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import AImageError, NetworkError, NotFoundError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.config.name_index import NamedModel
    from clowder_aimage.config.variant_offer import Offer
    from clowder_aimage.engine.worker_client import WorkerClient


def pull_remotely(client: WorkerClient, reference: Reference) -> None:
    """Let a worker pull an AImage into its store. Raises the errors of the worker."""
    is_done = False
    with Progress("pulling", reference) as progress:
        sums = _Sums(progress)
        with closing(client.iter_lines("/api/pull", {"model": str(reference)})) as lines:
            for line in lines:
                is_done = line.get("status") == "success"
                sums.add(line)
        if not is_done:
            raise NetworkError(f"the worker at {client.endpoint} disconnected during the pull")
        progress.remark(f"pulled by the worker at {client.endpoint}")


def obtain_remotely(
    client: WorkerClient, reference: Reference, check: Callable[[NamedModel], None]
) -> Reference | None:
    """Return the worker's name of a model that the index has; it pulls it if the user agrees.

    None is returned for other names. A worker pulls from registries only, not from the hub.
    ``check`` raises the errors of the verb before the user is asked.

    Raises:
        NotFoundError: Neither the worker nor a registry has the model.
        Exit: The user declines, with code 1. Also the errors of the worker.
    """
    from clowder_aimage.config.name_index import read_index

    named = read_index().find(reference)
    if named is None:
        return None
    if _has(client, reference):
        return reference
    from clowder_aimage.cli.create.named_model import ask

    model = named.select(reference.tag)
    names = (replace(reference, tag=variant.name) for variant in model.variants)
    if stored := next((name for name in names if _has(client, name)), None):
        remark(f"{stored} of the worker is used")
        return stored
    check(model)
    offer = _make_offer(client, reference, model)
    ask(offer)
    source = offer.variant.reference
    assert source is not None  # noqa: S101 - the offer has no others
    source = get_settings().build_client_options().expand(source)
    pull_remotely(client, source)
    client.ask("POST", "/api/copy", {"source": str(source), "destination": str(reference)})
    return reference


def _make_offer(client: WorkerClient, reference: Reference, model: NamedModel) -> Offer:
    """Choose the variant of a registry that fits into the free memory of the worker."""
    from clowder_aimage.config import variant_offer

    pulled = tuple(variant for variant in model.variants if variant.reference is not None)
    if not pulled:
        raise NotFoundError(
            f"the worker at {client.endpoint} does not have {reference}, and does not fetch "
            "models of the Hugging Face hub",
            hint=f"fetch it on the machine of the worker: aimage pull {reference}",
        )
    settings = get_settings()
    offer = variant_offer.make_offer(
        settings.layout,
        reference,
        replace(model, variants=pulled),
        settings.build_client_options(),
        _read_memory(client),
    )
    # The store of the worker may lack what this one has.
    variants = tuple(replace(variant, download=variant.size) for variant in offer.model.variants)
    chosen = variants[offer.model.variants.index(offer.variant)]
    return replace(offer, model=replace(offer.model, variants=variants), variant=chosen)


def _has(client: WorkerClient, reference: Reference) -> bool:
    """Return False if a worker reports that it does not have an AImage."""
    try:
        client.ask("POST", "/api/show", {"model": str(reference)})
    except NotFoundError:
        return False
    except AImageError:
        # The error of the request itself is more specific.
        return True
    return True


def _read_memory(client: WorkerClient) -> int | None:
    """Return the bytes that are available where the worker runs; None if it does not tell."""
    with suppress(AImageError):
        answer = client.ask("GET", "/v1/store")
        memory = answer.get("memory") if isinstance(answer, dict) else None
        available = memory.get("available") if isinstance(memory, dict) else None
        return available if type(available) is int else None
    return None


class _Sums:
    """Totals over the lines about single blobs.

    A line may have the ``size`` of all blobs; else the total grows with each blob that starts, and
    is shown again when it has grown by a tenth.
    """

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        # Bytes done and total.
        self._blobs: dict[str, tuple[int, int]] = {}
        self._done = self._whole = self._shown = 0

    def add(self, line: Mapping[str, Any]) -> None:
        done, total, size = line.get("completed"), line.get("total"), line.get("size")
        if type(done) is not int or type(total) is not int:
            return
        before = self._blobs.get(str(line.get("digest")), (0, 0))
        self._blobs[str(line.get("digest"))] = done, total
        self._done += done - before[0]
        self._whole += total - before[1]
        if type(size) is int and size >= self._whole:
            self._shown = size
        elif self._whole > 1.1 * self._shown:
            self._shown = self._whole
        self._bar.show(min(self._done, self._shown), self._shown)
