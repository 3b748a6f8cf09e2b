"""Models of a store of ollama."""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.cli.console.option import explicit_options, settings
from clowder_aimage.cli.console.output import plain, plural, remark, result, size
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.importer.ollama_store import adopt
from clowder_aimage.oci import Reference


def pack_ollama_model(reference: Reference, directory: Path, name: str) -> None:
    """Add ollama's model ``name`` to the store. Raises as ``adopt``."""
    if conflicting := explicit_options("ollama", "store", "as_json", "template", "quiet"):
        raise UsageError(f"{conflicting[0]} cannot be combined with --from-ollama")
    if name == ".":
        raise UsageError("--from-ollama requires the name of a model, such as llama3.2:1b")
    with Progress("importing", reference) as progress:
        adopted = adopt(
            settings().layout,
            reference,
            directory,
            name,
            on_plan=progress.begin,
            on_done=progress.advance,
        )
    remark(
        f"{reference}: {plural(adopted.blobs, 'blob')}, {size(adopted.size)}; "
        f"{adopted.linked} linked, {adopted.copied} copied, {adopted.existing} already there"
    )
    value = {
        "reference": str(reference),
        **plain(adopted.descriptor),
        "linked": adopted.linked,
        "copied": adopted.copied,
        "alreadyThere": adopted.existing,
    }
    result(value, str(adopted.descriptor.digest))
