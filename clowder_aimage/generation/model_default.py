"""Defaults of picture requests that follow from the configs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import check
from clowder_aimage.generation.request import map_parameter_locations

# A base model of Z-Image has a shift of 6, a distilled one (Turbo) 3: 8 steps without guidance, the
# defaults of all requests. The base model's card: 28 to 50 steps, guidance 3 to 5.
_BASE_SHIFT = 4.5
_BASE = {"steps": 28, "guidance": 4}


def derive_defaults(family: str, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the defaults of a model of a family, from the configs of its components by name."""
    defaults: dict[str, Any] = {}
    size = configs.get("vae", {}).get("sample_size")
    shift = configs.get("scheduler", {}).get("shift")
    if _is_side(size):
        defaults |= {"width": size, "height": size}
    if family == "z-image" and isinstance(shift, int | float) and shift >= _BASE_SHIFT:
        defaults |= _BASE
    return defaults


def check_default(name: str, value: object) -> int | float:
    """Return the checked value of a request parameter. Raises UsageError."""
    # 4.0 becomes 4: equal defaults must have equal digests.
    number: float = check(name, value, map_parameter_locations()[name].parameter.type)
    return int(number) if number == int(number) else number


def _is_side(size: object) -> bool:
    try:
        return isinstance(size, int) and bool(check_default("width", size))
    except UsageError:
        return False
