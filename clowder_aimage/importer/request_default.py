"""Defaults of picture requests in the config of a model, from the user and from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.errors import UsageError
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.generation.check import check
from clowder_aimage.generation.request import map_parameter_locations

# A base model of Z-Image has a shift of 6, a distilled one (Turbo) 3: 8 steps without guidance, the
# defaults of all requests. The base model's card: 28 to 50 steps, guidance 3 to 5.
_BASE_SHIFT = 4.5
_BASE = {"steps": 28, "guidance": 4}
Defaults = Mapping[str, int | float]


def build_request_defaults(steps: int | None, guidance: float | None) -> Defaults:
    """Return the defaults that the user states. Raises UsageError: A value is out of bounds."""
    stated = {"steps": steps, "guidance": guidance}
    return {name: _check(name, value) for name, value in stated.items() if value is not None}


def derive_model_defaults(inventory: Inventory) -> dict[str, Any]:
    """Return the defaults derived from the configs of a model."""
    configs = {component.name: component.config for component in inventory.components}
    size = configs.get("vae", {}).get("sample_size")
    shift = configs.get("scheduler", {}).get("shift")
    defaults = dict(inventory.defaults)
    if _is_side(size):
        defaults |= {"width": size, "height": size}
    if inventory.family == "z-image" and isinstance(shift, int | float) and shift >= _BASE_SHIFT:
        defaults |= _BASE
    return defaults


def _is_side(size: object) -> bool:
    try:
        return isinstance(size, int) and bool(_check("width", size))
    except UsageError:
        return False


def _check(name: str, value: object) -> int | float:
    """Return the checked value of a request parameter. Raises UsageError."""
    # 4.0 becomes 4: equal defaults must have equal digests.
    number: float = check(name, value, map_parameter_locations()[name].parameter.type)
    return int(number) if number == int(number) else number
