"""``aimage sleep`` and ``aimage wake``."""

from __future__ import annotations

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import reference_argument, verb, verbose_option
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.worker_connection import connect_worker, refuse_options
from clowder_aimage.oci import Reference


@examples("aimage sleep shapes")
@verb
@reference_argument
@verbose_option
def sleep(reference: Reference) -> None:
    """Let REF leave the device of a worker; print its name.

    The worker is the one in AIMAGE_HOST, or the one at 127.0.0.1:11434. The process of REF remains,
    with copies of its weights in the memory of the machine, if a GPU has its own and there is room.
    The next request for REF, or 'aimage wake', loads it again sooner than 'aimage run' after
    'aimage stop'. A model that serves requests stays. If REF is not loaded, nothing changes.
    """
    refuse_options("omit it: the memory of the worker is freed")
    _ask(reference, sleep=True)
    print_result({"asleep": str(reference)}, str(reference))


@examples("aimage wake shapes")
@verb
@reference_argument
@verbose_option
def wake(reference: Reference) -> None:
    """Load REF into the memory of a worker, or wake it; print its name.

    The worker is the one in AIMAGE_HOST, or the one at 127.0.0.1:11434.
    """
    refuse_options("omit it: the worker loads the model")
    _ask(reference)
    print_result({"loaded": str(reference)}, str(reference))


def _ask(reference: Reference, **fields: bool) -> None:
    body = {"model": str(reference), "prompt": "", "stream": False, **fields}
    connect_worker().ask("POST", "/api/generate", body)
