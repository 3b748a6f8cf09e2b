"""Image models in other layouts than diffusers': ComfyUI's and original files, MLX, mflux.

Weights are renamed to diffusers' names, configs are those of the directory or follow from the
shapes. What such files lack comes from another AImage, or is the family's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.family.component_names import ComponentNames
from clowder_aimage.family.image_family import SCHEDULER, TOKENIZER, ImageFamily, family_of
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.diffusers import (
    MODEL_INDEX,
    file_of,
    request_defaults,
    tokenizer_files,
)
from clowder_aimage.formats.family_weights import FamilyWeights, counted, read_family
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.formats.stored_weights import StoredLayer
from clowder_aimage.formats.tokenizer_size import token_count, token_names
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.tensor.weight import Weight, by_name, plain

FORMAT = "image-model"
EXTRA, SOURCE = "extra", "source"  # parts of an AImage: tensors without meaning, headers of files
_SCHEDULER_FILE = "scheduler_config.json"


@dataclass(frozen=True, slots=True)
class LikeModel:
    """An AImage that completes others: its name, layers, and a reader of its small files."""

    name: str
    family: str
    layers: tuple[StoredLayer, ...]
    read: Callable[[str], bytes]

    def part(self, component: str) -> tuple[StoredLayer, ...]:
        """Return the layers of a component."""
        return tuple(one for one in self.layers if one.layer.component == component)

    def weights(self, component: str) -> dict[str, Weight]:
        """Return the weights of a component by name."""
        return {weight.name: weight for one in self.part(component) for weight in one.weights}

    def has(self, name: str) -> bool:
        """Return whether it has this file."""
        return any(one.layer.name == name for one in self.layers)

    def object(self, name: str) -> dict[str, Any]:
        """Return a JSON file; an empty object if there is none."""
        value = read_json(self.read(name), name) if self.has(name) else {}
        return value if isinstance(value, dict) else {}


def take(path: Path, like: LikeModel | None = None) -> Inventory:
    """Return the inventory of a file or directory.

    Raises:
        ModelError: A file cannot be read.
        FormatError: A file is damaged or incomplete, or files mix several models.
        UsageError: A component is there twice, or is missing and ``like`` has none; the shapes fit
            no config of the family.
    """
    found: dict[str, FamilyWeights] = {}
    for one in read_family(path):
        if (other := found.setdefault(one.component.name, one)) is not one:
            where = (
                f"{one.path} has" if other.path == one.path else f"{other.path} and {one.path} have"
            )
            raise UsageError(
                f"{where} the {one.component.name}s of two models",
                hint="keep only the files of one model in the directory",
            )
    return _FamilyModel(path, found, like).inventory()


class _FamilyModel:
    """The components at ``path``, completed by ``like``."""

    def __init__(
        self, path: Path, found: Mapping[str, FamilyWeights], like: LikeModel | None
    ) -> None:
        family = family_of(one.component for one in found.values())
        if family is None:
            raise UsageError(
                f"{path} has no transformer of a known image model", remedy="like_unknown"
            )
        if like is not None and like.family != family.name:
            raise UsageError(f"{like.name} is not a {family.title} model, and cannot complete it")
        if other := [one for one in found.values() if one.component not in family.components]:
            raise UsageError(
                f"{other[0].path} has the {other[0].component.name} of another family than "
                f"{family.title}",
                hint="keep only the files of one model in the directory",
            )
        self._path = path
        self._root = path if path.is_dir() else None
        self._found = found
        self._family = family
        self._like = like
        self._index = self._read_index()
        self._configs: dict[str, Mapping[str, Any]] = {}

    def inventory(self) -> Inventory:
        """Return everything except the bytes of weights."""
        self._check_complete()
        components = [self._weighted(one) for one in self._family.components]
        _check_agreement(self._path, self._family, self._configs)
        small = [self._scheduler(), self._tokenizer()]
        extras = [
            plain(replace(extra, name=f"{name}.{extra.name}"))
            for name, one in self._found.items()
            for extra in one.extras
        ]
        if extras:
            small.append(Component(EXTRA, "", "", by_name(extras), (), {}))
        index = SourceFile.made(MODEL_INDEX, _text(self._index))
        if self._like is not None and self._like.object(MODEL_INDEX) == self._index:
            index = SourceFile.made(MODEL_INDEX, self._like.read(MODEL_INDEX))
        return Inventory(
            family=self._family.name,
            pipeline=str(self._index["_class_name"]),
            components=tuple(sorted([*components, *small], key=lambda one: one.name)),
            files=(index, *self._headers()),
            license=model_tree.read_license(self._root) if self._root else None,
            defaults=request_defaults(self._family.name, self._index),
        )

    def _read_index(self) -> Mapping[str, Any]:
        index = self._like.object(MODEL_INDEX) if self._like else {}
        own = self._family.index
        return index if index.get("_class_name") == own["_class_name"] else own

    def _class(self, name: str) -> tuple[str, str]:
        entry = self._index.get(name)
        if not isinstance(entry, list) or len(entry) != 2:  # the other model has no such component
            entry = self._family.index[name]
        return str(entry[0]), str(entry[1])

    def _check_complete(self) -> None:
        """Check that each component is somewhere. Raises UsageError."""
        names = [one.name for one in self._family.components if one.name not in self._found]
        if self._root is None or not (self._root / TOKENIZER).is_dir():
            names.append(TOKENIZER)
        missing = [name for name in names if self._like is None or not self._like.part(name)]
        if missing:
            tokenizer = self._root is not None and missing == [TOKENIZER]
            raise UsageError(
                f"{self._path} lacks {', '.join(missing)}",
                hint=f"another {self._family.title} model can complete it",
                remedy="like_tokenizer" if tokenizer else "like",
                path=str(self._path),
                family=self._family.title,
            )

    def _weighted(self, component: ComponentNames) -> Component:
        found = self._found.get(component.name)
        library, class_name = self._class(component.name)
        if found is None:
            assert self._like is not None  # noqa: S101
            stored = self._like.part(component.name)
            weights = tuple(weight for one in stored for weight in one.weights)
            config = self._like.object(f"{component.name}/config.json")
            self._configs[component.name] = config
            return Component(
                component.name, library, class_name, weights, (), config, stored=stored
            )
        spared = self._spared(found)
        weights = by_name([*found.weights, *(w for one in spared for w in one.weights)])
        data = self._config(replace(found, weights=weights))
        name = f"{component.name}/config.json"
        config = read_json(data, name)
        self._configs[component.name] = config
        weights, spared = self._named(component, weights), (*spared, *self._known(found, weights))
        files = (SourceFile.made(name, data),)
        return Component(component.name, library, class_name, weights, files, config, stored=spared)

    def _spared(self, found: FamilyWeights) -> tuple[StoredLayer, ...]:
        """Return tensors that the converter left out, from the other model. Raises UsageError."""
        name, shapes = found.component.name, found.shapes
        missing = [one for one in found.component.spared if one not in shapes]
        if not missing or not shapes:
            return ()
        stored = self._like.part(name) if self._like else ()
        there = [one for one in stored if one.layer.name.removeprefix(f"{name}/") in missing]
        if len(there) < len(missing):
            raise UsageError(
                f"{found.path} cannot be restored: the program that wrote it left out "
                f"{' and '.join(missing)}, which are parameters of the model",
                hint="the original model can complete it",
                remedy="like",
                path=str(self._path),
                family=self._family.title,
            )
        return tuple(there)

    def _config(self, found: FamilyWeights) -> bytes:
        """Return the config.json of a component. Raises UsageError."""
        component, shapes = found.component, found.shapes
        derived = component.configure(shapes)
        data = self._fitting(component, derived)
        stated = {} if data is None else read_json(data, "config.json")
        derived |= {key: stated[key] for key in component.flags if key in stated}
        expected = component.shapes(derived)
        for name in component.optional:
            if name not in shapes:
                del expected[name]
        _check_shapes(found.path, self._family, expected, shapes)
        if data is not None:
            return data
        if (why := component.check(derived)) is not None:
            raise UsageError(
                f"{found.path}: the shapes fit no config of {self._family.title}: {why}",
                hint="a model of the same shapes can complete it",
                remedy="like",
                path=str(self._path),
                family=self._family.title,
            )
        return _text(derived)

    def _fitting(self, component: ComponentNames, derived: Mapping[str, Any]) -> bytes | None:
        """Return the first config that is there and has the sizes of a derived one, or None."""
        for data in self._candidates(component):
            config = read_json(data, "config.json")
            if isinstance(config, dict) and all(
                config.get(key) == derived[key] for key in component.sizes
            ):
                return data
        return None

    def _candidates(self, component: ComponentNames) -> list[bytes]:
        """Return configs that are there, of which the first that fits is used."""
        found = []
        name = component.name
        for own in (f"{name}/config.json", f"{name}_config.json") if self._root else ():
            assert self._root is not None  # noqa: S101
            if (self._root / own).is_file():
                model_tree.read_object(self._root, self._root / own)
                found.append((self._root / own).read_bytes())
        if self._like is not None and self._like.has(f"{name}/config.json"):
            found.append(self._like.read(f"{name}/config.json"))
        return found

    def _named(self, component: ComponentNames, weights: Sequence[Weight]) -> tuple[Weight, ...]:
        """Return weights under the names of the other model, if it leaves out their base."""
        theirs = self._like.weights(component.name) if self._like else {}
        if not component.base or any(name.startswith(component.base) for name in theirs):
            return tuple(weights)
        if not theirs:
            return tuple(weights)
        return by_name(replace(w, name=w.name.removeprefix(component.base)) for w in weights)

    def _known(self, found: FamilyWeights, weights: Sequence[Weight]) -> tuple[StoredLayer, ...]:
        """Return the other model's files, with headers, if its tensors are the same."""
        if self._like is None:
            return ()
        name = found.component.name
        theirs = self._like.weights(name).values()
        if _outline(theirs, found.component) != _outline(weights, found.component):
            return ()
        return tuple(
            one
            for one in self._like.part(name)
            if not one.layer.is_tensor and one.layer.name != f"{name}/config.json"
        )

    def _scheduler(self) -> Component:
        name = f"{SCHEDULER}/{_SCHEDULER_FILE}"
        library, class_name = self._class(SCHEDULER)
        if self._root is not None and (self._root / name).is_file():
            file = file_of(self._root, self._root / name)
        elif self._like is not None and self._like.has(name):
            stored = self._like.part(SCHEDULER)
            return Component(SCHEDULER, library, class_name, (), (), {}, stored=stored)
        else:
            file = SourceFile.made(name, _text(self._family.scheduler))
        return Component(SCHEDULER, library, class_name, (), (file,), {})

    def _tokenizer(self) -> Component:
        library, class_name = self._class(TOKENIZER)
        rows = _number(self._configs["text_encoder"], "vocab_size")
        if self._root is not None and (self._root / TOKENIZER).is_dir():
            files = tokenizer_files(self._root)
            data = {file.path.name: file.path.read_bytes() for file in files}
            stored: tuple[StoredLayer, ...] = ()
        else:
            assert self._like is not None  # noqa: S101
            files, stored = (), self._like.part(TOKENIZER)
            names = [one.layer.name for one in stored]
            data = {name.rpartition("/")[2]: self._like.read(name) for name in names}
        if (count := token_count(data)) > rows:
            raise FormatError(
                f"the tokenizer has {count} tokens, and the text encoder {rows}: they belong to "
                "different models"
            )
        if not token_names(data).issuperset(self._family.tokens):
            raise FormatError(
                f"the tokenizer is that of another family: {self._family.title} requires "
                f"the tokens {', '.join(self._family.tokens)}"
            )
        return Component(TOKENIZER, library, class_name, (), files, {}, stored=stored)

    def _headers(self) -> list[SourceFile]:
        """Return the headers of the files, with which they can be written again."""
        made: dict[Path, SourceFile] = {}
        for one in self._found.values():
            for source in one.sources:
                if source.is_exact:
                    made[source.path] = self._header(source.path)
        for directory in {path.parent for path in made}:
            for path in directory.glob("*.safetensors.index.json"):
                made[path] = self._header(path)
        return list(made.values())

    def _header(self, path: Path) -> SourceFile:
        own = path.relative_to(self._root).as_posix() if self._root else path.name
        file = model_tree.source_file(self._root, path, f"{SOURCE}/{own}")
        size = file.size
        if path.suffix != ".json":
            with path.open("rb") as opened:
                size = 8 + int.from_bytes(opened.read(8), "little")
        return replace(file, size=size, media_type=mediatype.AIMAGE_HEADER)


def _text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _outline(weights: Any, component: ComponentNames) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(component.full(weight.name), weight.dtype, weight.shape) for weight in weights}


def _check_shapes(
    path: Path,
    family: ImageFamily,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Compare the tensors of a component with those of the config that follows from them."""
    if missing := [name for name in expected if name not in shapes]:
        raise FormatError(f"{path} lacks {counted(missing)}", hint=model_tree.AGAIN)
    if others := [name for name in shapes if name not in expected]:
        raise FormatError(f"{path} has {counted(others)} that {family.title} does not have")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise FormatError(
                f"{path}: the shapes fit no config of {family.title}: {name} is {list(shape)}, "
                f"and the other tensors require {list(expected[name])}"
            )


def _check_agreement(
    path: Path, family: ImageFamily, configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Check that components work together. Raises UsageError."""
    for (one, key), (other, theirs), factor in family.agreements:
        mine, their = _number(configs[one], key), _number(configs[other], theirs)
        if mine != factor * their:
            raise FormatError(
                f"{path}: the {one} and the {other} belong to different models: {key} is {mine}, "
                f"{theirs} is {their}"
            )


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0
