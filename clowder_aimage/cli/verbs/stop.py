"""``aimage stop``."""

from __future__ import annotations

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import reference_argument, verb, verbose_option
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.worker_connection import connect_worker, refuse_options
from clowder_aimage.oci import Reference


@examples("aimage stop shapes")
@verb
@reference_argument
@verbose_option
def stop(reference: Reference) -> None:
    """Unload REF from a worker's memory; print its name.

    The worker is the one in AIMAGE_HOST, or the one at 127.0.0.1:11434. Running requests of REF end
    after the current step. If REF is not loaded, nothing changes.
    """
    refuse_options("omit it: the memory of the worker is freed")
    unload = {"model": str(reference), "prompt": "", "stop": True, "stream": False}
    connect_worker().ask("POST", "/api/generate", unload)
    print_result({"stopped": str(reference)}, str(reference))
