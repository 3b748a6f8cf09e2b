"""Detection of formats: by magic numbers and contents, then by file extensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    lora,
    model_tree,
    onnx,
    savedmodel,
    torchscript,
    zip_directory,
)
from clowder_aimage.formats.diffusers import MODEL_INDEX, is_component, read_class_name
from clowder_aimage.formats.family_weights import has_transformer, is_transformer
from clowder_aimage.formats.file_content import GGUF, ONNX, PICKLE, TORCHSCRIPT, identify
from clowder_aimage.formats.file_content import SAFETENSORS as FILE_SAFETENSORS
from clowder_aimage.formats.left_out import is_export
from clowder_aimage.formats.other_files import find_models, format_models
from clowder_aimage.formats.shard_index import read_file

DIFFUSERS, LORA, TRANSFORMERS = "diffusers", "lora", "transformers"
# A single file of weights.
CHECKPOINT = "safetensors"
SAFETENSORS = ".safetensors"
_CONFIG = "config.json"
_KINDS = {GGUF: gguf.FORMAT, ONNX: onnx.FORMAT, TORCHSCRIPT: torchscript.FORMAT}
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
    content = identify(path)
    if content.kind in _KINDS:
        return _KINDS[content.kind]
    # The reader of a truncated archive explains the damage.
    if ending in torchscript.ENDINGS and start.startswith(zip_directory.MAGIC):
        return torchscript.FORMAT
    if content.is_pickled:
        raise model_tree.build_pickle_error(path, torchscript.CONVERT)
    if ending == SAFETENSORS or start[8:9] == b"{":
        return _detect_safetensors(path)
    return _detect_by_ending(path, ending, content.kind)


def _detect_by_ending(path: Path, ending: str, kind: str) -> str:
    """Return the format of the extension, so that its reader explains the damage."""
    if ending in (gguf.ENDING, onnx.ENDING):
        return ending.removeprefix(".")
    if path.name in (savedmodel.BINARY, savedmodel.TEXT):
        raise ModelError(
            f"{path} is part of a SavedModel", hint="pass the directory that contains it"
        )
    raise _build_unsupported_error(path, kind)


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
        onnx.FORMAT: any(
            name.lower().endswith(onnx.ENDING) and not (is_transformers and is_export(name))
            for name in names
        ),
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
    models = find_models(root)
    top = [name for name in models if "/" not in name]
    is_config = _CONFIG in names and FILE_SAFETENSORS in map(models.get, top)
    if len(top) == 1 and not is_config:
        return _detect_file(root / top[0])
    raise _build_directory_error(root, set(paths), models)


def _is_transformers(root: Path, names: set[str]) -> bool:
    # An adapter often includes the config of its base model.
    weights = [name for name in names if name.endswith(SAFETENSORS) and "adapter" not in name]
    if not weights or _CONFIG not in names:
        return False
    config = model_tree.read_json(model_tree.find_boundary(root), root / _CONFIG)
    return isinstance(config, dict) and any(map(config.get, ("model_type", "architectures")))


def _build_directory_error(root: Path, names: set[str], models: Mapping[str, str]) -> ModelError:
    """Return the error for a directory of an unknown format, by the models in it."""
    if (root / "transformer").is_dir() and (root / "vae").is_dir():
        return model_tree.build_whole_files_error(
            f"{root} contains transformer/ and vae/, but no model_index.json",
            model_tree.MODEL_AGAIN,
        )
    if models and set(models.values()) == {PICKLE}:
        return model_tree.build_pickle_error(root / min(models), torchscript.CONVERT)
    if models and set(models.values()) == {FILE_SAFETENSORS}:
        return _build_weights_error(root, names, min(models))
    if len(models) > 1:
        return model_tree.build_whole_files_error(
            f"{root} contains {len(models)} models: {format_models(models)}",
            "pass the file of one model",
        )
    return _build_unsupported_error(root, next(iter(models.values()), ""))


def _build_weights_error(root: Path, names: set[str], weights: str) -> ModelError:
    """Return the error for a directory whose weights have no configuration beside them."""
    message, advice = f"{root} contains {weights}, but", "pass a weight file itself, or a directory"
    folder = Path(weights).parent
    if _CONFIG in names:
        reason = "config.json states no model"
    elif "modules.json" in names and (root / folder / _CONFIG).is_file():
        # sentence-transformers once wrote models so
        reason = f"its config.json is in {folder}, not at the top"
        advice = 'move its files to the top, with the path "" in modules.json; or pass a directory'
    else:
        reason = "there is no config.json"
    return model_tree.build_whole_files_error(f"{message} {reason}", f"{advice} of a whole model")


def _build_unsupported_error(path: Path, kind: str = "") -> ModelError:
    return model_tree.build_whole_files_error(
        f"unsupported model format{kind and f' ({kind})'}: {path}",
        f"supported: {_KNOWN}",
    )
