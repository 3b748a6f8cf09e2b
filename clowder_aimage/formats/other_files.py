"""Files of a model directory beside those that its format names.

They are packed, left out with a reason, or refused if they are another model: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats import left_out, model_tree
from clowder_aimage.formats.file_content import PICKLE, identify
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.formats.license_text import find_license

# Directories that are one model: their endings, or a file in them.
_BUNDLES = {".mlpackage": "Core ML", ".mlmodelc": "Core ML"}
_GRAPHS = ("saved_model.pb", "saved_model.pbtxt")
# Models in a message.
_SHOWN = 5
_CONVERT = "convert the weights to safetensors, or remove the file"


@dataclass(slots=True)
class _Tree:
    """The files below a directory, by their names, and the files that are never packed."""

    files: dict[str, Path] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def complete(root: Path, inventory: Inventory, kind: str, reason: str = "") -> Inventory:
    """Return the inventory of a directory with its other files.

    ``reason`` is the reason to leave out other models, which are refused without one.

    Raises:
        UsageError: There are models of other formats.
        ModelError: There is a pickled file; a file cannot be read or leaves the directory, or there
            are too many.
    """
    tree = _list_tree(root)
    kept, omitted = left_out.divide(tree.files, _list_packed(root, inventory))
    exports = [name for name in kept if kind == "transformers" and left_out.is_export(name)]
    omitted += [LeftOut(name, left_out.COPY) for name in exports]
    kept = [name for name in kept if name not in exports]
    pictures = left_out.list_extra_pictures({n: tree.files[n].stat().st_size for n in kept})
    kept = [name for name in kept if name not in {picture.path for picture in pictures}]
    omitted += pictures
    models = dict(_find_models(tree.files, kept))
    if models and not reason:
        raise _build_error(root, kind, models)
    files = []
    for name in kept:
        if name in models or name.startswith(tuple(path for path in models if path[-1] == "/")):
            continue
        try:
            check_name(name)
        except FormatError:
            omitted.append(LeftOut(name, left_out.NAME))
            continue
        files.append(model_tree.build_source_file(root, tree.files[name], name))
    omitted += [*tree.left_out, *(LeftOut(path, reason) for path in models)]
    return replace(
        inventory,
        files=(*inventory.files, *files),
        left_out=tuple(sorted({*inventory.left_out, *omitted})),
        license=inventory.license or find_license(tree.files),
    )


def complete_whole(root: Path, inventory: Inventory) -> Inventory:
    """Return the inventory of whole files with all other files of the directory, of any kind.

    Raises ModelError: A file cannot be read or leaves the directory, or there are too many.
    """
    tree = _list_tree(root)
    names = _list_packed(root, inventory)
    files = [
        model_tree.build_source_file(root, path, name)
        for name, path in tree.files.items()
        if name not in names
    ]
    everything = (*inventory.files, *files)
    is_pickled = any(identify(file.path).is_pickled for file in everything if file.data is None)
    return replace(
        inventory,
        files=tuple(sorted(everything, key=lambda file: file.name)),
        left_out=tuple(sorted({*inventory.left_out, *tree.left_out})),
        license=inventory.license or find_license(tree.files),
        facts={**inventory.facts, **({"pickled": True} if is_pickled else {})},
    )


def find_models(root: Path) -> dict[str, str]:
    """Return the models in a directory, except adapters: their formats by their paths.

    Copies and the state of a training count only if there is nothing else. Raises as ``complete``.
    """
    files = _list_tree(root).files
    names = [name for name in files if not name.startswith(f"{model_tree.ADAPTERS}/")]
    kept, _ = left_out.divide(names, ())
    return dict(_find_models(files, kept)) or dict(_find_models(files, names))


def format_models(models: Mapping[str, str]) -> str:
    """Return the formats and the first paths of models, for a message."""
    names = [f"{kind} ({path:.200})" for path, kind in sorted(models.items())]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _list_tree(root: Path) -> _Tree:
    """List the files below a directory.

    Raises ModelError: As ``model_tree.walk``, but a link to a directory is left out.
    """
    tree, boundary = _Tree(), model_tree.find_boundary(root)
    directories = [root]
    while directories:
        for path in sorted(directories.pop().iterdir()):
            name = path.relative_to(root).as_posix()
            if path.name.startswith("."):
                entry = f"{name}/" if path.is_dir() else name
                tree.left_out.append(LeftOut(entry, left_out.HIDDEN))
                continue
            model_tree.check_inside(boundary, path)
            if not path.is_dir():
                model_tree.check_file(path)
                # An export writes a card with only the licence; it is not a file of the model.
                if name != model_tree.CARD or not model_tree.is_bare(path):
                    tree.files[name] = path
            elif path.is_symlink():
                tree.left_out.append(LeftOut(f"{name}/", left_out.LINK))
            elif model_tree.is_store(path):
                tree.left_out.append(LeftOut(f"{name}/", left_out.STORE))
            else:
                directories.append(path)
        model_tree.check_count(root, len(tree.files) + len(directories))
    return tree


def _list_packed(root: Path, inventory: Inventory) -> set[str]:
    """Return the names of the files that an inventory is made of."""
    files = [*inventory.files, *(file for part in inventory.components for file in part.files)]
    paths = {
        chunk.tensor.path
        for part in inventory.components
        for weight in part.weights
        for chunk in weight.parts
    }
    paths |= {file.path for file in files if file.data is None} | set(inventory.read)
    inside = {path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root)}
    return inside | {file.name for file in files}


def _find_models(files: Mapping[str, Path], kept: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the models among the files that are not packed yet: their paths and formats."""
    bundles = {}
    for name in files:
        parent, _, base = name.rpartition("/")
        if base in _GRAPHS and parent:
            bundles[f"{parent}/"] = "SavedModel"
        for directory in _list_directories(name):
            ending = Path(directory).suffix
            if ending in _BUNDLES:
                bundles[f"{directory}/"] = _BUNDLES[ending]
    for name in kept:
        bundle = next((path for path in bundles if name.startswith(path)), "")
        if bundle:
            yield bundle, bundles[bundle]
        elif kind := identify(files[name]).kind:
            yield name, kind


def _list_directories(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _build_error(root: Path, kind: str, models: Mapping[str, str]) -> UsageError | ModelError:
    if set(models.values()) == {PICKLE}:
        return ModelError(
            model_tree.describe_pickle(root / min(models)),
            hint=_CONVERT,
            remedy="pickle_beside_model",
            other=_CONVERT,
            format=kind,
        )
    return UsageError(
        f"{root} matches several formats: {kind}, {format_models(models)}",
        remedy="choose_format",
        format=kind,
    )
