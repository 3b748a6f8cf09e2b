"""Source of a create, in any format: an inventory and additional files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError, NotFoundError, UsageError
from clowder_aimage.formats import (
    controlnet,
    family_model,
    file_content,
    gguf,
    lora,
    model_tree,
    savedmodel,
    transformers,
    whole_files,
)
from clowder_aimage.formats.detection import CHECKPOINT, DIFFUSERS, TRANSFORMERS, detect
from clowder_aimage.formats.diffusers import take_inventory
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.left_out import UNNAMED, LeftOut
from clowder_aimage.formats.model_tree import ADAPTERS, CARD
from clowder_aimage.formats.other_files import complete, complete_whole, find_models
from clowder_aimage.formats.sidecar import add_sidecar
from clowder_aimage.importer.blob_encoder import check_compression
from clowder_aimage.oci import mediatype

# Formats of whole files, named as the modules of formats/.
WHOLE_FORMATS = ("gguf", "onnx", "torchscript", "savedmodel", "lora")
FORMATS = (
    *(DIFFUSERS, family_model.FORMAT, TRANSFORMERS, *WHOLE_FORMATS),
    *(controlnet.FORMAT, CHECKPOINT, whole_files.FORMAT),
)
# The contents of the formats of single files; the others are safetensors.
_CONTENTS = {
    "gguf": file_content.GGUF,
    "onnx": file_content.ONNX,
    "torchscript": file_content.TORCHSCRIPT,
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][\w!#$&^.+-]{0,126}/[A-Za-z0-9][\w!#$&^.+-]{0,126}")


@dataclass(frozen=True, slots=True)
class ExtraFile:
    """A file that becomes a layer of any media type."""

    media_type: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> ExtraFile:
        """Parse ``TYPE=FILE``. Raises UsageError."""
        media_type, equals, path = text.partition("=")
        if mediatype.is_ours(media_type):
            raise UsageError(
                f"media type {media_type[:100]} is reserved for files of models and adapters",
                remedy="layer_of_other_type",
            )
        if not equals or not path or not _MEDIA_TYPE.fullmatch(media_type):
            raise UsageError(
                f"invalid layer: {text[:100]!r}",
                hint="expected MEDIA_TYPE=FILE, such as application/vnd.example.ep.v1=./ep.bin",
            )
        return cls(media_type, Path(path))


@dataclass(frozen=True, slots=True)
class ModelForm:
    """Options for reading a source.

    ``format`` is one of FORMATS, or detected. With ``whole_files`` no file is divided into tensors,
    and any file or directory is packed. ``compression`` applies to whole files. ``adapters`` are
    names and paths, ``extras`` additional layers. ``variant`` selects weights of a diffusers
    pipeline, such as fp16. ``like`` supplies missing components of an image model. With a format,
    if ``is_chosen``, and in a snapshot of the Hugging Face cache, other models beside the one are
    left out instead of refused.
    """

    format: str | None = None
    whole_files: bool = False
    compression: str = ""
    adapters: tuple[tuple[str, Path], ...] = ()
    extras: tuple[ExtraFile, ...] = ()
    variant: str = ""
    like: family_model.LikeModel | None = None
    is_chosen: bool = False


def parse_adapter(text: str) -> tuple[str, Path]:
    """Return the name and path in ``[NAME=]PATH``. Raises UsageError."""
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).name.removesuffix(".safetensors").removesuffix(gguf.ENDING), text
    if not _NAME.fullmatch(name):
        raise UsageError(f"invalid adapter name: {name[:100]!r}", remedy="name_adapter")
    return name, Path(path)


def take(path: Path, form: ModelForm) -> Inventory:
    """Return the inventory of the model at ``path``.

    Raises:
        NotFoundError: ``path`` does not exist.
        ModelError, FormatError: As the format's ``take``, or there is no supported model.
        UsageError: The format is ambiguous, or an option does not apply to it.
    """
    if not path.exists() and not path.is_symlink():
        hint = "expected a model directory, a model file, or ORG/REPO of the Hugging Face hub"
        raise NotFoundError(f"{path} does not exist", hint=hint)
    with model_tree.reading(path):
        return _take(snapshot(path), form)


def _take(path: Path, form: ModelForm) -> Inventory:
    if form.compression:
        check_compression(form.compression)
    kind, inventory = _take_whole(path, form) if form.whole_files else _take_detected(path, form)
    if form.variant and (kind != DIFFUSERS or form.whole_files):
        raise UsageError(f"only a diffusers pipeline has variants; {path} is packed as {kind}")
    if form.like is not None and kind != family_model.FORMAT:
        raise UsageError(
            f"only an image model in another layout can be completed; {path} is packed as {kind}"
        )
    if form.compression and inventory.components:
        raise UsageError(
            "tensors cannot be compressed: it would save little space, and they could not be "
            "loaded in place",
            remedy="compress_whole_files",
        )
    packed_adapters = _list_adapters(path, inventory) if kind != whole_files.FORMAT else []
    adapters = (*form.adapters, *packed_adapters)
    inventory = _complete(path, kind, _with_adapters(inventory, adapters), form)
    return _with_extras(inventory, form.extras)


def _complete(path: Path, kind: str, inventory: Inventory, form: ModelForm) -> Inventory:
    """Return the inventory with the other files of a directory. Raises as ``complete``."""
    if not path.is_dir():
        return inventory
    if form.whole_files or kind in (whole_files.FORMAT, savedmodel.FORMAT):
        return complete_whole(path, inventory)
    is_chosen = form.format or form.is_chosen or path.parent.name == "snapshots"
    reason = f"another model than the one in {kind}" if is_chosen else ""
    return complete(path, inventory, kind, UNNAMED if kind == DIFFUSERS else reason)


def _take_detected(path: Path, form: ModelForm) -> tuple[str, Inventory]:
    kind = form.format or detect(path)
    if kind == "gguf" and form.format is None and form.like is not None:
        # A GGUF file is packed whole unless another model supplies the other components.
        kind = family_model.FORMAT
    return kind, _read_inventory(path, kind, form)


def _take_whole(path: Path, form: ModelForm) -> tuple[str, Inventory]:
    """Return a model with whole files, of a format that supports them, else of any files."""
    kind = form.format or whole_files.FORMAT
    if form.format is None and path.exists():
        with suppress(ModelError, FormatError, UsageError):
            kind = detect(path)
    try:
        if kind == TRANSFORMERS:
            return kind, transformers.take_whole(path)
        if kind in WHOLE_FORMATS:
            return kind, _read_inventory(path, kind, form)
    except (ModelError, UsageError):
        # The format rejects some files, such as pickled ones, or several models.
        if form.format:
            raise
    return whole_files.FORMAT, whole_files.take(path)


def _read_inventory(path: Path, kind: str, form: ModelForm) -> Inventory:
    if kind == DIFFUSERS:
        return take_inventory(path, form.variant)
    if kind == family_model.FORMAT:
        source = _find_single_file(path, kind) if path.is_dir() else path
        inventory = family_model.take(path, form.like)
        return inventory if source.is_dir() else add_sidecar(inventory, source)
    if kind == TRANSFORMERS:
        return transformers.take(path)
    if kind == whole_files.FORMAT:
        return whole_files.take(path)
    module: Any = importlib.import_module(f"clowder_aimage.formats.{kind}")
    source = _find_single_file(path, kind) if path.is_dir() else path
    inventory = module.take(source)
    if kind in (CHECKPOINT, gguf.FORMAT) and source.is_file():
        inventory = add_sidecar(inventory, source)
    if not path.is_dir():
        return inventory
    # An export writes a card with only the licence; it is not a file of the model.
    files = tuple(f for f in inventory.files if f.name != CARD or not model_tree.is_bare(f.path))
    licence = inventory.license or model_tree.read_license(path)
    return replace(inventory, files=files, license=licence)


def _find_single_file(directory: Path, kind: str) -> Path:
    """Return the only model file of a directory if its format is that of files, else itself."""
    configs = {"lora": lora.CONFIG, controlnet.FORMAT: "config.json"}
    if kind == savedmodel.FORMAT or (directory / configs.get(kind, "")).is_file():
        return directory
    content = _CONTENTS.get(kind, file_content.SAFETENSORS)
    models = find_models(directory)
    names = [name for name, title in models.items() if title == content and "/" not in name]
    is_readable = len(names) != 1 or names[0].lower().endswith((".onnx", gguf.ENDING))
    return directory if is_readable else directory / names[0]


def _with_adapters(inventory: Inventory, adapters: Sequence[tuple[str, Path]]) -> Inventory:
    descriptions: dict[str, Any] = {}
    omitted: list[LeftOut] = []
    files = {file.name: file for file in inventory.files}
    for name, path in adapters:
        if name in descriptions:
            raise UsageError(f"duplicate adapter name: {name}", remedy="name_adapter")
        adapter = _read_adapter(path)
        if adapter.facts["format"] == gguf.FORMAT != inventory.facts.get("format"):
            raise UsageError(f"{path}: adapters in GGUF are for models in GGUF")
        descriptions[name] = adapter.facts["adapter"]
        renamed = [replace(file, name=f"{ADAPTERS}/{name}/{file.name}") for file in adapter.files]
        files |= {file.name: file for file in renamed}
        omitted += [
            LeftOut(f"{ADAPTERS}/{name}/{file.path}", file.reason) for file in adapter.left_out
        ]
    if not descriptions:
        return inventory
    properties = {**inventory.facts, ADAPTERS: dict(sorted(descriptions.items()))}
    return replace(
        inventory, files=tuple(files.values()), facts=properties, left_out=tuple(omitted)
    )


def _read_adapter(path: Path) -> Inventory:
    """Return the adapter at ``path``. Raises ModelError, FormatError."""
    is_gguf = path.suffix == gguf.ENDING or (path.is_dir() and any(path.glob(f"*{gguf.ENDING}")))
    if not is_gguf:
        source = _find_single_file(path, "lora") if path.is_dir() else path
        inventory = lora.take(source)
    else:
        inventory = gguf.take(path)
        if "adapter" not in inventory.facts:
            raise ModelError(f"{path} is not an adapter")
    return complete(path, inventory, "lora") if path.is_dir() else inventory


def _list_adapters(root: Path, inventory: Inventory) -> list[tuple[str, Path]]:
    """Return names and paths of the adapters in ``root/adapters``, one per directory.

    An export writes this layout. Files in the format's inventory are skipped.

    Raises:
        ModelError: There is another file, which would be skipped.
        FormatError: An adapter is damaged.
    """
    directory = root / ADAPTERS
    if not root.is_dir() or not directory.is_dir():
        return []
    model_tree.check_inside(model_tree.find_boundary(root), directory)
    model = {file.name for file in inventory.files if file.media_type != mediatype.AIMAGE_FILE}
    paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    if not paths:
        raise _build_adapter_error(directory, "it is empty")
    adapters = []
    for path in paths:
        relative = path.relative_to(root).as_posix()
        is_included = any(name == relative or name.startswith(f"{relative}/") for name in model)
        try:
            _check_adapter(root, path)
            adapters.append((path.name, path))
        except (ModelError, FormatError):
            if not is_included:
                raise
    return adapters


def _check_adapter(root: Path, path: Path) -> None:
    model_tree.check_inside(model_tree.find_boundary(root), path)
    if not path.is_dir():
        raise _build_adapter_error(path, "it is a file")
    if not _NAME.fullmatch(path.name):
        raise _build_adapter_error(path, "the name is not a valid adapter name")
    try:
        _read_adapter(path)
    except ModelError as error:
        raise _build_adapter_error(path, error.message) from None


def _build_adapter_error(path: Path, problem: str) -> ModelError:
    return ModelError(
        f"{path} is not an adapter and would be skipped: {problem}",
        hint=f"put each adapter into {ADAPTERS}/NAME/, as one safetensors LoRA with its "
        "adapter_config.json or one GGUF file, and move other files elsewhere",
    )


def _with_extras(inventory: Inventory, extras: Sequence[ExtraFile]) -> Inventory:
    files = list(inventory.files)
    for extra in extras:
        if not extra.path.is_file():
            raise UsageError(f"file {extra.path} not found")
        files.append(
            model_tree.build_source_file(None, extra.path, extra.path.name, extra.media_type)
        )
    return replace(inventory, files=tuple(files))


def snapshot(path: Path) -> Path:
    """Return the snapshot in a Hugging Face cache directory; any other path is unchanged.

    The directory is named ``models--ORG--NAME`` (huggingface_hub, "Understand caching").

    Raises:
        UsageError: It has several snapshots and no ``main``.
    """
    path = path.absolute() if path.name in ("", "..") else path
    snapshots = path / "snapshots"
    if not path.name.startswith("models--") or not snapshots.is_dir():
        return path
    main = path / "refs" / "main"
    if main.is_file():
        return snapshots / main.read_text("utf-8", "replace").strip()[:100].replace("/", "")
    directories = sorted(directory for directory in snapshots.iterdir() if directory.is_dir())
    if len(directories) == 1:
        return directories[0]
    raise UsageError(
        f"{path} contains {len(directories)} snapshots, and refs/main is missing",
        hint=f"pass one of them: {directories[0]}" if directories else "download the model again",
    )
