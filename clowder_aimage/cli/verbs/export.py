"""The verb ``export``."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import complete_path, get_settings, verb
from clowder_aimage.cli.console.output import format_count, format_size, print_result, remark
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.export import ADAPTER_DIALECTS, ExportSummary, export_adapter, is_adapter
from clowder_aimage.export import export as export_aimage
from clowder_aimage.exporter.directory import LinkMethod
from clowder_aimage.family.image_family import LAYOUTS
from clowder_aimage.oci import Reference


@examples("aimage export shapes ./model")
@verb
@stored_argument()
@click.argument("path", metavar="DIR|FILE", shell_complete=complete_path)
@click.option(
    "--links",
    is_flag=True,
    help="Share the bytes of whole files with the store, if the file system supports it.",
)
@click.option(
    "--as",
    "dialect",
    type=click.Choice(list(dict.fromkeys((*LAYOUTS, *ADAPTER_DIALECTS)))),
    help="Write an image model in the layout of this tool. An adapter becomes FILE, or DIR for "
    "peft, with the names of this tool.",
)
def export(reference: Reference, path: str, links: bool, dialect: str | None) -> None:
    """Write the AImage REF in the store as the model directory DIR; print its path.

    DIR must be empty or not exist; it is written whole or not at all. Tensors are gathered into the
    files that the model's library expects; all other files keep their bytes. Every blob is
    verified.
    """
    if not path:
        raise UsageError("DIR must not be empty", hint="use . for the current directory")
    directory = Path(path)
    if dialect is not None:
        if links:
            raise UsageError("--links cannot be combined with --as")
        if is_adapter(get_settings().layout, reference):
            _export_adapter(reference, directory, dialect)
            return
    with Progress("exporting", reference) as progress:
        exported = export_aimage(
            get_settings().layout,
            reference,
            directory,
            links=links,
            layout=dialect,
            on_plan=lambda plan: progress.begin(plan.size),
            on_written=progress.advance,
        )
    remark(_format_summary(directory, exported, links))
    value = {
        "path": str(directory),
        "reference": str(reference),
        "digest": str(exported.descriptor.digest),
        "files": exported.files,
        "tensors": exported.tensors,
        "size": exported.size,
        **{method.value: exported.methods[method] for method in LinkMethod},
        "quantized": dict(exported.quantized),
    }
    print_result(value, str(directory))


def _export_adapter(reference: Reference, path: Path, dialect: str) -> None:
    if dialect not in ADAPTER_DIALECTS:
        raise UsageError(f"an adapter cannot be written in the dialect {dialect}")
    with needs("converting an adapter", "mlx"):
        exported = export_adapter(get_settings().layout, reference, path, dialect)
    remark(f"{path}: {format_count(exported.tensors, 'tensor')}, {format_size(exported.size)}")
    value = {
        "path": str(path),
        "reference": str(reference),
        "digest": str(exported.descriptor.digest),
        "tensors": exported.tensors,
        "size": exported.size,
    }
    print_result(value, str(path))


def _format_summary(directory: Path, exported: ExportSummary, links: bool) -> str:
    weights = f" ({format_count(exported.tensors, 'tensor')})" if exported.tensors else ""
    files = format_count(exported.files, "file")
    lines = [f"{directory}: {files}{weights}, {format_size(exported.size)}"]
    if links:
        count = exported.methods
        lines[0] += (
            f"; of the whole files {count[LinkMethod.REFLINKED]} reflinked, "
            f"{count[LinkMethod.HARD_LINKED]} hard-linked, {count[LinkMethod.COPIED]} copied"
        )
        if count[LinkMethod.HARD_LINKED]:
            lines.append("hard-linked files share their data with the store: do not modify them")
    for form in sorted(set(exported.quantized.values())):
        components = [
            c or "model"
            for c, component_form in exported.quantized.items()
            if component_form == form
        ]
        lines.append(f"quantized weights in the format of {form}: {', '.join(sorted(components))}")
    return "\n".join(lines)
