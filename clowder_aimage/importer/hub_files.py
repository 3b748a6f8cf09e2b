"""Choice of the files of a Hugging Face repository that are packed, by their names.

A repository often holds the same weights several times: in safetensors, pickled, for Flax and ONNX,
and in lower precision (diffusers and transformers, "variant"). A single form is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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
from clowder_aimage.formats.left_out import UNNAMED, WEIGHTS, LeftOut, divide
from clowder_aimage.formats.model_tree import AGAIN, MAX_JSON, build_pickle_error
from clowder_aimage.formats.shard_index import select_variant
from clowder_aimage.oci import read_json

Read = Callable[[str], bytes]
_CONFIG = "config.json"
_INDEX = ".safetensors.index.json"
_USUAL = ("model", "diffusion_pytorch_model", "adapter_model")
# Endings of weights that are not files of an ONNX model.
_OTHERS = tuple(ending for ending in WEIGHTS if ending not in (".onnx", ".npz"))
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# Names in a message.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files of a repository that are packed, and those that are left out."""

    names: frozenset[str]
    left_out: tuple[LeftOut, ...] = ()


def choose(
    repository: str, files: Collection[str], read: Read, kind: str | None, variant: str = ""
) -> ChosenFiles:
    """Choose the ``files`` of a repository that are packed.

    Args:
        repository: The name of the repository, for messages.
        files: All its files.
        read: A function of a name to the content of a small file, such as an index of shards.
        kind: The format; by default it is detected.
        variant: The variant of a pipeline's weights, such as fp16.

    Raises:
        ModelError: No file can be packed, or the weights of a module are pickled.
        UsageError: The repository holds several models.
        FormatError: A file that ``read`` returns is not JSON.
    """
    names = {name for name in files if not any(p.startswith(".") for p in name.split("/"))}
    chosen = kind or _detect(repository, names)
    packed = _choose_format(repository, names, read, chosen, variant)
    kept, omitted = divide(files, packed)
    others = [name for name in kept if name.lower().endswith(WEIGHTS)]
    if kind is None and chosen == TRANSFORMERS:
        _check_nested(repository, others)
    reason = UNNAMED if chosen == DIFFUSERS else f"another model than the one in {chosen}"
    omitted += [LeftOut(name, reason) for name in others]
    return ChosenFiles(frozenset(packed | set(kept) - set(others)), tuple(sorted(omitted)))


def find_parts(file: str, files: Collection[str]) -> set[str]:
    """Return all parts of a split GGUF model, else the file alone."""
    return {name for name in files if _parse_stem(name) == _parse_stem(file)} | {file}


def _detect(repository: str, names: set[str]) -> str:
    top = _list_directory(names, "")
    endings = {PurePosixPath(name).suffix.lower() for name in top}
    fits = {
        DIFFUSERS: MODEL_INDEX in top,
        LORA: lora.CONFIG in top,
        TRANSFORMERS: _CONFIG in top and SAFETENSORS in endings,
        gguf.FORMAT: gguf.ENDING in endings,
        onnx.FORMAT: any(name.lower().endswith(onnx.ENDING) for name in names),
        savedmodel.FORMAT: bool(top & {savedmodel.BINARY, savedmodel.TEXT}),
        # An adapter without a config has the same choice of files.
        CHECKPOINT: SAFETENSORS in endings,
    }
    for kind, does_fit in fits.items():
        if does_fit:
            return kind
    if pickled := sorted(name for name in names if name.lower().endswith(_PICKLED)):
        raise ModelError(
            f"{repository} has no weights in safetensors: {pickled[0]} is pickled, and loading it "
            "could run any code",
            hint=torchscript.CONVERT,
        )
    raise ModelError(f"{repository} holds no model in a format that can be packed")


def _choose_format(
    repository: str, names: set[str], read: Read, kind: str, variant: str
) -> set[str]:
    top = _list_directory(names, "")
    if kind == DIFFUSERS:
        return _choose_pipeline(repository, names, read, variant)
    if kind == TRANSFORMERS:
        return _choose_weights(top, read) | _choose_modules(names, read)
    if kind == gguf.FORMAT:
        return _choose_gguf(repository, top)
    if kind in (LORA, CHECKPOINT, controlnet.FORMAT):
        files = {name for name in top if name.lower().endswith(SAFETENSORS)}
        weights = files & {lora.WEIGHTS} or files
        _check_single(repository, weights)
        return weights | (top & {lora.CONFIG})
    if kind == torchscript.FORMAT:
        scripts = {name for name in top if name.lower().endswith(torchscript.ENDINGS)}
        _check_single(repository, scripts)
        return scripts
    if kind == onnx.FORMAT:
        # External data may have any name.
        return {name for name in names if not name.lower().endswith(_OTHERS)}
    return names


def _choose_pipeline(repository: str, names: set[str], read: Read, variant: str) -> set[str]:
    """Return the files of the components in model_index.json."""
    if MODEL_INDEX not in names:
        raise ModelError(f"{repository} has no {MODEL_INDEX}: not a diffusers model")
    index = _read_object(MODEL_INDEX, read)
    check_pipeline(index, f"{repository}/{MODEL_INDEX}")
    chosen = names & {MODEL_INDEX}
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and all(entry):
            component_files = _list_directory(names, name)
            component_files = (
                select_variant(component_files, variant) if variant else component_files
            )
            chosen |= _choose_weights(component_files, read)
    return chosen


def _choose_weights(files: set[str], read: Read) -> set[str]:
    """Return the weight file of a directory, or the shards of an index and the index."""
    if indexes := [name for name in _list_indexes(files) if name.endswith(_INDEX)]:
        index = min(indexes, key=_rank)
        shards = _read_object(index, read).get("weight_map")
        shard_names = list(shards.values()) if isinstance(shards, dict) else []
        return {index} | {name for name in files if name.rpartition("/")[2] in shard_names}
    candidates = [name for name in files if name.endswith(SAFETENSORS)]
    return {min(candidates, key=_rank)} if candidates else set()


def _rank(name: str) -> tuple[int, bool, str]:
    """Return the order of equal weights: those without a variant such as fp16 come first."""
    file = name.rpartition("/")[2]
    return file.count("."), file.partition(".")[0] not in _USUAL, name


def _list_indexes(files: Collection[str]) -> list[str]:
    return [name for name in files if ".index." in name and name.endswith(".json")]


def _choose_gguf(repository: str, top: set[str]) -> set[str]:
    files = {name for name in top if name.lower().endswith(gguf.ENDING)}
    projectors = {name for name in files if "mmproj" in name.lower()}
    models = files - projectors
    _check_single(
        repository, {_parse_stem(name): name for name in sorted(models, reverse=True)}.values()
    )
    return models | (projectors if len(projectors) == 1 else set())


def _parse_stem(name: str) -> str:
    match = gguf.PART.fullmatch(name)
    return f"{match['stem']}-of-{match['total']}" if match else name


def _check_single(repository: str, names: Collection[str]) -> None:
    if len(names) > 1:
        shown = sorted(names)
        ellipsis = ", ..." if len(shown) > _SHOWN else ""
        raise UsageError(
            f"{repository} holds {len(shown)} models: {', '.join(shown[:_SHOWN])}{ellipsis}",
            hint=f"name one of them: hf://{repository}/{shown[0]}",
        )


def _choose_modules(names: set[str], read: Read) -> set[str]:
    """Return the weights of the modules of sentence-transformers. Raises ModelError."""
    if transformers.MODULES not in names:
        return set()
    modules = transformers.list_module_names(_read_value(transformers.MODULES, read))
    weights = {f"{module}/{transformers.MODULE_WEIGHTS}" for module in modules} & names
    for module in modules:
        pickle = f"{module}/{transformers.MODULE_PICKLE}"
        if pickle in names and f"{module}/{transformers.MODULE_WEIGHTS}" not in names:
            raise build_pickle_error(Path(pickle), transformers.MODULE_AGAIN)
    return weights


def _check_nested(repository: str, others: Collection[str]) -> None:
    """Check that no other weights are in subdirectories, as for a local directory."""
    nested = sorted(n for n in others if "/" in n and n.endswith(SAFETENSORS))
    if nested:
        raise UsageError(
            f"{repository} matches several formats: {TRANSFORMERS}, safetensors ({nested[0]})",
            remedy="choose_format",
            format=TRANSFORMERS,
        )


def _list_directory(names: Collection[str], directory: str) -> set[str]:
    return {name for name in names if name.rpartition("/")[0] == directory}


def _read_object(name: str, read: Read) -> dict[str, Any]:
    value = _read_value(name, read)
    if not isinstance(value, dict):
        raise FormatError(f"{name} is not a JSON object", hint=AGAIN)
    return value


def _read_value(name: str, read: Read) -> object:
    try:
        return read_json(read(name), name, MAX_JSON)
    except FormatError as error:
        raise FormatError(error.message, hint=AGAIN) from None
