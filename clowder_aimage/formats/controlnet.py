"""Control networks of Z-Image: a safetensors file, or a directory of diffusers.

The names are those of alibaba-pai's Z-Image-Turbo-Fun-Controlnet-Union 1.0, 2.0 and 2.1, and of
diffusers' ``ZImageControlNetModel`` (0.42).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import FormatError
from clowder_aimage.formats import diffusers, safetensors
from clowder_aimage.formats.inventory import Inventory

FORMAT = COMPONENT = diffusers.CONTROLNET
CLASS = diffusers.CLASSES[COMPONENT]
EMBEDDER = "control_all_x_embedder.2-1.weight"
Shapes = Mapping[str, tuple[int, ...]]
_FIRST, _LAYER = "control_layers.0.", re.compile(r"control_layers\.([0-9]{1,4})\..+")
# Control layers are copies of these layers of the base model.
_BASE = "transformer/layers."
_EMBEDDER = "transformer/all_x_embedder.2-1.weight"


def is_controlnet(names: Iterable[str]) -> bool:
    """Return True if these tensor names are those of a control network."""
    return EMBEDDER in names


def is_packed_with(model: AImage) -> bool:
    """Return True if a model contains a control network."""
    return any(layer.is_tensor or layer.is_shard for layer in model.list_layers(COMPONENT))


def take(path: Path) -> Inventory:
    """Return the control network at ``path``. Raises as diffusers and safetensors do."""
    inventory = diffusers.take_inventory(path) if path.is_dir() else safetensors.take(path)
    return replace(inventory, facts={**inventory.facts, "format": FORMAT, "architecture": CLASS})


def count_layers(names: Iterable[str]) -> int:
    """Return the number of control layers."""
    return len({match[1] for name in names if (match := _LAYER.fullmatch(name))})


def check_fit(shapes: Shapes, base: Shapes, label: str, model: str) -> None:
    """Compare the shapes of a control network with those of its base model.

    ``label`` and ``model`` are their names in messages. The names in ``base`` are
    ``component/name``.

    Raises:
        FormatError: A shape differs, there are no control layers or more than layers, or ``model``
            is not a Z-Image.
    """
    # The first control layer is compared: all layers of a transformer have the same shapes.
    for name, shape in sorted(shapes.items()):
        expected = base.get(f"{_BASE}0.{name.removeprefix(_FIRST)}")
        if name.startswith(_FIRST) and expected not in (None, shape):
            raise _build_fit_error(
                label, model, f"{name} has the shape {list(shape)}, not {list(expected or ())}"
            )
    embedded, patches = shapes.get(EMBEDDER, ()), base.get(_EMBEDDER, ())
    if len(patches) != 2:
        raise _build_fit_error(label, model, "it is not a Z-Image")
    # The embedder of later control networks also takes a mask and inpainting latents: more columns.
    if len(embedded) != 2 or embedded[0] != patches[0] or embedded[1] < patches[1]:
        minimum = f"at least {list(patches)}"
        raise _build_fit_error(
            label, model, f"{EMBEDDER} has the shape {list(embedded)}, not {minimum}"
        )
    layers = {name.removeprefix(_BASE).partition(".")[0] for name in base if name.startswith(_BASE)}
    if not 1 <= (count := count_layers(shapes)) <= len(layers):
        raise _build_fit_error(
            label, model, f"it has {count} control layers for {len(layers)} layers"
        )


def _build_fit_error(label: str, model: str, problem: str) -> FormatError:
    return FormatError(
        f"{label} does not fit {model}: {problem}", hint="it is of another base model"
    )
