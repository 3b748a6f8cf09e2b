"""Models of a store of ollama."""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.cli.console.option import get_settings, list_explicit_options
from clowder_aimage.cli.console.output import (
    format_count,
    format_size,
    print_result,
    remark,
)
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.importer.ollama_store import adopt
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain


def pack_ollama_model(reference: Reference, directory: Path, name: str) -> None:
    """Add ollama's model ``name`` to the store. Raises as ``adopt``."""
    if conflicting := list_explicit_options("ollama", "store", "as_json", "template", "quiet"):
        raise UsageError(f"{conflicting[0]} cannot be combined with --from-ollama")
    if name == ".":
        raise UsageError("--from-ollama requires the name of a model, such as llama3.2:1b")
    with Progress("importing", reference) as progress:
        adopted = adopt(
            get_settings().layout,
            reference,
            directory,
            name,
            on_plan=progress.begin,
            on_done=progress.advance,
        )
    remark(
        f"{reference}: {format_count(adopted.blobs, 'blob')}, {format_size(adopted.size)}; "
        f"{adopted.linked} linked, {adopted.copied} copied, {adopted.existing} already there"
    )
    value = {
        "reference": str(reference),
        **to_plain(adopted.descriptor),
        "linked": adopted.linked,
        "copied": adopted.copied,
        "alreadyThere": adopted.existing,
    }
    print_result(value, str(adopted.descriptor.digest))
