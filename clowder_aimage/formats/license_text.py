"""Licences by their texts: the identifier of a file such as LICENSE.

Identifiers are those of model cards (Hugging Face hub, "Licenses"): SPDX's in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_FILE = re.compile(r"(licen[cs]e|copying)\b[^/]*", re.IGNORECASE)
# Bytes of a text that are read: titles and grants are at its start.
MAX_TEXT = 4096
# The first pattern in the text decides; spaces and letter case do not count.
_TEXTS = (
    ("apache-2.0", "apache license version 2.0"),
    ("agpl-3.0", "gnu affero general public license version 3"),
    ("lgpl-3.0", "gnu lesser general public license version 3"),
    ("gpl-3.0", "gnu general public license version 3"),
    ("gpl-2.0", "gnu general public license version 2"),
    ("mpl-2.0", "mozilla public license version 2.0"),
    ("openrail++", "creativeml open rail++-m license"),
    ("creativeml-openrail-m", "creativeml open rail-m"),
    ("bigscience-bloom-rail-1.0", "bigscience rail license v1.0"),
    ("cc-by-nc-sa-4.0", "attribution-noncommercial-sharealike 4.0 international"),
    ("cc-by-nc-4.0", "attribution-noncommercial 4.0 international"),
    ("cc-by-sa-4.0", "attribution-sharealike 4.0 international"),
    ("cc-by-4.0", "attribution 4.0 international"),
    ("cc0-1.0", "cc0 1.0 universal"),
    ("unlicense", "this is free and unencumbered software released into the public domain"),
    ("llama3.3", "llama 3.3 community license"),
    ("llama3.2", "llama 3.2 community license"),
    ("llama3.1", "llama 3.1 community license"),
    ("llama3", "meta llama 3 community license"),
    ("llama2", "llama 2 community license"),
    ("bsd-3-clause", "neither the name of"),
    ("bsd-2-clause", "redistribution and use in source and binary forms"),
    ("mit", "permission is hereby granted, free of charge, to any person obtaining a copy"),
)


def find_license(files: Mapping[str, Path]) -> str | None:
    """Return the licence in the first text that is known, at the top of a directory."""
    for name in sorted(filter(is_license, files)):
        with files[name].open("rb") as file:
            if (identifier := identify_license(file.read(MAX_TEXT))) is not None:
                return identifier
    return None


def is_license(name: str) -> bool:
    """Return True if a file of this name states the licence of a model."""
    return _FILE.fullmatch(name) is not None


def identify_license(text: bytes) -> str | None:
    """Return the licence that begins with this text, None if it is unknown."""
    words = " ".join(text.decode("utf-8", "replace").lower().split())
    plain = words.replace(", version", " version")
    return next((identifier for identifier, phrase in _TEXTS if phrase in plain), None)
