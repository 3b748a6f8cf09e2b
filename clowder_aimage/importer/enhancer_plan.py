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
from clowder_aimage.formats.transformers import facts
from clowder_aimage.importer.plan import CreatePlan, plan_conversion
from clowder_aimage.importer.planned_layer import PlannedLayer
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.oci import mediatype, read_json
from clowder_aimage.oci.manifest import encode

CLASS = "Qwen3ForCausalLM"
MOST_REPLACED = 0.25  # of the tensors; with more it is another model
_ENCODER, _TOKENIZER = "text_encoder", "tokenizer"
_LAYER = re.compile(r"model\.layers\.[0-9]+\.mlp\.down_proj\.weight")
_CONFIG, _MAX_CONFIG = "config.json", 1 << 20


@dataclass(frozen=True, slots=True)
class EnhancerPlan:
    """The plan, and the tensors that are not those of the image model."""

    plan: CreatePlan
    replaced: tuple[str, ...]


def plan_enhancer(
    store: BlobFiles, base: AImage, name: str, weights: AImage | None, weights_name: str = ""
) -> EnhancerPlan:
    """Return the plan of a language model from the image model ``base``, called ``name``.

    Each tensor of ``weights``, a language model or an image model with the same text encoder,
    replaces one that has other values.

    Raises:
        UsageError: ``base`` has no text encoder that is a language model, or ``weights`` are of
            another model.
        FormatError: A blob is damaged.
    """
    own, replaced = _tensors(base, name), tuple[str, ...]()
    if weights is not None:
        own, replaced = _replaced(own, _tensors(weights, weights_name), weights_name)
    renamed = [replace(layer, name=key) for key, layer in own.items()]
    files, config = _files(store, base, name)
    known = {
        "schemaVersion": 1,
        "format": "transformers",
        **facts(read_json(config.prefix, _CONFIG, 2 * _MAX_CONFIG)),
    }
    known |= {key: base.properties[key] for key in ("license",) if key in base.properties}
    made = AImage(encode(known), (*renamed, *files))
    stored = read_stored(store, made)
    plan = plan_conversion(made, stored, DIALECTS[DEFAULT], Recipe(), frozenset())
    return EnhancerPlan(_with_file(plan, config), replaced)


def _tensors(aimage: AImage, name: str) -> dict[str, Layer]:
    """Return the tensors of a language model by their own names, from any of its components."""
    prefix = "" if aimage.properties.get("format") == "transformers" else f"{_ENCODER}/"
    found = {
        layer.name.removeprefix(prefix): layer
        for layer in aimage.layers
        if layer.is_tensor and layer.name.startswith(prefix)
    }
    found.pop("lm_head.weight", None)  # the embeddings are tied
    if not any(map(_LAYER.fullmatch, found)):
        raise UsageError(f"{name} has no text encoder that is a language model")
    return found


def _replaced(
    own: Mapping[str, Layer], others: Mapping[str, Layer], name: str
) -> tuple[dict[str, Layer], tuple[str, ...]]:
    """Return the tensors with those of ``others`` where they differ, and the names of these."""
    if odd := own.keys() ^ others.keys():
        raise UsageError(f"{name} is of another model: only one of them has {min(odd)[:200]}")
    different = [key for key in own if own[key].descriptor.digest != others[key].descriptor.digest]
    for key in different:
        if (own[key].shape, own[key].dtype) != (others[key].shape, others[key].dtype):
            raise UsageError(f"{name} is of another model: {key[:200]} has another shape or type")
    if len(different) > MOST_REPLACED * len(own):
        count = f"{len(different)} of {len(own)} tensors differ"
        raise UsageError(f"{name} is of another model: {count}")
    return {**own, **{key: others[key] for key in different}}, tuple(different)


def _files(store: BlobFiles, base: AImage, name: str) -> tuple[list[Layer], PlannedLayer]:
    """Return the files of the tokenizer and of the text encoder, and its configuration."""
    found = {
        layer.name.rpartition("/")[2]: layer
        for component in (_ENCODER, _TOKENIZER)
        for layer in base.component(component)
        if not layer.is_tensor
    }
    layer = found.pop(_CONFIG, None)
    if layer is None or layer.descriptor.size > _MAX_CONFIG:
        raise ModelError(f"{name} lacks {_ENCODER}/{_CONFIG}")
    with store.open(layer.descriptor) as file:
        config: Any = read_json(file.read(layer.descriptor.size), _CONFIG, _MAX_CONFIG)
    if not isinstance(config, dict) or config.get("model_type") != "qwen3":
        raise UsageError(f"the text encoder of {name} is not a Qwen3 model")
    kept: Layer | None = replace(layer, name=_CONFIG)
    if config.get("architectures") != [CLASS]:
        config, kept = config | {"architectures": [CLASS]}, None
    data = json.dumps(config, indent=2).encode() + b"\n"
    files = [replace(each, name=own) for own, each in found.items()]
    return files, PlannedLayer(_CONFIG, mediatype.AIMAGE_FILE, data, (), kept=kept)


def _with_file(plan: CreatePlan, file: PlannedLayer) -> CreatePlan:
    layers = sorted([*plan.layers, file], key=lambda layer: layer.name)
    config = {**read_json(plan.config, _CONFIG), "size": sum(layer.size for layer in layers)}
    return replace(plan, layers=tuple(layers), config=encode(config))
