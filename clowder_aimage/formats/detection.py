"""Detection of formats: by magic numbers and contents, then by file extensions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clowder_aimage.adapter.names import (
    ALPHA,
    DORA_SCALE,
    MAGNITUDE,
    find_unsupported_kind,
    split_name,
)
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats import (
    controlnet,
    family_model,
    gguf,
    gguf_header,
    lora,
    model_tree,
    onnx,
    savedmodel,
    torchscript,
)
from clowder_aimage.formats.diffusers import MODEL_INDEX, is_component, read_class_name
from clowder_aimage.formats.family_weights import has_transformer, is_transformer
from clowder_aimage.formats.onnx_graph import is_model
from clowder_aimage.formats.shard_index import read_file

DIFFUSERS, LORA, TRANSFORMERS = "diffusers", "lora", "transformers"
# A single file of weights.
CHECKPOINT = "safetensors"
SAFETENSORS = ".safetensors"
_CONFIG = "config.json"
_KNOWN = (
    "a diffusers, Transformers, PEFT or TensorFlow SavedModel directory, a directory of ComfyUI, "
    "MLX or mflux, or a GGUF, ONNX, TorchScript or safetensors file (a checkpoint or LoRA)"
)


def detect(path: Path) -> str:
    """Return the format of ``path``: the name of its module, or ``diffusers``.

    Raises:
        UsageError: Two formats match.
        ModelError: No format matches, the model is pickled, or it cannot be read.
        FormatError: It is a damaged safetensors file.
    """
    with model_tree.reading(path):
        if path.is_dir():
            return _detect_directory(path)
        if path.is_file():
            return _detect_file(path)
    missing = f"{path} does not exist" if not path.exists() else f"{path} is not a regular file"
    raise ModelError(missing, hint=f"supported: {_KNOWN}")


def _detect_file(path: Path) -> str:
    start, ending = model_tree.read_start(path), path.suffix.lower()
    model_tree.check_not_pointer(path, start)
    if start.startswith((gguf_header.MAGIC, gguf_header.BIG_ENDIAN, *gguf_header.OLDER)):
        return gguf.FORMAT
    if start.startswith(torchscript.MAGIC):
        with path.open("rb") as file:
            if torchscript.is_archive(file) or ending in torchscript.ENDINGS:
                return torchscript.FORMAT
    if torchscript.is_pickle(start):
        raise model_tree.build_pickle_error(path, torchscript.CONVERT)
    # A safetensors file begins with the 8 bytes of its header's length, then JSON.
    if ending == SAFETENSORS or start[8:9] == b"{":
        return _detect_safetensors(path)
    with path.open("rb") as file:
        if is_model(file, path.stat().st_size):
            return onnx.FORMAT
    return _detect_by_ending(path, ending)


def _detect_by_ending(path: Path, ending: str) -> str:
    """Return the format of the extension, so that its reader explains the damage."""
    if ending in (gguf.ENDING, onnx.ENDING):
        return ending.removeprefix(".")
    if path.name in (savedmodel.BINARY, savedmodel.TEXT):
        raise ModelError(
            f"{path} is part of a SavedModel", hint="pass the directory that contains it"
        )
    if ending in model_tree.PICKLED:
        raise model_tree.build_pickle_error(path, torchscript.CONVERT)
    raise _build_unsupported_error(path)


def _detect_safetensors(path: Path) -> str:
    try:
        names = read_file(path).tensors
    except FormatError:
        if path.suffix.lower() == SAFETENSORS:
            raise
        raise _build_unsupported_error(path) from None
    if controlnet.is_controlnet(names):
        return controlnet.FORMAT
    if is_lora(names):
        return LORA
    return family_model.FORMAT if is_transformer(names) else CHECKPOINT


def is_lora(names: Iterable[str]) -> bool:
    """Return True if most of these tensor names are those of an adapter.

    They are recognised by their suffixes, such as ``lora_A`` and ``lora_B`` (peft). Some whole
    models include adapters, and parameters named alpha.
    """
    balance = 0
    for name in names:
        split = split_name(name)
        if split is None:
            balance += 1 if find_unsupported_kind(name) is not None else -1
        elif split[1] not in (ALPHA, DORA_SCALE, MAGNITUDE):
            balance += 1
    return balance > 0


def _detect_directory(root: Path) -> str:
    paths = {path.name: path for path in sorted(root.iterdir()) if not path.name.startswith(".")}
    names = set(paths)
    endings = {path.suffix.lower() for path in paths.values()}
    is_transformers = _is_transformers(root, names)
    does_fit = {
        DIFFUSERS: MODEL_INDEX in names or (not is_transformers and is_component(root)),
        LORA: lora.CONFIG in names,
        TRANSFORMERS: is_transformers,
        gguf.FORMAT: gguf.ENDING in endings,
        onnx.FORMAT: onnx.ENDING in endings,
        savedmodel.FORMAT: bool(names & {savedmodel.BINARY, savedmodel.TEXT}),
    }
    fits = [kind for kind, does in does_fit.items() if does]
    if len(fits) > 1:
        raise UsageError(
            f"{root} matches several formats: {', '.join(fits)}",
            remedy="choose_format",
            format=fits[0],
        )
    if fits == [DIFFUSERS] and MODEL_INDEX not in names:
        return controlnet.FORMAT if read_class_name(root) == controlnet.CLASS else DIFFUSERS
    if fits:
        return fits[0]
    if has_transformer(root):
        return family_model.FORMAT
    # Exporters put the ONNX models of a repository into a subdirectory, such as onnx/.
    if any(path.suffix.lower() == onnx.ENDING for path in model_tree.walk(root)):
        return onnx.FORMAT
    try:
        if (path := model_tree.find_only_file(root)) is not None:
            return _detect_file(path)
    except ModelError:
        # An error about the directory is more specific than one about its only file.
        pass
    raise _build_directory_error(root, paths)


def _is_transformers(root: Path, names: set[str]) -> bool:
    # An adapter often includes the config of its base model.
    weights = [name for name in names if name.endswith(SAFETENSORS) and "adapter" not in name]
    if not weights or _CONFIG not in names:
        return False
    config = model_tree.read_json(model_tree.find_boundary(root), root / _CONFIG)
    return isinstance(config, dict) and any(map(config.get, ("model_type", "architectures")))


def _build_directory_error(root: Path, paths: dict[str, Path]) -> ModelError:
    """Return the error for a directory of an unknown format, by its file names."""
    if (root / "transformer").is_dir() and (root / "vae").is_dir():
        return model_tree.build_whole_files_error(
            f"{root} contains transformer/ and vae/, but no model_index.json",
            model_tree.MODEL_AGAIN,
        )
    for name, path in paths.items():
        if name.lower().endswith(torchscript.ENDINGS) and path.is_file():
            return model_tree.build_whole_files_error(
                f"unsupported model format: {root} ({name} may be TorchScript)",
                f"if it is, pass the file itself; otherwise {torchscript.CONVERT}",
            )
    for path in paths.values():
        if path.suffix.lower() in model_tree.PICKLED:
            return model_tree.build_pickle_error(path, torchscript.CONVERT)
    if weights := [name for name in paths if name.endswith(SAFETENSORS)]:
        missing = "config.json states no model" if _CONFIG in paths else "there is no config.json"
        return model_tree.build_whole_files_error(
            f"{root} contains {weights[0]}, but {missing}",
            "pass a weight file itself, or a directory of a whole model",
        )
    return _build_unsupported_error(root)


def _build_unsupported_error(path: Path) -> ModelError:
    return model_tree.build_whole_files_error(
        f"unsupported model format: {path}", f"supported: {_KNOWN}"
    )
