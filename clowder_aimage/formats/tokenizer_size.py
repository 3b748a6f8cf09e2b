"""Number of tokens of a tokenizer, from its files (tokenizers: ``tokenizer.json``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.oci import read_json


def token_count(files: Mapping[str, bytes]) -> int:
    """Return one more than the largest token id, 0 if none is known; files are by name.

    Raises:
        FormatError: A file is not JSON.
    """
    for name in ("tokenizer.json", "vocab.json"):
        if name in files:
            value = read_json(files[name], name, MAX_JSON)
            return max(_ids(value if isinstance(value, dict) else {}, name), default=-1) + 1
    return 0


def _ids(value: Mapping[str, Any], name: str) -> Iterable[int]:
    if name == "vocab.json":
        yield from (number for number in value.values() if isinstance(number, int))
        return
    model = value.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from (number for number in vocabulary.values() if isinstance(number, int))
    elif isinstance(vocabulary, list):
        yield len(vocabulary) - 1
    added = value.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            yield token["id"]
