"""The JSON Schemas in schemas/: one loader, for a checkout and for an installed wheel."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError

_HERE = Path(__file__).parent


@functools.cache
def load(name: str) -> dict[str, Any]:
    """The schema in ``schemas/<name>.schema.json``. Raises FileNotFoundError."""
    for directory in (_HERE / "schemas", _HERE.parent / "schemas"):
        path = directory / f"{name}.schema.json"
        if path.is_file():
            schema: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return schema
    raise FileNotFoundError(f"no schema {name}")


def validate(name: str, document: object) -> None:
    """Check ``document`` against a schema.

    Raises:
        FormatError: with the place of the first thing that is wrong.
    """
    import jsonschema  # 40 ms that a plain 'aimage ls' must not pay

    try:
        jsonschema.validate(document, load(name), cls=jsonschema.Draft202012Validator)
    except jsonschema.ValidationError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "the top"
        raise FormatError(f"not a valid {name} document: {error.message[:300]} (at {where})") from (
            None
        )
