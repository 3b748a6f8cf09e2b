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
    gguf,
    lora,
    model_tree,
    transformers,
    whole_files,
)
from clowder_aimage.formats.detection import CHECKPOINT, DIFFUSERS, TRANSFORMERS, detect
from clowder_aimage.formats.diffusers import take_inventory
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.model_tree import ADAPTERS, CARD
from clowder_aimage.formats.shard_index import is_safetensors
from clowder_aimage.importer.blob_encoder import check_compression
from clowder_aimage.oci import mediatype

WHOLE = ("gguf", "onnx", "torchscript", "savedmodel", "lora")  # modules of formats/
FORMATS = (
    *(DIFFUSERS, family_model.FORMAT, TRANSFORMERS, *WHOLE),
    *(controlnet.FORMAT, CHECKPOINT, whole_files.FORMAT),
)
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

    ``format`` is one of FORMATS, or detected; with ``whole_files`` no file is divided into tensors,
    and any file or directory is packed. ``compression`` applies to files that stay whole.
    ``adapters`` maps names to paths; ``extras`` are additional layers. ``variant`` is one of a
    diffusers pipeline's weights, such as fp16. ``like`` completes an image model.
    """

    format: str | None = None
    whole_files: bool = False
    compression: str = ""
    adapters: tuple[tuple[str, Path], ...] = ()
    extras: tuple[ExtraFile, ...] = ()
    variant: str = ""
    like: family_model.LikeModel | None = None


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
    kind, inventory = _whole(path, form) if form.whole_files else _known(path, form)
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
    found = _travelling(path, inventory) if kind != whole_files.FORMAT else []
    adapters = (*form.adapters, *found)
    return _with_extras(_with_adapters(inventory, adapters), form.extras)


def _known(path: Path, form: ModelForm) -> tuple[str, Inventory]:
    kind = form.format or detect(path)
    if kind == "gguf" and form.format is None and form.like is not None:
        kind = family_model.FORMAT  # GGUF stays one layer unless there is a model to complete it
    return kind, _inventory(path, kind, form)


def _whole(path: Path, form: ModelForm) -> tuple[str, Inventory]:
    """Return a model of a format that keeps files whole; any other files as they are."""
    kind = form.format or whole_files.FORMAT
    if form.format is None and path.exists():
        with suppress(ModelError, FormatError, UsageError):
            kind = detect(path)
    try:
        if kind == TRANSFORMERS:
            return kind, transformers.take_whole(path)
        if kind in WHOLE:
            return kind, _inventory(path, kind, form)
    except ModelError:  # files that the format does not allow, such as pickled ones
        if form.format:
            raise
    return whole_files.FORMAT, whole_files.take(path)


def _inventory(path: Path, kind: str, form: ModelForm) -> Inventory:
    if kind == DIFFUSERS:
        return take_inventory(path, form.variant)
    if kind == family_model.FORMAT:
        return family_model.take(path, form.like)
    if kind == TRANSFORMERS:
        return transformers.take(path)
    if kind == whole_files.FORMAT:
        return whole_files.take(path)
    module: Any = importlib.import_module(f"clowder_aimage.formats.{kind}")
    inventory: Inventory = module.take(_alone(path, kind) if path.is_dir() else path)
    if not path.is_dir():
        return inventory
    # an export writes a card with only the licence, which is not a file of the model
    files = tuple(f for f in inventory.files if f.name != CARD or not model_tree.is_bare(f.path))
    licence = inventory.license or model_tree.read_license(path)
    return replace(inventory, files=files, license=licence)


def _alone(directory: Path, kind: str) -> Path:
    """Return the only file of a directory if its format takes files, else the directory."""
    found = model_tree.sole(directory)
    if found is None or kind == "savedmodel" or found.suffix.lower() == ".onnx":
        return directory
    is_alone = kind != "lora" or is_safetensors(found) or found.suffix == gguf.ENDING
    return found if is_alone else directory


def _with_adapters(inventory: Inventory, adapters: Sequence[tuple[str, Path]]) -> Inventory:
    described: dict[str, Any] = {}
    files = {file.name: file for file in inventory.files}
    for name, path in adapters:
        if name in described:
            raise UsageError(f"duplicate adapter name: {name}", remedy="name_adapter")
        taken = _adapter(path)
        if taken.facts["format"] == gguf.FORMAT != inventory.facts.get("format"):
            raise UsageError(f"{path}: adapters in GGUF are for models in GGUF")
        described[name] = taken.facts["adapter"]
        named = [replace(file, name=f"{ADAPTERS}/{name}/{file.name}") for file in taken.files]
        files |= {file.name: file for file in named}
    if not described:
        return inventory
    facts = {**inventory.facts, ADAPTERS: dict(sorted(described.items()))}
    return replace(inventory, files=tuple(files.values()), facts=facts)


def _adapter(path: Path) -> Inventory:
    """Return the adapter at ``path``. Raises ModelError, FormatError."""
    source = _alone(path, "lora") if path.is_dir() else path
    if source.suffix != gguf.ENDING:
        return lora.take(source)
    found = gguf.take(source)
    if "adapter" not in found.facts:
        raise ModelError(f"{source} is not an adapter")
    return found


def _travelling(root: Path, inventory: Inventory) -> list[tuple[str, Path]]:
    """Return names and paths of the adapters in ``root/adapters``, one per directory.

    An export writes this layout. Files that the format already includes are skipped.

    Raises:
        ModelError: There is another file, which would be left out.
        FormatError: An adapter is damaged.
    """
    directory = root / ADAPTERS
    if not root.is_dir() or not directory.is_dir():
        return []
    model_tree.check_inside(model_tree.home(root), directory)
    model = {file.name for file in inventory.files if file.media_type != mediatype.AIMAGE_FILE}
    paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    if not paths:
        raise _no_adapter(directory, "it is empty")
    found = []
    for path in paths:
        own = path.relative_to(root).as_posix()
        is_taken = any(name == own or name.startswith(f"{own}/") for name in model)
        try:
            _check_adapter(root, path)
            found.append((path.name, path))
        except (ModelError, FormatError):
            if not is_taken:
                raise
    return found


def _check_adapter(root: Path, path: Path) -> None:
    model_tree.check_inside(model_tree.home(root), path)
    if not path.is_dir():
        raise _no_adapter(path, "it is a file")
    if not _NAME.fullmatch(path.name):
        raise _no_adapter(path, "the name is not a valid adapter name")
    try:
        _adapter(path)
    except ModelError as error:
        raise _no_adapter(path, error.message) from None


def _no_adapter(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} is not an adapter and would be skipped: {why}",
        hint=f"put each adapter into {ADAPTERS}/NAME/, as one safetensors LoRA with its "
        "adapter_config.json or one GGUF file, and move other files elsewhere",
    )


def _with_extras(inventory: Inventory, extras: Sequence[ExtraFile]) -> Inventory:
    files = list(inventory.files)
    for extra in extras:
        if not extra.path.is_file():
            raise UsageError(f"file {extra.path} not found")
        files.append(model_tree.source_file(None, extra.path, extra.path.name, extra.media_type))
    return replace(inventory, files=tuple(files))


def snapshot(path: Path) -> Path:
    """Return the model in a Hugging Face cache directory; any other path is returned unchanged.

    The directory is named ``models--ORG--NAME`` (huggingface_hub, "Understand caching").

    Raises:
        UsageError: It has several snapshots, and none of them is ``main``.
    """
    path = path.absolute() if path.name in ("", "..") else path
    snapshots = path / "snapshots"
    if not path.name.startswith("models--") or not snapshots.is_dir():
        return path
    main = path / "refs" / "main"
    if main.is_file():
        return snapshots / main.read_text("utf-8", "replace").strip()[:100].replace("/", "")
    found = sorted(one for one in snapshots.iterdir() if one.is_dir())
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"{path} contains {len(found)} snapshots, and refs/main is missing",
        hint=f"pass one of them: {found[0]}" if found else "download the model again",
    )
