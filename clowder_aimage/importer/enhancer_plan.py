"""A language model from the text encoder of an image model, with the same blobs.

The text encoder of Z-Image and of FLUX.2 [klein] is Qwen3-4B. Its last layer, which pictures do
not use, is damaged in the published files of Z-Image-Turbo (``model.text.last_layer``); other
weights can replace it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect import DEFAULT, DIALECTS, AImage, Layer
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.formats.stored_weights import read_stored
from clowder_aimage.formats.transformers import build_facts
from clowder_aimage.importer.plan import CreatePlan, plan_conversion
from clowder_aimage.importer.planned_layer import PlannedLayer
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.oci.manifest import encode

CLASS = "Qwen3ForCausalLM"
# The share of tensors that may be replaced; with more it is another model.
MOST_REPLACED = 0.25
_ENCODER, _TOKENIZER = "text_encoder", "tokenizer"
_LAYER = re.compile(r"model\.layers\.[0-9]+\.mlp\.down_proj\.weight")
_CONFIG, _MAX_CONFIG = "config.json", 1 << 20


@dataclass(frozen=True, slots=True)
class EnhancerPlan:
    """The plan, and the names of the tensors that are replaced."""

    plan: CreatePlan
    replaced: tuple[str, ...]


def plan_enhancer(
    store: BlobFiles, base: AImage, name: str, weights: AImage | None, weights_name: str = ""
) -> EnhancerPlan:
    """Return the plan of a language model from the image model ``base``, called ``name``.

    Tensors of ``weights``, a language model or an image model with the same text encoder, replace
    those with other values.

    Raises:
        UsageError: The text encoder of ``base`` is not a language model, or ``weights`` are of
            another model.
        FormatError: A blob is damaged.
    """
    tensors, replaced = _find_tensors(base, name), tuple[str, ...]()
    if weights is not None:
        tensors, replaced = _replace_tensors(
            tensors, _find_tensors(weights, weights_name), weights_name
        )
    renamed = [replace(layer, name=key) for key, layer in tensors.items()]
    files, config = _plan_files(store, base, name)
    properties = {
        "schemaVersion": 1,
        "format": "transformers",
        **build_facts(read_json(config.prefix, _CONFIG, 2 * _MAX_CONFIG)),
    }
    properties |= {key: base.properties[key] for key in ("license",) if key in base.properties}
    model = AImage(encode(properties), (*renamed, *files))
    stored = read_stored(store, model)
    plan = plan_conversion(model, stored, DIALECTS[DEFAULT], Recipe(), frozenset())
    return EnhancerPlan(_with_file(plan, config), replaced)


def _find_tensors(aimage: AImage, name: str) -> dict[str, Layer]:
    """Return the tensors of a language model, without the component's prefix, by name."""
    prefix = "" if aimage.properties.get("format") == "transformers" else f"{_ENCODER}/"
    tensors = {
        layer.name.removeprefix(prefix): layer
        for layer in aimage.layers
        if layer.is_tensor and layer.name.startswith(prefix)
    }
    # Qwen3-4B has tied embeddings: its lm_head is the embedding matrix.
    tensors.pop("lm_head.weight", None)
    if not any(map(_LAYER.fullmatch, tensors)):
        raise UsageError(f"{name} has no text encoder that is a language model")
    return tensors


def _replace_tensors(
    tensors: Mapping[str, Layer], replacements: Mapping[str, Layer], name: str
) -> tuple[dict[str, Layer], tuple[str, ...]]:
    """Return the tensors, replaced by those that differ, and the names of the replaced ones."""
    # Digests are compared: equal tensors of two AImages are one blob.
    if unmatched := tensors.keys() ^ replacements.keys():
        raise UsageError(f"{name} is of another model: only one of them has {min(unmatched)[:200]}")
    different = [
        key
        for key in tensors
        if tensors[key].descriptor.digest != replacements[key].descriptor.digest
    ]
    for key in different:
        if (tensors[key].shape, tensors[key].dtype) != (
            replacements[key].shape,
            replacements[key].dtype,
        ):
            raise UsageError(f"{name} is of another model: {key[:200]} has another shape or type")
    if len(different) > MOST_REPLACED * len(tensors):
        count = f"{len(different)} of {len(tensors)} tensors differ"
        raise UsageError(f"{name} is of another model: {count}")
    return {**tensors, **{key: replacements[key] for key in different}}, tuple(different)


def _plan_files(store: BlobFiles, base: AImage, name: str) -> tuple[list[Layer], PlannedLayer]:
    """Return the files of the tokenizer and of the text encoder, and its configuration."""
    layers = {
        layer.name.rpartition("/")[2]: layer
        for component in (_ENCODER, _TOKENIZER)
        for layer in base.list_layers(component)
        if not layer.is_tensor
    }
    layer = layers.pop(_CONFIG, None)
    if layer is None or layer.descriptor.size > _MAX_CONFIG:
        raise ModelError(f"{name} lacks {_ENCODER}/{_CONFIG}")
    with store.open(layer.descriptor) as file:
        config: Any = read_json(file.read(layer.descriptor.size), _CONFIG, _MAX_CONFIG)
    if not isinstance(config, dict) or config.get("model_type") != "qwen3":
        raise UsageError(f"the text encoder of {name} is not a Qwen3 model")
    existing: Layer | None = replace(layer, name=_CONFIG)
    if config.get("architectures") != [CLASS]:
        config, existing = config | {"architectures": [CLASS]}, None
    data = json.dumps(config, indent=2).encode() + b"\n"
    files = [replace(file_layer, name=file_name) for file_name, file_layer in layers.items()]
    return files, PlannedLayer(_CONFIG, mediatype.AIMAGE_FILE, data, (), existing=existing)


def _with_file(plan: CreatePlan, file: PlannedLayer) -> CreatePlan:
    layers = sorted([*plan.layers, file], key=lambda layer: layer.name)
    config = {**read_json(plan.config, _CONFIG), "size": sum(layer.size for layer in layers)}
    return replace(plan, layers=tuple(layers), config=encode(config))
