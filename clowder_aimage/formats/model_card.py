"""Files beside a model that are not part of it: its card, and adapters.

A card whose front matter says the licence and nothing else (Hugging Face hub, "Model Cards") is
what an export writes where no other file says it.
"""

from __future__ import annotations

import re
from pathlib import Path

from clowder_aimage.formats.format_result import home
from clowder_aimage.formats.model_tree import check_inside

CARD, ADAPTERS = "README.md", "adapters"
_LICENSE = re.compile(r"[A-Za-z0-9(]([A-Za-z0-9.+() -]*[A-Za-z0-9.+)])?")
_BARE = re.compile(rb"---\nlicense: [A-Za-z0-9.+() -]+\n---\n")
_LONGEST = 4096  # bytes of a card that says so little


def card(license_: object) -> bytes | None:
    """Return a card that says this licence; None where it is no word that one could say."""
    if not isinstance(license_, str) or not _LICENSE.fullmatch(license_):
        return None
    made = f"---\nlicense: {license_}\n---\n".encode()
    return made if len(made) <= _LONGEST else None


def is_bare(path: Path) -> bool:
    """Return whether a file is a card that says nothing but the licence."""
    if path.name != CARD or path.stat().st_size > _LONGEST:
        return False
    return _BARE.fullmatch(path.read_bytes()) is not None


def sole(root: Path) -> Path | None:
    """Return the only file in a directory, but for a card and adapters beside it.

    Hidden ones do not count. Raises ModelError where it is a link that leads out.
    """
    beside = (CARD, ADAPTERS)
    paths = [p for p in root.iterdir() if not p.name.startswith(".") and p.name not in beside]
    if len(paths) != 1 or not paths[0].is_file():
        return None
    check_inside(home(root), paths[0])
    return paths[0]
