"""The verb ``create``."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from clowder_aimage import __version__
from clowder_aimage.cli.console.lora_option import find_uses
from clowder_aimage.cli.console.option import (
    complete_path,
    given_options,
    jobs_option,
    needs,
    options,
    parse_annotation,
    settings,
    tag_reference,
    verb,
)
from clowder_aimage.cli.console.output import number, plain, plural, remark, result, size
from clowder_aimage.cli.console.progress import Progress, callbacks, writing
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.create import create as create_aimage
from clowder_aimage.create import create_enhancer
from clowder_aimage.errors import UsageError
from clowder_aimage.formats.family_weights import has_gguf_transformer
from clowder_aimage.importer import PackedModel, Provenance, Recipe
from clowder_aimage.importer.create_plan import request_defaults
from clowder_aimage.importer.decision import WeightReport
from clowder_aimage.importer.hub_model import HubModel, HubName, find_model
from clowder_aimage.importer.model_source import ExtraFile, ModelForm, parse_adapter
from clowder_aimage.importer.ollama_store import adopt
from clowder_aimage.oci import Reference, mediatype

_FORMATS = [
    "diffusers",
    "image-model",
    "transformers",
    "gguf",
    "onnx",
    "torchscript",
    "savedmodel",
    "lora",
]
_FORMATS += ["controlnet", "safetensors", "files"]

_DEFAULT = "Default {} of pictures. [default: by the model]"

recipe_options = options(
    click.option(
        "--dtype",
        metavar="TYPE",
        help="Store floats as f32, f16 or bf16; auto: F32 that is exactly BF16 as BF16. "
        "[default: as they are]",
    ),
    click.option(
        "--quantize",
        metavar="TYPE",
        help="int8, int4, nvfp4, mxfp8, fp8 (= int8) or fp4 (= int4) for the transformer; "
        "transformer=int4,text_encoder=int8 for each component.",
    ),
    click.option(
        "--group-size",
        type=int,
        metavar="N",
        help="Values that share a scale, for int4 and int8: 32, 64 or 128. [default: 64]",
    ),
    jobs_option,
)


@verb
@click.argument("reference", metavar="NAME", type=tag_reference)
@click.argument("path", metavar="[PATH]", default=".", shell_complete=complete_path)
@recipe_options
@click.option(
    "--from-ollama",
    "ollama",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Add the model PATH (such as llama3.2:1b) of ollama's store DIR, with hard links.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(_FORMATS),
    metavar="FORMAT",
    help=f"One of {', '.join(_FORMATS)}. [default: detected]",
)
@click.option(
    "--whole-files",
    is_flag=True,
    help="Pack any file or directory as it is, with a layer for each file.",
)
@click.option(
    "--variant",
    default="",
    metavar="NAME",
    help="Variant of a diffusers pipeline's weights, such as fp16. [default: none]",
)
@click.option(
    "--compress",
    type=click.Choice(mediatype.COMPRESSIONS),
    help="Compress whole files. The gain for weights is small.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="[NAME=]PATH",
    help="Pack a LoRA adapter with the model. May be repeated.",
)
@click.option(
    "--base",
    type=stored_reference,
    metavar="REF",
    help="The base model of an adapter or a ControlNet: an AImage in the store.",
)
@click.option(
    "--like",
    type=stored_reference,
    metavar="REF",
    help="An AImage in the store that has what files of ComfyUI, MLX or mflux lack: tokenizer, "
    "configs, other components.",
)
@click.option(
    "--from",
    "from_",
    type=stored_reference,
    metavar="REF",
    help="Name the model REF in the store NAME, with the adapters of --lora; nothing is copied.",
)
@click.option(
    "--lora",
    "loras",
    multiple=True,
    metavar="REF|FILE[:STRENGTH]",
    help="An adapter that NAME uses by default. May be repeated.",
)
@click.option(
    "--enhancer",
    is_flag=True,
    help="Name the text encoder of --from NAME, as a language model; its blobs are shared.",
)
@click.option(
    "--weights",
    metavar="PATH|REF",
    help="With --enhancer: a model with the same text encoder, for tensors that differ.",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="TYPE=FILE",
    help="Add a file as a layer of any media type. May be repeated.",
)
@click.option(
    "--dialect",
    type=click.Choice(["clowder", "ollama", "modelpack", "container"]),
    default="clowder",
    show_default=True,
    help="Dialect of the manifest.",
)
@click.option(
    "--manifest-type",
    type=click.Choice(["oci", "custom"]),
    default="oci",
    show_default=True,
    help="Media type of the manifest; registries reject the custom one.",
)
@click.option("--license", "license_", metavar="SPDX", help="License. [default: the model card's]")
@click.option("--source", metavar="URL", help="URL that the model came from.")
@click.option(
    "--created",
    metavar="TIME",
    help="Creation time (RFC 3339). [default: none; env: SOURCE_DATE_EPOCH, in seconds]",
)
@click.option(
    "--annotation",
    "annotations",
    multiple=True,
    metavar="KEY=VALUE",
    help="Annotate the manifest, which changes its digest. May be repeated.",
)
@click.option("--steps", type=int, metavar="N", help=_DEFAULT.format("steps"))
@click.option("--guidance", type=float, metavar="W", help=_DEFAULT.format("guidance"))
@click.option(
    "--digest",
    "algorithm",
    type=click.Choice(["sha256", "sha512"]),
    default="sha256",
    show_default=True,
    help="Algorithm for the digests of the layers and the config.",
)
def create(
    reference: Reference,
    path: str,
    ollama: Path | None,
    format_: str | None,
    whole_files: bool,
    variant: str,
    compress: str | None,
    adapters: tuple[str, ...],
    base: Reference | None,
    like: Reference | None,
    from_: Reference | None,
    loras: tuple[str, ...],
    enhancer: bool,
    weights: str | None,
    layers: tuple[str, ...],
    dialect: str,
    manifest_type: str,
    license_: str | None,
    source: str | None,
    created: str | None,
    annotations: tuple[str, ...],
    steps: int | None,
    guidance: float | None,
    algorithm: str,
    **changes: Any,
) -> None:
    """Pack the model at PATH (default: here) as the AImage NAME.

    PATH is a directory or a file: diffusers, ComfyUI, MLX, mflux, Transformers, safetensors, GGUF,
    ONNX, TorchScript, SavedModel or a LoRA adapter. --whole-files packs anything else.

    PATH may also be a model of the Hugging Face hub: ORG/REPO or
    hf://ORG/REPO[@REVISION][/FILE]. It is fetched if the Hugging Face cache lacks it.

    Models share equal tensors in the store. The same model always has the same digest.

    create NAME --from REF --lora ADAPTER packs adapters beside a model in the store.

    create NAME --from REF --enhancer makes the language model in an image model usable.
    """
    chosen = settings()
    if enhancer or weights is not None:
        if path != ".":
            raise UsageError("PATH cannot be combined with --enhancer", hint="pack PATH first")
        _enhancer(reference, from_, weights, is_wanted=enhancer)
        return
    if from_ is not None or loras:
        if path != ".":
            raise UsageError("PATH cannot be combined with --from", hint="pack PATH first")
        _with_adapters(reference, from_, loras)
        return
    recipe = Recipe.parse(**changes)
    if manifest_type == "custom" and dialect != "clowder":
        raise UsageError("--manifest-type custom requires --dialect clowder")
    if ollama is not None:
        if given := given_options("ollama", "store", "as_json", "template", "quiet"):
            raise UsageError(f"{given[0]} cannot be combined with --from-ollama")
        if path == ".":
            raise UsageError("--from-ollama requires the name of a model, such as llama3.2:1b")
        _from_ollama(reference, ollama, path)
        return
    form = ModelForm(
        format_,
        whole_files,
        compress or "",
        tuple(map(parse_adapter, adapters)),
        tuple(map(ExtraFile.parse, layers)),
        variant,
    )
    given_annotations = dict(map(parse_annotation, annotations))
    provenance = Provenance(
        license_,
        source,
        _created(created),
        given_annotations,
        request_defaults(steps, guidance),
    )
    found, origin = _found(path, form)
    with Progress("packing", reference) as progress:
        made = create_aimage(
            chosen.layout,
            reference,
            found,
            form=form,
            base=base,
            like=like,
            dialect="custom" if manifest_type == "custom" else dialect,
            algorithm=algorithm,
            provenance=replace(provenance, source=source or origin),
            recipe=recipe,
            jobs=chosen.jobs,
            **callbacks(progress),
        )
    print_packed(reference, made, recipe)
    if made.aimage.properties.get("format") == "gguf" and has_gguf_transformer(found):
        remark("the file is kept as it is, and cannot be run: --like REF completes it to a model")


def _found(path: str, form: ModelForm) -> tuple[Path, str | None]:
    """Return a path, and its source if it is a model of the Hugging Face hub, which is fetched."""
    name = HubName.parse(path)
    if name is None:
        return Path(path), None
    with Progress("fetching") as progress:

        def begin(plan: HubModel) -> None:
            progress.remark(f"fetching {name}: {plural(plan.files, 'file')}, {size(plan.size)}")
            progress.begin(plan.size)

        model = find_model(name, form, __version__, begin, progress.advance)
    remark(f"{name} is {model.source}, in {model.snapshot}")
    return model.path, model.source


def _from_ollama(reference: Reference, directory: Path, name: str) -> None:
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
        f"{adopted.linked} linked, {adopted.copied} copied, {adopted.there} already there"
    )
    value = {
        "reference": str(reference),
        **plain(adopted.descriptor),
        "linked": adopted.linked,
        "copied": adopted.copied,
        "alreadyThere": adopted.there,
    }
    result(value, str(adopted.descriptor.digest))


def _with_adapters(target: Reference, base: Reference | None, loras: tuple[str, ...]) -> None:
    if base is None or not loras:
        raise UsageError("--from and --lora require each other")
    common = ("from_", "loras", "store", "jobs", "as_json", "template", "quiet")
    if given := given_options(*common):
        raise UsageError(f"{given[0]} cannot be combined with --from")
    from clowder_aimage.adapt import combine

    uses = find_uses(loras)
    with Progress("packing", target) as progress:
        made = combine(
            settings().layout,
            base,
            target,
            uses,
            jobs=settings().jobs,
            **writing(progress),
        )
    print_packed(target, made, Recipe())


def _enhancer(
    target: Reference, base: Reference | None, weights: str | None, *, is_wanted: bool
) -> None:
    if base is None or not is_wanted:
        raise UsageError("--enhancer requires --from, and --weights requires --enhancer")
    common = ("from_", "enhancer", "weights", "store", "jobs", "as_json", "template", "quiet")
    if given := given_options(*common):
        raise UsageError(f"{given[0]} cannot be combined with --enhancer")
    layout, jobs = settings().layout, settings().jobs
    with contextlib.ExitStack() as stack:
        whole = None if weights is None else _weights(weights, stack)
        stack.enter_context(needs("--enhancer", "mlx"))
        progress = stack.enter_context(Progress("packing", target))
        made, replaced = create_enhancer(
            layout, base, target, whole, jobs=jobs, **writing(progress)
        )
    value = summary(target, made) | {"replaced": [*replaced]}
    remark(text(value, made, Recipe()))
    if replaced:
        remark(f"{plural(len(replaced), 'tensor')} of {weights}: {', '.join(replaced)[:200]}")
    result(value, str(made.descriptor.digest))


def _weights(name: str, stack: contextlib.ExitStack) -> Reference:
    """Return an AImage in the store, or that of a directory, which has a name in the meantime."""
    if not Path(name).is_dir():
        return stored_reference(name)
    layout = settings().layout
    named = Reference(None, "enhancer-weights", secrets.token_hex(8), None)
    with Progress("reading", named) as progress:
        create_aimage(layout, named, Path(name), jobs=settings().jobs, **callbacks(progress))
    stack.callback(layout.untag, named)
    return named


def _created(given: str | None) -> str | None:
    """Return the creation time: as given, or from SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None and epoch:
        try:
            return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"invalid SOURCE_DATE_EPOCH {epoch!r}: expected seconds") from None
    if given is None:
        return None
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise UsageError(f"invalid --created {given!r}: expected a time like 2026-01-31T12:00:00Z")
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def print_packed(reference: Reference, made: PackedModel, recipe: Recipe) -> None:
    """Print what was packed."""
    value = summary(reference, made)
    remark(text(value, made, recipe))
    result(value, str(made.descriptor.digest))


def summary(reference: Reference, packed: PackedModel) -> dict[str, Any]:
    """Return the result for programs."""
    layers = [written.layer for written in packed.layers]
    shared = [written.layer for written in packed.layers if written.was_there]
    report = packed.report
    config = packed.aimage.properties
    value: dict[str, Any] = {
        "reference": str(reference),
        "digest": str(packed.descriptor.digest),
        "mediaType": packed.descriptor.media_type,
        **({"format": config["format"]} if "format" in config else {}),
        "tensors": report.tensors,
        "files": sum(not layer.is_tensor for layer in layers),
        "parameters": config.get("parameters", report.parameters),
        "size": sum(layer.descriptor.size for layer in layers),
        "alreadyThere": {
            "layers": len(shared),
            "size": sum(layer.descriptor.size for layer in shared),
        },
    }
    cast = [
        {"from": source, "to": target, "tensors": count}
        for (source, target), count in sorted(report.cast.items())
    ]
    decoded = [
        {"from": kind, "to": dtype, "tensors": count}
        for (kind, dtype), count in sorted(report.decoded.items())
    ]
    changes = {
        "quantization": dict(report.quantized),
        "decoded": decoded,
        "cast": cast,
        "saved": report.saved,
        "ignored": report.ignored,
    }
    return value | {key: change for key, change in changes.items() if change}


def text(value: dict[str, Any], packed: PackedModel, recipe: Recipe) -> str:
    """Return the result for people: a line, and one for each change to weights."""
    there = value["alreadyThere"]
    lines = [
        f"{value['reference']}: {_what(value)}, {size(value['size'])}; {there['layers']} of "
        f"{len(packed.layers)} blobs ({size(there['size'])}) were in the store already",
        *(_quantized(name, facts) for name, facts in packed.report.quantized.items()),
        *_decoded(packed.report, recipe),
        *_cast(packed.report, recipe),
    ]
    if saved := packed.report.saved:
        than = "less" if saved > 0 else "more"
        lines.append(f"the weights take {size(abs(saved))} {than} than before")
    if packed.report.ignored:
        left_out = plural(packed.report.ignored, "scale")
        lines.append(f"{left_out} of activations left out: only weights are quantized")
    if packed.aimage.properties.get("pickled"):
        lines.append("warning: contains pickled Python, and loading it runs its code")
    return "\n".join(lines)


def _what(value: Mapping[str, Any]) -> str:
    files, parameters = plural(value["files"], "file"), number(value["parameters"])
    if value["tensors"]:
        return f"{plural(value['tensors'], 'tensor')} ({parameters} parameters) and {files}"
    if value.get("format") == "files":
        return files
    counted = f" ({parameters} parameters)" if value["parameters"] else ""
    return f"{value.get('format', 'a model')} in {files}{counted}"


def _quantized(component: str, facts: Mapping[str, Any]) -> str:
    kept = facts.get("kept", {})
    groups = f" in groups of {facts['group_size']}" if "group_size" in facts else ""
    count, total = facts["tensors"], facts["tensors"] + sum(kept.values())
    line = f"{component or 'the model'}: {count} of {total} tensors are {facts['type']}{groups}"
    if not kept:
        return line
    most = sorted(kept.items(), key=lambda item: (-item[1], item[0]))
    return f"{line}; not quantized: {', '.join(f'{count} ({why})' for why, count in most)}"


def _decoded(report: WeightReport, recipe: Recipe) -> Iterator[str]:
    for (kind, dtype), count in sorted(report.decoded.items()):
        loss = ", without loss" if dtype == "BF16" else ""
        yield f"{plural(count, 'tensor')} decoded from {kind} to {dtype}{loss}"
    if recipe.dtype is None and any(dtype == "F32" for _, dtype in report.decoded):
        yield "--dtype bf16 would round the decoded values, and take half of the space"


def _cast(report: WeightReport, recipe: Recipe) -> Iterator[str]:
    is_auto = recipe.dtype == "auto"
    for (source, target), count in sorted(report.cast.items()):
        why = ", without loss: their values are" if is_auto else " instead of"
        yield f"{plural(count, 'tensor')} stored as {target}{why} {target if is_auto else source}"
    if is_auto and not report.cast and not report.quantized:
        yield "no F32 tensor has only BF16 values: all are stored unchanged"
