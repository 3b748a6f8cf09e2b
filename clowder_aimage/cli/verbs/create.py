"""The verb ``create``."""

from __future__ import annotations

from pathlib import Path

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import complete_path, tag_reference, verb
from clowder_aimage.cli.create.adapted_model import pack_adapters
from clowder_aimage.cli.create.enhancer import pack_enhancer
from clowder_aimage.cli.create.model_files import FileOptions, pack_files
from clowder_aimage.cli.create.ollama_model import pack_ollama_model
from clowder_aimage.cli.create.option import StoredOptions, create_options
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference


@examples(
    "aimage create shapes examples/shapes/model",
    "aimage create zimage Tongyi-MAI/Z-Image-Turbo --quantize int8",
    f"aimage create {NAME} . --license MIT",
    "aimage create sdxl sd_xl_base_1.0.safetensors",
)
@verb
@click.argument("reference", metavar="NAME", type=tag_reference)
@click.argument("path", metavar="[PATH]", default=".", shell_complete=complete_path)
@create_options
def create(
    reference: Reference,
    path: str,
    ollama: Path | None,
    stored: StoredOptions,
    files: FileOptions,
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
    if stored.enhancer or stored.weights is not None:
        _refuse_path(path, "--enhancer")
        pack_enhancer(reference, stored.from_, stored.weights, is_enhancer=stored.enhancer)
    elif stored.from_ is not None or stored.loras:
        _refuse_path(path, "--from")
        pack_adapters(reference, stored.from_, stored.loras)
    elif ollama is not None:
        pack_ollama_model(reference, ollama, path)
    else:
        pack_files(reference, path, files)


def _refuse_path(path: str, option: str) -> None:
    if path != ".":
        raise UsageError(f"PATH cannot be combined with {option}", hint="pack PATH first")
