"""``aimage create``"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage.cli.option import common_options, jobs_option, settings
from clowder_aimage.cli.output import note, number, plural, result, size
from clowder_aimage.cli.progress import Progress
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.importer import Packed, Recipe
    from clowder_aimage.importer.describe import Report

_F = TypeVar("_F", bound=Callable[..., Any])


def recipe_options(function: _F) -> _F:
    """What is to become of the weights."""
    for option in (
        click.option(
            "--group-size",
            type=int,
            metavar="N",
            help="Values that share a scale, for int4 and int8: 32, 64 or 128. [default: 64]",
        ),
        click.option(
            "--quantize",
            metavar="TYPE",
            help="int8, int4, nvfp4, mxfp8, fp8 (is int8) or fp4 (is int4): the transformer. "
            "transformer=int4,text_encoder=int8 says it for each.",
        ),
        click.option(
            "--dtype",
            metavar="TYPE",
            help="Store floats as f32, f16 or bf16; auto: F32 that is exactly BF16 as BF16. "
            "[default: as they are]",
        ),
    ):
        function = option(function)
    return function


@click.command(short_help="Pack a model directory as an AImage.")
@click.argument("name")
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), default=".")
@click.option(
    "--dialect",
    type=click.Choice(["clowder", "ollama", "container"]),
    default="clowder",
    show_default=True,
    help="How to write the manifest.",
)
@click.option(
    "--manifest-type",
    type=click.Choice(["oci", "custom"]),
    default="oci",
    show_default=True,
    help="The manifest's own media type; registries refuse the custom one.",
)
@click.option("--license", "license_", metavar="SPDX", help="Instead of the model card's.")
@click.option("--source", metavar="URL", help="Where the model came from.")
@click.option(
    "--created",
    metavar="TIME",
    help="RFC 3339. Recorded only when given. [env: SOURCE_DATE_EPOCH, in seconds]",
)
@click.option(
    "--digest",
    "algorithm",
    type=click.Choice(["sha256", "sha512"]),
    default="sha256",
    show_default=True,
    help="What the layers and the config are known by.",
)
@recipe_options
@jobs_option
@common_options
def create(
    name: str,
    directory: Path,
    dialect: str,
    manifest_type: str,
    license_: str | None,
    source: str | None,
    created: str | None,
    algorithm: str,
    dtype: str | None,
    quantize: str | None,
    group_size: int | None,
    jobs: int | None,
) -> None:
    """Pack the diffusers model directory DIR (default: here) as the AImage NAME.

    Each tensor becomes a blob of its own, so models share what they have in common. The digest
    depends on the model alone: not on the machine, the time, or the packer.
    """
    from clowder_aimage.create import create as create_aimage
    from clowder_aimage.importer import Provenance, Recipe

    chosen = settings()
    recipe = Recipe.parse(dtype, quantize, group_size)
    reference = Reference.parse(name)
    if reference.digest is not None:
        raise UsageError(f"{name} names a digest, which only content can decide")
    if manifest_type == "custom" and dialect != "clowder":
        raise UsageError("--manifest-type custom is a form of the clowder dialect")
    with Progress("packing", reference, quiet=chosen.quiet) as progress:
        made = create_aimage(
            chosen.layout,
            reference,
            directory,
            dialect="custom" if manifest_type == "custom" else dialect,
            algorithm=algorithm,
            provenance=Provenance(license_, source, _created(created)),
            recipe=recipe,
            jobs=jobs,
            on_survey=progress.begin,
            on_surveyed=progress.advance,
            on_plan=lambda plan: progress.begin(plan.size),
            on_written=lambda written: progress.advance(written.layer.descriptor.size),
        )
    value = summary(reference, made)
    if not chosen.quiet:
        note(text(value, made, recipe))
    result(value, str(made.descriptor.digest), as_json=chosen.as_json)


def _created(given: str | None) -> str | None:
    """The creation time: as given, or from SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None and epoch:
        try:
            return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"SOURCE_DATE_EPOCH is not a number of seconds: {epoch!r}") from None
    if given is None:
        return None
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise UsageError(f"--created needs a time such as 2026-01-31T12:00:00Z, not {given!r}")
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def summary(reference: Reference, packed: Packed) -> dict[str, Any]:
    """What was made, for programs."""
    layers = [written.layer for written in packed.layers]
    shared = [written.layer for written in packed.layers if written.was_there]
    report = packed.report
    value: dict[str, Any] = {
        "reference": str(reference),
        "digest": str(packed.descriptor.digest),
        "mediaType": packed.descriptor.media_type,
        "tensors": report.tensors,
        "files": sum(not layer.is_tensor for layer in layers),
        "parameters": report.parameters,
        "size": sum(layer.descriptor.size for layer in layers),
        "alreadyThere": {
            "layers": len(shared),
            "size": sum(layer.descriptor.size for layer in shared),
        },
    }
    if report.quantized:
        value["quantization"] = dict(report.quantized)
    if report.cast:
        value["cast"] = [
            {"from": source, "to": target, "tensors": count}
            for (source, target), count in sorted(report.cast.items())
        ]
    if report.saved:
        value["saved"] = report.saved
    if report.ignored:
        value["ignored"] = report.ignored
    return value


def text(value: dict[str, Any], packed: Packed, recipe: Recipe) -> str:
    """What was made, for people: a line, and one for each thing that became of weights."""
    there = value["alreadyThere"]
    lines = [
        f"{value['reference']}: {plural(value['tensors'], 'tensor')} "
        f"({number(value['parameters'])} parameters) and {plural(value['files'], 'file')}, "
        f"{size(value['size'])}; {there['layers']} of {len(packed.layers)} blobs "
        f"({size(there['size'])}) were in the store already",
        *(_quantized(name, facts) for name, facts in packed.report.quantized.items()),
        *_cast(packed.report, recipe),
    ]
    if saved := packed.report.saved:
        than = "less" if saved > 0 else "more"
        lines.append(f"the weights take {size(abs(saved))} {than} than before")
    if packed.report.ignored:
        left_out = plural(packed.report.ignored, "scale")
        lines.append(f"{left_out} of activations left out: only weights are quantized here")
    return "\n".join(lines)


def _quantized(component: str, facts: Mapping[str, Any]) -> str:
    kept = facts.get("kept", {})
    groups = f" in groups of {facts['group_size']}" if "group_size" in facts else ""
    said = (
        f"{component}: {facts['tensors']} of {facts['tensors'] + sum(kept.values())} tensors are "
        f"{facts['type']}{groups}"
    )
    if not kept:
        return said
    most = sorted(kept.items(), key=lambda item: (-item[1], item[0]))
    return f"{said}; not quantized: {', '.join(f'{count} ({why})' for why, count in most)}"


def _cast(report: Report, recipe: Recipe) -> Iterator[str]:
    is_auto = recipe.dtype == "auto"
    for (source, target), count in sorted(report.cast.items()):
        why = ", without loss: their values are" if is_auto else " instead of"
        yield f"{plural(count, 'tensor')} stored as {target}{why} {target if is_auto else source}"
    if is_auto and not report.cast and not report.quantized:
        yield "no F32 tensor has BF16 values alone: all are stored as they were"
