"""The index of names: models that are fetched by a short name, and the choice of a variant.

Three lists make it: the user's ``names.yaml``, the list of this package, and ``names`` of the
configuration, which names AImages of a registry. The first replaces entries of the second; the
third only adds names, so that no registry changes what a name of the package means.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clowder_aimage.config.user_directory import (
    find_config_file,
    read_user_configuration,
    resolve_names_file,
)
from clowder_aimage.content.unit import parse_size
from clowder_aimage.document.optional_file import warn
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.document.yaml import Lines, format_position, read_yaml
from clowder_aimage.document.yaml import Path as YamlPath
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.oci.reference import DEFAULT_TAG

IMAGE, TEXT = "image", "text"
_PACKAGED = Path(__file__).with_name("names.yaml")
_MAX_SIZE = 1024 * 1024
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of a model; sizes are in bytes, and None if they are unknown.

    It is the AImage ``reference`` of a registry, else it is packed from the model of the hub.
    """

    name: str
    reference: Reference | None = None
    dtype: str | None = None
    quantize: str | None = None
    download: int | None = None
    size: int | None = None
    memory: int | None = None

    @property
    def needed_memory(self) -> int | None:
        """Return the stated memory, else the size of the weights."""
        unchanged = self.download if self.reference is None and self.quantize is None else None
        return self.memory or self.size or unchanged


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An entry of the index; ``origin`` is the file that it is from, empty for the package."""

    name: str
    variants: tuple[Variant, ...]
    kind: str = IMAGE
    description: str = ""
    hub: str = ""
    revision: str = "main"
    license: str = ""
    origin: str = ""

    def select(self, tag: str | None) -> NamedModel:
        """Return the model with the variants that a tag means: all for ``latest``.

        Raises NotFoundError: it is not the name of a variant.
        """
        if tag in (None, DEFAULT_TAG):
            return self
        chosen = tuple(variant for variant in self.variants if variant.name == tag)
        if not chosen:
            names = ", ".join(variant.name for variant in self.variants)
            raise NotFoundError(
                f"{self.name} has no variant {tag}",
                hint=f"choose one: {names}; without a tag the one that fits is chosen",
            )
        return replace(self, variants=chosen)


@dataclass(frozen=True, slots=True)
class Choice:
    """A variant, and if it fits into the memory; None if that is unknown."""

    variant: Variant
    fits: bool | None


@dataclass(frozen=True, slots=True)
class NameIndex:
    """The models by name; ``clashes`` are names of the configuration that are not used."""

    models: Mapping[str, NamedModel]
    clashes: Mapping[str, str] = field(default_factory=dict)

    def find(self, reference: Reference) -> NamedModel | None:
        """Return the model of a name without a registry and a digest, or None."""
        if reference.registry is not None or reference.digest is not None:
            return None
        return self.models.get(reference.repository)

    def find_nearest(self, name: str) -> str | None:
        """Return the name of the index that resembles another, or None."""
        return find_nearest(name, self.models)


def choose(variants: tuple[Variant, ...], memory: int | None) -> Choice:
    """Return the first variant that fits into ``memory`` bytes.

    If none is known to fit, it is the first whose memory is unknown, else the smallest.
    """
    states = [_compute_fit(variant, memory) for variant in variants]
    for state in (True, None):
        if state in states:
            return Choice(variants[states.index(state)], state)
    return Choice(min(variants, key=lambda variant: variant.needed_memory or 0), fits=False)


def _compute_fit(variant: Variant, memory: int | None) -> bool | None:
    needed = variant.needed_memory
    return None if needed is None or memory is None else needed <= memory


def read_index() -> NameIndex:
    """Return the index of this user. Raises UsageError with the file and the line of a fault."""
    path = resolve_names_file()
    users = {} if path is None else _read_users(path)
    models = _read_packaged() | users
    listed = read_user_configuration(lambda document: dict(document.get("names", {})))
    origin = str(find_config_file())
    added = {
        name: _build_listed(name, text, origin)
        for name, text in listed.items()
        if name not in models
    }
    clashes = {name: origin for name in listed if name in models}
    return NameIndex(models | added, clashes)


def _read_packaged() -> dict[str, NamedModel]:
    return _parse(_PACKAGED.read_text("utf-8"), "names.yaml", "", is_checked=False)


def _read_users(path: Path) -> dict[str, NamedModel]:
    try:
        # A FIFO would be waited for.
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot use {path}: it is not a regular file")
        raw = path.read_bytes()
        if len(raw) > _MAX_SIZE:
            raise UsageError(f"cannot use {path}: it is larger than 1 MiB")
        return _parse(recode_file(raw).decode("utf-8"), str(path), str(path))
    except PermissionError as error:
        # The home may be that of another user.
        warn(f"{path} is ignored: {error.strerror}")
        return {}
    except OSError as error:
        if error.errno in _ABSENT:
            return {}
        raise UsageError(f"cannot use {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot use {path}: {error}") from None


def _parse(text: str, file: str, origin: str, *, is_checked: bool = True) -> dict[str, NamedModel]:
    try:
        document, lines = read_yaml(text, file)
        if document is None:
            return {}
        if is_checked:
            _check(document, lines, file)
        models: dict[str, Any] = document["models"]
        return {
            name: _build_model(name, entry, origin, lines, file) for name, entry in models.items()
        }
    except FormatError as error:
        raise UsageError(
            f"cannot use {error.message}", remedy="validate_names", file=file
        ) from None


def _check(document: object, lines: Lines, file: str) -> None:
    """Raise FormatError for the first violation of the schema."""
    from clowder_aimage.document.schema import iter_violations

    faults = iter_violations("names", document)
    violations = [
        # A misspelt key explains that another is missing.
        (_find_line(path, lines), not message.startswith("unknown key"), message)
        for path, message in ((fault.path, fault.message) for fault in faults)
    ]
    if violations:
        line, _, message = min(violations)
        raise FormatError(f"{format_position(file, line)}: {message}")


def _find_line(path: YamlPath, lines: Lines) -> int:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def _build_model(
    name: str, entry: dict[str, Any], origin: str, lines: Lines, file: str
) -> NamedModel:
    variants = list[Variant]()
    for index, value in enumerate(entry["variants"]):
        position = format_position(file, lines.get(("models", name, "variants", index), 0))
        try:
            variant = _build_variant(value)
        except UsageError as error:
            raise FormatError(f"{position}: {error.message}") from None
        if any(other.name == variant.name for other in variants):
            raise FormatError(f"{position}: {name} has two variants {variant.name}")
        if variant.reference is None and "hub" not in entry:
            raise FormatError(
                f"{position}: the variant {variant.name} has no reference, and {name} no hub"
            )
        variants.append(variant)
    texts = ("kind", "description", "hub", "revision", "license")
    facts = {key: entry[key] for key in texts if key in entry}
    return NamedModel(name, tuple(variants), origin=origin, **facts)


def _build_variant(value: dict[str, Any]) -> Variant:
    from clowder_aimage.importer.recipe import Recipe

    Recipe.parse(value.get("dtype"), value.get("quantize"))
    sizes = {
        key: size if isinstance(size := value[key], int) else parse_size(size)
        for key in ("download", "size", "memory")
        if key in value
    }
    text = value.get("reference")
    reference = None if text is None else Reference.parse(text)
    return Variant(value["name"], reference, value.get("dtype"), value.get("quantize"), **sizes)


def _build_listed(name: str, text: str, origin: str) -> NamedModel:
    try:
        variant = Variant(DEFAULT_TAG, Reference.parse(text))
    except UsageError as error:
        raise UsageError(
            f"cannot use the configuration {origin}: names/{name}: {error.message}"
        ) from None
    return NamedModel(name, (variant,), kind="", origin=origin)
