"""Defaults of picture requests in the config of a model, from the user and from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.generation.model_default import check_default, derive_defaults

Defaults = Mapping[str, int | float]


def build_request_defaults(steps: int | None, guidance: float | None) -> Defaults:
    """Return the defaults that the user states. Raises UsageError: A value is out of bounds."""
    stated = {"steps": steps, "guidance": guidance}
    return {name: check_default(name, value) for name, value in stated.items() if value is not None}


def derive_model_defaults(inventory: Inventory) -> dict[str, Any]:
    """Return the defaults derived from the configs of a model."""
    configs = {component.name: component.config for component in inventory.components}
    return {**inventory.defaults, **derive_defaults(inventory.family, configs)}
