"""Access to the files of this directory, as bytes and as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def raw(name: str) -> bytes:
    """Return the bytes of ``name``.json."""
    return (HERE / f"{name}.json").read_bytes()


def value(name: str) -> Any:
    """Return the parsed value of ``name``.json."""
    return json.loads(raw(name))
