"""The ability of an AImage in a store, of any kind."""

from __future__ import annotations

from clowder_aimage.dialect import AImage
from clowder_aimage.formats.diffusers import FAMILIES
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.ability import PIPELINES, Ability
from clowder_aimage.model.text.runtime import find_runtime
from clowder_aimage.model.text.text_facts import read_text_facts
from clowder_aimage.oci import Digest

_PARTS = {"text_encoder", "transformer", "vae"}
_NONE = Ability()
# The capability of image models
IMAGE = "image"


def find_ability(store: ImageLayout, manifest: Digest, aimage: AImage) -> Ability:
    """Return the ability of an AImage; one that is not a model to run has none, and no fault."""
    if is_part(aimage):
        return _NONE
    if find_runtime(aimage) is not None:
        return read_text_facts(store, manifest, aimage).ability
    return Ability((IMAGE,), PIPELINES) if is_runnable(aimage) else _NONE


def is_part(aimage: AImage) -> bool:
    """Return True for an adapter or a ControlNet, which is used with another model."""
    kind = aimage.properties.get("format")
    return kind in ("lora", "controlnet") or "adapter" in aimage.properties


def is_runnable(aimage: AImage) -> bool:
    """Return True if the AImage belongs to a supported family of image models.

    An AImage of another tool may lack its family; then its components are checked.
    """
    properties = aimage.properties
    if "family" in properties:
        return bool(properties["family"] in FAMILIES)
    return "format" not in properties and properties.get("components", {}).keys() >= _PARTS
