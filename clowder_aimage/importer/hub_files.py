"""Files of a repository on the Hugging Face hub that are packed, chosen by their names.

A repository often holds the same weights several times: in safetensors, pickled, for Flax and ONNX,
and in lower precision (diffusers and transformers, "variant"). One of them is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import PurePosixPath
from typing import Any

from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats import (
    controlnet,
    gguf,
    lora,
    onnx,
    savedmodel,
    torchscript,
    transformers,
)
from clowder_aimage.formats.detection import CHECKPOINT, DIFFUSERS, LORA, SAFETENSORS, TRANSFORMERS
from clowder_aimage.formats.diffusers import MODEL_INDEX, check_pipeline
from clowder_aimage.formats.model_tree import AGAIN, CARD, MAX_JSON, PICKLED
from clowder_aimage.formats.shard_index import of_variant
from clowder_aimage.oci import read_json

Read = Callable[[str], bytes]
_CONFIG = "config.json"
_INDEX = ".safetensors.index.json"
_USUAL = ("model", "diffusion_pytorch_model", "adapter_model")
_WEIGHTS = (*PICKLED, SAFETENSORS, ".h5", ".msgpack", ".gguf", ".tflite", ".ot")
_SHOWN = 5  # names in a message


def choose(
    repository: str, files: Collection[str], read: Read, kind: str | None, variant: str = ""
) -> set[str]:
    """Return the names of the ``files`` of a repository that are packed.

    Args:
        repository: The name of the repository, for messages.
        files: All its files.
        read: A function of a name to the content of a small file, such as an index of shards.
        kind: The format; by default it is detected.
        variant: The variant of a pipeline's weights, such as fp16.

    Raises:
        ModelError: No file can be packed, or some would be left out.
        UsageError: The repository holds several models.
        FormatError: A file that ``read`` returns is not JSON.
    """
    names = {name for name in files if not any(p.startswith(".") for p in name.split("/"))}
    kind = kind or _detect(repository, names)
    return _of_kind(repository, names, read, kind, variant) | (names & {CARD})


def parts_of(file: str, files: Collection[str]) -> set[str]:
    """Return all parts of a split GGUF model, else the file alone."""
    return {name for name in files if _stem(name) == _stem(file)} | {file}


def _detect(repository: str, names: set[str]) -> str:
    top = _inside(names, "")
    endings = {PurePosixPath(name).suffix.lower() for name in top}
    fits = {
        DIFFUSERS: MODEL_INDEX in top,
        LORA: lora.CONFIG in top,
        TRANSFORMERS: _CONFIG in top and SAFETENSORS in endings,
        gguf.FORMAT: gguf.ENDING in endings,
        onnx.FORMAT: any(name.lower().endswith(onnx.ENDING) for name in names),
        savedmodel.FORMAT: bool(top & {savedmodel.BINARY, savedmodel.TEXT}),
        CHECKPOINT: SAFETENSORS in endings,  # or an adapter
    }
    for kind, does_fit in fits.items():
        if does_fit:
            return kind
    if pickled := sorted(name for name in names if name.lower().endswith(PICKLED)):
        raise ModelError(
            f"{repository} has no weights in safetensors: {pickled[0]} is pickled, and loading it "
            "could run any code",
            hint=torchscript.CONVERT,
        )
    raise ModelError(f"{repository} holds no model in a format that can be packed")


def _of_kind(repository: str, names: set[str], read: Read, kind: str, variant: str) -> set[str]:
    top = _inside(names, "")
    if kind == DIFFUSERS:
        return _pipeline(repository, names, read, variant)
    if kind == TRANSFORMERS:
        _check_parts(repository, names)
        texts = {name for name in top if name.endswith(transformers.TEXTS)} - set(_indexes(top))
        return texts | _weights(top, read)
    if kind == gguf.FORMAT:
        return _gguf(repository, top)
    if kind in (LORA, CHECKPOINT, controlnet.FORMAT):
        loose = {name for name in top if name.lower().endswith(SAFETENSORS)}
        known = loose & {lora.WEIGHTS} or loose
        _check_one(repository, known)
        return known | (top & {lora.CONFIG})
    if kind == torchscript.FORMAT:
        scripts = {name for name in top if name.lower().endswith(torchscript.ENDINGS)}
        _check_one(repository, scripts)
        return scripts
    if kind == onnx.FORMAT:  # external data may have any name
        return {name for name in names if not name.lower().endswith(_WEIGHTS)}
    return names


def _pipeline(repository: str, names: set[str], read: Read, variant: str) -> set[str]:
    """Return the files of the components that model_index.json names."""
    if MODEL_INDEX not in names:
        raise ModelError(f"{repository} has no {MODEL_INDEX}: not a diffusers model")
    index = _object(MODEL_INDEX, read)
    check_pipeline(index, f"{repository}/{MODEL_INDEX}")
    chosen = names & {MODEL_INDEX}
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and all(entry):
            here = _inside(names, name)
            here = of_variant(here, variant) if variant else here
            texts = {one for one in here if one.endswith(transformers.TEXTS)} - set(_indexes(here))
            chosen |= texts | _weights(here, read)
    return chosen


def _weights(here: set[str], read: Read) -> set[str]:
    """Return the weight file of a directory, or the shards of an index and the index."""
    if indexes := [name for name in _indexes(here) if name.endswith(_INDEX)]:
        index = min(indexes, key=_rank)
        shards = _object(index, read).get("weight_map")
        wanted = list(shards.values()) if isinstance(shards, dict) else []
        return {index} | {name for name in here if name.rpartition("/")[2] in wanted}
    found = [name for name in here if name.endswith(SAFETENSORS)]
    return {min(found, key=_rank)} if found else set()


def _rank(name: str) -> tuple[int, bool, str]:
    """Return the order of equal weights: the variant without a name such as fp16 comes first."""
    file = name.rpartition("/")[2]
    return file.count("."), file.partition(".")[0] not in _USUAL, name


def _indexes(here: Collection[str]) -> list[str]:
    return [name for name in here if ".index." in name and name.endswith(".json")]


def _gguf(repository: str, top: set[str]) -> set[str]:
    found = {name for name in top if name.lower().endswith(gguf.ENDING)}
    projectors = {name for name in found if "mmproj" in name.lower()}
    models = found - projectors
    _check_one(repository, {_stem(name): name for name in sorted(models, reverse=True)}.values())
    return models | (projectors if len(projectors) == 1 else set())


def _stem(name: str) -> str:
    part = gguf.PART.fullmatch(name)
    return f"{part['stem']}-of-{part['total']}" if part else name


def _check_one(repository: str, found: Collection[str]) -> None:
    if len(found) > 1:
        shown = sorted(found)
        more = ", ..." if len(shown) > _SHOWN else ""
        raise UsageError(
            f"{repository} holds {len(shown)} models: {', '.join(shown[:_SHOWN])}{more}",
            hint=f"name one of them: hf://{repository}/{shown[0]}",
        )


def _check_parts(repository: str, names: set[str]) -> None:
    """Check that no weights are in directories of their own, as for a local directory."""
    apart = sorted(n for n in names if n.count("/") == 1 and n.endswith(SAFETENSORS))
    if apart:
        raise ModelError(
            f"{apart[0]} of {repository} is in a separate directory and would be skipped",
            hint="download the part that you need, and pack its directory",
        )


def _inside(names: Collection[str], directory: str) -> set[str]:
    return {name for name in names if name.rpartition("/")[0] == directory}


def _object(name: str, read: Read) -> dict[str, Any]:
    try:
        value = read_json(read(name), name, MAX_JSON)
    except FormatError as error:
        raise FormatError(error.message, hint=AGAIN) from None
    if not isinstance(value, dict):
        raise FormatError(f"{name} is not a JSON object", hint=AGAIN)
    return value
