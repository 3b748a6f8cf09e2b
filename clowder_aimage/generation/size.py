"""The size of a picture as one text, as in OpenAI's API."""

from __future__ import annotations

import re

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import build_parameter_error, check, describe
from clowder_aimage.generation.request import map_parameter_locations

AUTO = "auto"
SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})", re.ASCII)


def parse_size(text: str) -> dict[str, int]:
    """Return the sides of ``WIDTHxHEIGHT``; empty for AUTO. Raises UsageError."""
    if text == AUTO:
        return {}
    sides = SIZE.fullmatch(text)
    if sides is None:
        raise build_parameter_error(
            "size", f'must be "{AUTO}" or WIDTHxHEIGHT, such as "1024x1024"'
        )
    size = {"width": int(sides[1]), "height": int(sides[2])}
    for name, side in size.items():
        accepted = map_parameter_locations()[name].parameter.type
        try:
            check(name, side, accepted)
        except UsageError:
            reason = f"must have a {name} that is {describe(accepted)}"
            raise build_parameter_error("size", reason) from None
    return size
