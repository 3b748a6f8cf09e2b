"""Image models in other layouts than diffusers': ComfyUI's and original files, MLX, mflux.

Weights are renamed to diffusers' names; configs are those of the directory, or are derived from
the shapes. Missing components are those of another AImage, or the defaults of the family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.family.component_names import ComponentNames
from clowder_aimage.family.image_family import (
    SCHEDULER,
    TOKENIZER,
    ImageFamily,
    find_transformer_family,
)
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.diffusers import (
    MODEL_INDEX,
    build_file,
    list_tokenizer_files,
    read_request_defaults,
)
from clowder_aimage.formats.family_weights import FamilyWeights, list_tensors, read_family
from clowder_aimage.formats.inventory import Component, Inventory
from clowder_aimage.formats.model_tree import SourceFile
from clowder_aimage.formats.stored_weights import StoredLayer
from clowder_aimage.formats.tokenizer_size import count_tokens, list_token_names
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.tensor.weight import Weight, sort_weights, to_weight

FORMAT = "image-model"
# Components of an AImage: tensors without a counterpart in diffusers, and the headers of files.
EXTRA, SOURCE = "extra", "source"
_SCHEDULER_FILE = "scheduler_config.json"


@dataclass(frozen=True, slots=True)
class LikeModel:
    """An AImage that supplies missing components: its name, layers, and a reader of its files."""

    name: str
    family: str
    layers: tuple[StoredLayer, ...]
    read: Callable[[str], bytes]

    def list_layers(self, component: str) -> tuple[StoredLayer, ...]:
        """Return the layers of a component."""
        return tuple(stored for stored in self.layers if stored.layer.component == component)

    def collect_weights(self, component: str) -> dict[str, Weight]:
        """Return the weights of a component by name."""
        return {
            weight.name: weight
            for stored in self.list_layers(component)
            for weight in stored.weights
        }

    def has(self, name: str) -> bool:
        """Return True if it contains this file."""
        return any(stored.layer.name == name for stored in self.layers)

    def read_object(self, name: str) -> dict[str, Any]:
        """Return a JSON file; an empty object if there is none."""
        value = read_json(self.read(name), name) if self.has(name) else {}
        return value if isinstance(value, dict) else {}


def take(path: Path, like: LikeModel | None = None) -> Inventory:
    """Return the inventory of a file or directory.

    Raises:
        ModelError: A file cannot be read.
        FormatError: A file is damaged or incomplete, or files mix several models.
        UsageError: A component occurs twice, or is missing here and in ``like``; the shapes fit no
            config of the family.
    """
    components: dict[str, FamilyWeights] = {}
    for weights in read_family(path):
        if (earlier := components.setdefault(weights.component.name, weights)) is not weights:
            owners = (
                f"{weights.path} has"
                if earlier.path == weights.path
                else f"{earlier.path} and {weights.path} have"
            )
            raise UsageError(
                f"{owners} the {weights.component.name}s of two models",
                hint="keep only the files of one model in the directory",
            )
    return _FamilyModel(path, components, like).build_inventory()


class _FamilyModel:
    """The components at ``path``, and those of ``like`` for missing ones."""

    def __init__(
        self, path: Path, components: Mapping[str, FamilyWeights], like: LikeModel | None
    ) -> None:
        family = find_transformer_family(weights.component for weights in components.values())
        if family is None:
            raise UsageError(
                f"{path} has no transformer of a known image model", remedy="like_unknown"
            )
        if like is not None and like.family != family.name:
            raise UsageError(f"{like.name} is not a {family.title} model, and cannot complete it")
        if foreign := [
            weights for weights in components.values() if weights.component not in family.components
        ]:
            raise UsageError(
                f"{foreign[0].path} has the {foreign[0].component.name} of another family than "
                f"{family.title}",
                hint="keep only the files of one model in the directory",
            )
        self._path = path
        self._root = path if path.is_dir() else None
        self._components = components
        self._family = family
        self._like = like
        self._index = self._read_index()
        self._configs: dict[str, Mapping[str, Any]] = {}

    def build_inventory(self) -> Inventory:
        """Return everything except the bytes of weights."""
        self._check_complete()
        components = [self._build_component(names) for names in self._family.components]
        _check_agreement(self._path, self._family, self._configs)
        small = [self._build_scheduler(), self._build_tokenizer()]
        extras = [
            to_weight(replace(extra, name=f"{name}.{extra.name}"))
            for name, weights in self._components.items()
            for extra in weights.extras
        ]
        if extras:
            small.append(Component(EXTRA, "", "", sort_weights(extras), (), {}))
        index = SourceFile.from_bytes(MODEL_INDEX, _encode_json(self._index))
        # The same bytes share one blob with the other model.
        if self._like is not None and self._like.read_object(MODEL_INDEX) == self._index:
            index = SourceFile.from_bytes(MODEL_INDEX, self._like.read(MODEL_INDEX))
        return Inventory(
            family=self._family.name,
            pipeline=str(self._index["_class_name"]),
            components=tuple(sorted([*components, *small], key=lambda component: component.name)),
            files=(index, *self._build_headers()),
            read=tuple(self._list_layout_configs()),
            license=model_tree.read_license(self._root) if self._root else None,
            defaults=read_request_defaults(self._family.name, self._index),
        )

    def _read_index(self) -> Mapping[str, Any]:
        index = self._like.read_object(MODEL_INDEX) if self._like else {}
        default = self._family.index
        return index if index.get("_class_name") == default["_class_name"] else default

    def _resolve_class(self, name: str) -> tuple[str, str]:
        entry = self._index.get(name)
        # The index of the other model may lack the component.
        if not isinstance(entry, list) or len(entry) != 2:
            entry = self._family.index[name]
        return str(entry[0]), str(entry[1])

    def _check_complete(self) -> None:
        """Check that each component is here or in the other model. Raises UsageError."""
        names = [
            component.name
            for component in self._family.components
            if component.name not in self._components
        ]
        if self._root is None or not (self._root / TOKENIZER).is_dir():
            names.append(TOKENIZER)
        missing = [name for name in names if self._like is None or not self._like.list_layers(name)]
        if missing:
            lacks_tokenizer = self._root is not None and missing == [TOKENIZER]
            raise UsageError(
                f"{self._path} lacks {', '.join(missing)}",
                hint=f"another {self._family.title} model can complete it",
                remedy="like_tokenizer" if lacks_tokenizer else "like",
                path=str(self._path),
                family=self._family.title,
            )

    def _build_component(self, component: ComponentNames) -> Component:
        source = self._components.get(component.name)
        library, class_name = self._resolve_class(component.name)
        if source is None:
            assert self._like is not None  # noqa: S101
            layers = self._like.list_layers(component.name)
            weights = tuple(weight for stored in layers for weight in stored.weights)
            config = self._like.read_object(f"{component.name}/config.json")
            self._configs[component.name] = config
            return Component(
                component.name, library, class_name, weights, (), config, stored=layers
            )
        omitted = self._restore_omitted(source)
        weights = sort_weights(
            [*source.weights, *(w for stored in omitted for w in stored.weights)]
        )
        data = self._resolve_config(replace(source, weights=weights))
        name = f"{component.name}/config.json"
        config = read_json(data, name)
        self._configs[component.name] = config
        weights, omitted = (
            self._match_names(component, weights),
            (*omitted, *self._find_shared_files(source, weights)),
        )
        files = (SourceFile.from_bytes(name, data),)
        return Component(
            component.name, library, class_name, weights, files, config, stored=omitted
        )

    def _restore_omitted(self, source: FamilyWeights) -> tuple[StoredLayer, ...]:
        """Return the tensors that a converter omitted, from the other model. Raises UsageError."""
        name, shapes = source.component.name, source.shapes
        missing = [tensor for tensor in source.component.omitted if tensor not in shapes]
        if not missing or not shapes:
            return ()
        layers = self._like.list_layers(name) if self._like else ()
        restored = [
            stored for stored in layers if stored.layer.name.removeprefix(f"{name}/") in missing
        ]
        if len(restored) < len(missing):
            raise UsageError(
                f"{source.path} cannot be restored: the program that wrote it left out "
                f"{' and '.join(missing)}, which are parameters of the model",
                hint="the original model can complete it",
                remedy="like",
                path=str(self._path),
                family=self._family.title,
            )
        return tuple(restored)

    def _resolve_config(self, source: FamilyWeights) -> bytes:
        """Return the config.json of a component. Raises UsageError."""
        component, shapes = source.component, source.shapes
        derived = component.configure(shapes)
        data = self._find_config(component, derived)
        stated = {} if data is None else read_json(data, "config.json")
        derived |= {key: stated[key] for key in component.flags if key in stated}
        expected = component.shapes(derived)
        for name in component.optional:
            if name not in shapes:
                del expected[name]
        _check_shapes(source.path, self._family, expected, shapes)
        if data is not None:
            return data
        if (problem := component.check(derived)) is not None:
            raise UsageError(
                f"{source.path}: the shapes fit no config of {self._family.title}: {problem}",
                hint="a model of the same shapes can complete it",
                remedy="like",
                path=str(self._path),
                family=self._family.title,
            )
        return _encode_json(derived)

    def _find_config(self, component: ComponentNames, derived: Mapping[str, Any]) -> bytes | None:
        """Return the first existing config with the sizes of the derived one, or None."""
        for data in self._read_configs(component):
            config = read_json(data, "config.json")
            if isinstance(config, dict) and all(
                config.get(key) == derived[key] for key in component.sizes
            ):
                return data
        return None

    def _read_configs(self, component: ComponentNames) -> list[bytes]:
        """Return the existing configs, in the order of preference."""
        configs = []
        name = component.name
        for file_name in (f"{name}/config.json", f"{name}_config.json") if self._root else ():
            assert self._root is not None  # noqa: S101
            if (self._root / file_name).is_file():
                model_tree.read_object(self._root, self._root / file_name)
                configs.append((self._root / file_name).read_bytes())
        if self._like is not None and self._like.has(f"{name}/config.json"):
            configs.append(self._like.read(f"{name}/config.json"))
        return configs

    def _match_names(
        self, component: ComponentNames, weights: Sequence[Weight]
    ) -> tuple[Weight, ...]:
        """Return the weights without their base prefix, if the names of the other model lack it."""
        like_weights = self._like.collect_weights(component.name) if self._like else {}
        if not component.base or any(name.startswith(component.base) for name in like_weights):
            return tuple(weights)
        if not like_weights:
            return tuple(weights)
        return sort_weights(replace(w, name=w.name.removeprefix(component.base)) for w in weights)

    def _find_shared_files(
        self, source: FamilyWeights, weights: Sequence[Weight]
    ) -> tuple[StoredLayer, ...]:
        """Return the other model's files and headers, if its tensors have the same outline."""
        if self._like is None:
            return ()
        name = source.component.name
        like_weights = self._like.collect_weights(name).values()
        if _build_outline(like_weights, source.component) != _build_outline(
            weights, source.component
        ):
            return ()
        return tuple(
            stored
            for stored in self._like.list_layers(name)
            if not stored.layer.is_tensor and stored.layer.name != f"{name}/config.json"
        )

    def _build_scheduler(self) -> Component:
        name = f"{SCHEDULER}/{_SCHEDULER_FILE}"
        library, class_name = self._resolve_class(SCHEDULER)
        if self._root is not None and (self._root / name).is_file():
            file = build_file(self._root, self._root / name)
        elif self._like is not None and self._like.has(name):
            stored = self._like.list_layers(SCHEDULER)
            return Component(SCHEDULER, library, class_name, (), (), {}, stored=stored)
        else:
            file = SourceFile.from_bytes(name, _encode_json(self._family.scheduler))
        return Component(SCHEDULER, library, class_name, (), (file,), {})

    def _build_tokenizer(self) -> Component:
        library, class_name = self._resolve_class(TOKENIZER)
        rows = _get_number(self._configs["text_encoder"], "vocab_size")
        if self._root is not None and (self._root / TOKENIZER).is_dir():
            files = list_tokenizer_files(self._root)
            data = {file.path.name: file.path.read_bytes() for file in files}
            layers: tuple[StoredLayer, ...] = ()
        else:
            assert self._like is not None  # noqa: S101
            files, layers = (), self._like.list_layers(TOKENIZER)
            names = [stored.layer.name for stored in layers]
            data = {name.rpartition("/")[2]: self._like.read(name) for name in names}
        if (count := count_tokens(data)) > rows:
            raise FormatError(
                f"the tokenizer has {count} tokens, and the text encoder {rows}: they belong to "
                "different models"
            )
        if not list_token_names(data).issuperset(self._family.tokens):
            raise FormatError(
                f"the tokenizer is that of another family: {self._family.title} requires "
                f"the tokens {', '.join(self._family.tokens)}"
            )
        return Component(TOKENIZER, library, class_name, (), files, {}, stored=layers)

    def _list_layout_configs(self) -> Iterator[Path]:
        """Yield the configs of other layouts, which an export to them writes again."""
        root = self._root
        if root is None:
            return
        for layout, pattern in self._family.configs.items():
            names = [pattern.format(component.name) for component in self._family.components]
            for name in (*names, *(["config.json"] if layout == "mlx" else [])):
                if (root / name).is_file():
                    yield root / name

    def _build_headers(self) -> list[SourceFile]:
        """Return the headers of the files, for a byte-exact export."""
        headers: dict[Path, SourceFile] = {}
        for weights in self._components.values():
            for source in weights.sources:
                if source.is_exact:
                    headers[source.path] = self._build_header(source.path)
        for directory in {path.parent for path in headers}:
            for path in directory.glob("*.safetensors.index.json"):
                headers[path] = self._build_header(path)
        return list(headers.values())

    def _build_header(self, path: Path) -> SourceFile:
        relative = path.relative_to(self._root).as_posix() if self._root else path.name
        file = model_tree.build_source_file(self._root, path, f"{SOURCE}/{relative}")
        size = file.size
        # A safetensors header is 8 bytes of its length (little-endian), then JSON.
        if path.suffix != ".json":
            with path.open("rb") as opened:
                size = 8 + int.from_bytes(opened.read(8), "little")
        return replace(file, size=size, media_type=mediatype.AIMAGE_HEADER)


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _build_outline(
    weights: Any, component: ComponentNames
) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(component.add_base(weight.name), weight.dtype, weight.shape) for weight in weights}


def _check_shapes(
    path: Path,
    family: ImageFamily,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Compare the tensors of a component with those that its derived config requires."""
    if missing := [name for name in expected if name not in shapes]:
        raise FormatError(f"{path} lacks {list_tensors(missing)}", hint=model_tree.AGAIN)
    if unexpected := [name for name in shapes if name not in expected]:
        raise FormatError(
            f"{path} has {list_tensors(unexpected)} that {family.title} does not have"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise FormatError(
                f"{path}: the shapes fit no config of {family.title}: {name} is {list(shape)}, "
                f"and the other tensors require {list(expected[name])}"
            )


def _check_agreement(
    path: Path, family: ImageFamily, configs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compare the sizes that components share, such as text channels. Raises FormatError."""
    for (component, key), (other_component, other_key), factor in family.agreements:
        size, other_size = (
            _get_number(configs[component], key),
            _get_number(configs[other_component], other_key),
        )
        if size != factor * other_size:
            raise FormatError(
                f"{path}: the {component} and the {other_component} belong to different models: "
                f"{key} is {size}, {other_key} is {other_size}"
            )


def _get_number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0
