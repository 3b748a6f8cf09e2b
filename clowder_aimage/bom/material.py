"""The facts of a bill of materials, as an AImage states them, in no form yet."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.store import Source
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect import AImage, Layer, detect
from clowder_aimage.dialect.license import list_stated_licenses
from clowder_aimage.document.license_expression import Compound, Expression, parse_expression
from clowder_aimage.errors import FormatError
from clowder_aimage.layout.stored_aimage import MAX_CONFIG_SIZE, read_manifest
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.model.text.text_facts import is_embedder
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.trust.lineage import read_derivation

# Tasks, as model cards name them (Hugging Face hub, "Tasks")
_PICTURES, _TEXT, _EMBEDDING = "text-to-image", "text-generation", "feature-extraction"
# ORG/NAME or ORG/NAME@REVISION, of the Hugging Face hub
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?", re.ASCII)
# Properties of the config that are stated as they are
_STATED = ("parameters", "size", "dtype", "quantization", "context", "format", "formatVersion")


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The digest of a manifest or file that a model was made from, or the name of that.

    ``operation`` says how it was used, if that is stated.
    """

    name: str
    digest: Digest | None = None
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """A part of a model with its layers; of the files beside the parts, the name is empty."""

    name: str
    class_name: str
    layers: tuple[Layer, ...]

    @property
    def is_network(self) -> bool:
        """True if it has weights: others are files, such as those of a tokenizer."""
        return any(layer.is_tensor or layer.is_shard for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Material:
    """The facts of one AImage.

    ``licenses`` are as they are stated, ``expression`` is all of them together, None if one is no
    expression. ``base`` is the model that an adapter needs. ``properties`` are further facts.
    """

    digest: Digest
    name: str
    description: str
    licenses: tuple[str, ...]
    expression: Expression | None
    task: str
    family: str
    architecture: str
    source_url: str
    created: str
    base: Digest | None
    ancestors: tuple[Ancestor, ...]
    components: tuple[Component, ...]
    properties: tuple[tuple[str, str], ...]


def read_material(source: Source, subject: Descriptor) -> Material:
    """Return the facts of an AImage in a store or a registry; no layer is read.

    Its ancestors are those that a statement about it, its subject and its config have: claims,
    which computing it again proves. Raises AccessError, ContentError.
    """
    manifest = read_manifest(source, subject)
    config = read_all(source.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)
    aimage = detect(manifest).read(manifest, config)
    properties, licenses = aimage.properties, list_stated_licenses(manifest, config)
    adapter = properties.get("adapter")
    is_adapter = properties.get("format") == "lora" or isinstance(adapter, dict)
    base = None if aimage.subject is None else aimage.subject.digest
    known = [*_list_stated(source, subject), *_list_fused(properties)]
    if base is not None and not is_adapter:
        known.append(Ancestor("", base, "variant"))
    known += [Ancestor(_read(properties, "base"))] if _read(properties, "base") else []
    return Material(
        subject.digest,
        _find_name(properties),
        _read(properties, "description"),
        licenses,
        _join(licenses),
        _find_task(aimage),
        _read(properties, "family"),
        _read(properties, "pipeline") or _read(properties, "architecture"),
        _build_url(_read(properties, "source")),
        _read(properties, "created"),
        base if is_adapter else None,
        _merge(known),
        _list_components(aimage),
        tuple((key, str(properties[key])) for key in _STATED if key in properties),
    )


def encode_bill(value: object) -> bytes:
    """Return a document with a line for each fact: the same bytes on every machine."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "replace")


def _read(properties: Any, key: str) -> str:
    value = properties.get(key)
    return value if isinstance(value, str) else ""


def _join(licenses: Sequence[str]) -> Expression | None:
    try:
        parts = tuple(dict.fromkeys(map(parse_expression, licenses)))
    except FormatError:
        return None
    return Compound("AND", parts) if len(parts) > 1 else next(iter(parts), None)


def _find_name(properties: Any) -> str:
    """Return a name that does not depend on the reference: the same AImage has the same bill."""
    origin = _read(properties, "source").rstrip("/").rpartition("/")[2].partition("@")[0]
    names = (_read(properties, key) for key in ("architecture", "family", "format"))
    return _read(properties, "name") or origin or next(filter(None, names), "model")


def _find_task(aimage: AImage) -> str:
    if find_runtime(aimage) is not None:
        return _EMBEDDING if is_embedder(aimage) else _TEXT
    is_picture = any(_read(aimage.properties, key) for key in ("family", "pipeline"))
    return _PICTURES if is_picture else ""


def _build_url(source: str) -> str:
    if source.startswith(("https://", "http://")):
        return source
    if (match := _HUB.fullmatch(source)) is None:
        return ""
    revision = f"/tree/{match[2]}" if match[2] else ""
    return f"https://huggingface.co/{match[1]}{revision}"


def _list_stated(source: Source, subject: Descriptor) -> list[Ancestor]:
    derivation = read_derivation(source, subject)
    if derivation is None:
        return []
    recipe = derivation.recipe
    weights = [] if recipe.weights is None else [Ancestor("", recipe.weights, "weights")]
    return [
        Ancestor("", derivation.parent, str(recipe.operation)),
        *weights,
        *(Ancestor(used.name, used.digest, "adapter") for used in recipe.adapters),
    ]


def _list_fused(properties: Any) -> list[Ancestor]:
    """Return the adapters that were added to the weights."""
    fused = properties.get("fused")
    found = []
    for entry in fused if isinstance(fused, list) else ():
        if isinstance(entry, dict):
            name, digest = (str(entry.get(key, "")) for key in ("name", "digest"))
            found.append(Ancestor(name, _parse(digest), "adapter"))
    return found


def _parse(text: str) -> Digest | None:
    try:
        return Digest.parse(text)
    except FormatError:
        return None


def _merge(ancestors: Sequence[Ancestor]) -> tuple[Ancestor, ...]:
    """Return each ancestor once: what states most comes first."""
    merged: dict[object, Ancestor] = {}
    for ancestor in ancestors:
        key = ancestor.digest or ancestor.name
        if key in merged and not merged[key].name:
            first = merged[key]
            merged[key] = Ancestor(ancestor.name, first.digest, first.operation)
        merged.setdefault(key, ancestor)
    return tuple(merged.values())


def _list_components(aimage: AImage) -> tuple[Component, ...]:
    stated = aimage.properties.get("components")
    described = stated if isinstance(stated, dict) else {}
    names = dict.fromkeys(layer.component for layer in aimage.layers)
    components = []
    for name in names:
        facts = described.get(name)
        facts = facts if isinstance(facts, dict) else {}
        components.append(Component(name, _read(facts, "class"), aimage.list_layers(name)))
    return tuple(components)
