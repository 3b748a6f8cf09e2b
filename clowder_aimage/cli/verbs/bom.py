"""The verb ``bom``."""

from __future__ import annotations

import sys

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    connection_options,
    get_settings,
    output_option,
    verb,
)
from clowder_aimage.cli.console.output import open_output, print_result, remark, wants_value
from clowder_aimage.cli.console.stored_name import stored_argument
from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference, read_json


@examples(
    "aimage bom shapes",
    "aimage bom shapes --format spdx -o shapes.spdx.json",
    f"aimage bom {NAME} --attach",
)
@verb
@stored_argument()
@click.option(
    "--format",
    "form",
    type=click.Choice(["cyclonedx", "spdx"]),
    default="cyclonedx",
    show_default=True,
    help="CycloneDX 1.6 (JSON), or SPDX 3.0.1 (JSON-LD).",
)
@output_option
@click.option(
    "--attach", is_flag=True, help="Attach the bill to REF in its registry; print the digest."
)
@click.option(
    "--remote", is_flag=True, is_eager=True, help="Read REF from its registry, not from the store."
)
@connection_options
def bom(reference: Reference, form: str, file: str, attach: bool, remote: bool) -> None:
    """Print the bill of materials of the AImage REF: its parts, its licences and its ancestors.

    The same AImage with the same statement has the same bytes, whatever its name. No layer is read;
    from a registry, the manifest, the config and its statement are fetched. With --attach, REF is
    read from its registry, and the bill is printed with -o only.
    """
    from clowder_aimage.bom.bill import BomFormat, attach_bom, write_bom

    chosen = get_settings()
    value: dict[str, object] = {"reference": str(reference), "format": form}
    lines = []
    if attach or remote:
        from clowder_aimage.registry import Repository

        with Repository(reference, chosen.build_client_options()) as repository:
            bill = write_bom(repository, reference, BomFormat(form))
            if attach:
                attached = attach_bom(repository, reference, bill)
                remark(f"attached to {bill.subject.digest}")
                value["attached"] = str(attached.digest)
                lines.append(str(attached.digest))
    elif chosen.has_connection:
        raise UsageError("--plain-http, --insecure and --ca-file require --remote or --attach")
    else:
        bill = write_bom(chosen.layout, reference, BomFormat(form))
    if file != "-":
        with open_output(file) as target:
            write_all(target.fileno(), bill.content)
        value["file"] = file
        lines.append(file)
    value["digest"] = str(bill.subject.digest)
    if lines:
        print_result(value, lines)
    elif wants_value() or sys.stdout.isatty():
        document = read_json(bill.content, "the bill")
        print_result(value | {"bom": document}, bill.content.decode().splitlines())
    else:
        with open_output("-") as target:
            write_all(target.fileno(), bill.content)
