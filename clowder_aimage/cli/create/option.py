"""Options of ``create``, in the order of its help, and the values that they form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.option import in_section, jobs_option, options
from clowder_aimage.cli.console.parameter_option import build_reader
from clowder_aimage.cli.console.stored_name import resolve_reference
from clowder_aimage.cli.create.model_files import FileOptions, FormOptions, ProvenanceOptions
from clowder_aimage.generation.request import map_parameter_locations
from clowder_aimage.importer import Recipe
from clowder_aimage.importer.model_source import FORMATS
from clowder_aimage.oci import Reference, mediatype


@dataclass(frozen=True, slots=True)
class StoredOptions:
    """The options that make an AImage of one in the store: with adapters, or as an enhancer."""

    from_: Reference | None
    loras: tuple[str, ...]
    enhancer: bool
    weights: str | None


_recipe_options = in_section(
    "Options for the weights",
    click.option(
        "--dtype",
        metavar="TYPE",
        help="Store floats as f32, f16 or bf16; auto: F32 that is exactly BF16 as BF16. "
        "[default: as they are]",
    ),
    click.option(
        "--quantize",
        metavar="TYPE",
        help="int8, int4, nvfp4, mxfp8, fp8 (mxfp8 with one scale for each row) or fp4 (= int4) "
        "for the transformer; transformer=int4,text_encoder=int8 for each component.",
    ),
    click.option(
        "--group-size",
        type=int,
        metavar="N",
        help="Number of values with one scale, for int4 and int8: 32, 64 or 128. [default: 64]",
    ),
    jobs_option,
)


def _default_option(name: str, metavar: str) -> Callable[[Any], Any]:
    """Return an option for the default of a parameter of pictures, with the bounds of that."""
    accepted = build_reader(map_parameter_locations()[name].parameter)
    text = f"Default {name} of pictures. [default: by the model]"
    return click.option(f"--{name}", type=accepted, metavar=metavar, help=text)


_create_options = options(
    in_section(
        "Options for the files",
        click.option(
            "--from-ollama",
            "ollama",
            metavar="DIR",
            type=click.Path(path_type=Path),
            help="Add the model PATH (such as llama3.2:1b) of ollama's store DIR, with hard links.",
        ),
        click.option(
            "--format",
            "format_",
            type=click.Choice(FORMATS),
            metavar="FORMAT",
            help=f"One of {', '.join(FORMATS)}. [default: detected]",
        ),
        click.option(
            "--whole-files",
            is_flag=True,
            help="Pack any file or directory as it is, with a layer for each file.",
        ),
        click.option(
            "--variant",
            default="",
            metavar="NAME",
            help="Variant of a diffusers pipeline's weights, such as fp16. [default: none]",
        ),
        click.option(
            "--compress",
            type=click.Choice(mediatype.COMPRESSIONS),
            help="Compress whole files. The gain for weights is small.",
        ),
        click.option(
            "--adapter",
            "adapters",
            multiple=True,
            metavar="[NAME=]PATH",
            help="Pack a LoRA adapter with the model. May be repeated.",
        ),
        click.option(
            "--base",
            type=resolve_reference,
            metavar="REF",
            help="The base model of an adapter or a ControlNet: an AImage in the store.",
        ),
        click.option(
            "--like",
            type=resolve_reference,
            metavar="REF",
            help="An AImage in the store that has what files of ComfyUI, MLX or mflux lack: "
            "tokenizer, "
            "configs, other components.",
        ),
    ),
    in_section(
        "Options for a model in the store",
        click.option(
            "--from",
            "from_",
            type=resolve_reference,
            metavar="REF",
            help="Name the model REF in the store NAME, with the adapters of --lora; "
            "nothing is copied.",
        ),
        click.option(
            "--lora",
            "loras",
            multiple=True,
            metavar="REF|FILE[:STRENGTH]",
            help="An adapter that NAME uses by default. May be repeated.",
        ),
        click.option(
            "--enhancer",
            is_flag=True,
            help="Name the text encoder of --from NAME, as a language model; its blobs are shared.",
        ),
        click.option(
            "--weights",
            metavar="PATH|REF",
            help="With --enhancer: a model with the same text encoder, for tensors that differ.",
        ),
    ),
    in_section(
        "Manifest options",
        click.option(
            "--layer",
            "layers",
            multiple=True,
            metavar="TYPE=FILE",
            help="Add a file as a layer of any media type. May be repeated.",
        ),
        click.option(
            "--dialect",
            type=click.Choice(["clowder", "ollama", "modelpack", "container"]),
            default="clowder",
            show_default=True,
            help="Dialect of the manifest.",
        ),
        click.option(
            "--manifest-type",
            type=click.Choice(["oci", "custom"]),
            default="oci",
            show_default=True,
            help="Media type of the manifest; registries reject the custom one.",
        ),
        click.option(
            "--license", "license_", metavar="SPDX", help="License. [default: the model card's]"
        ),
        click.option("--source", metavar="URL", help="URL that the model came from."),
        click.option(
            "--created",
            metavar="TIME",
            help="Creation time (RFC 3339). [default: none; env: SOURCE_DATE_EPOCH, in seconds]",
        ),
        click.option(
            "--annotation",
            "annotations",
            multiple=True,
            metavar="KEY=VALUE",
            help="Annotate the manifest, which changes its digest. May be repeated.",
        ),
        _default_option("steps", "N"),
        _default_option("guidance", "W"),
        click.option(
            "--digest",
            "algorithm",
            type=click.Choice(["sha256", "sha512"]),
            default="sha256",
            show_default=True,
            help="Algorithm for the digests of the layers and the config.",
        ),
    ),
)


def recipe_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that change weights; the function receives their ``recipe``."""

    @functools.wraps(function)
    def call(
        dtype: str | None, quantize: str | None, group_size: int | None, **arguments: Any
    ) -> Any:
        return function(recipe=Recipe.parse(dtype, quantize, group_size), **arguments)

    return _recipe_options(call)


def create_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``create``; the function receives ``ollama``, ``stored`` and ``files``."""
    function = _gather("stored", StoredOptions)(function)
    function = _gather("files", FileOptions)(function)
    function = _gather("form", FormOptions)(function)
    function = _gather("provenance", ProvenanceOptions)(function)
    return recipe_options(_create_options(function))


def _gather(name: str, kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that passes the values of a dataclass's fields as one value, ``name``."""
    names = [field.name for field in fields(kind)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            return function(
                **{name: kind(**{field: values.pop(field) for field in names})}, **values
            )

        return call

    return decorate
