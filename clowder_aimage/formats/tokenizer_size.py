"""Tokens of a tokenizer, from its files (tokenizers: ``tokenizer.json``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.oci import read_json


def count_tokens(files: Mapping[str, bytes]) -> int:
    """Return the largest token id plus one, 0 without tokens; ``files`` are by name.

    Raises:
        FormatError: A file is not JSON.
    """
    for name in ("tokenizer.json", "vocab.json"):
        if name in files:
            value = read_json(files[name], name, MAX_JSON)
            return max(_iter_ids(value if isinstance(value, dict) else {}, name), default=-1) + 1
    return 0


def list_token_names(files: Mapping[str, bytes]) -> set[str]:
    """Return the tokens of ``tokenizer.json``, else of the vocabulary and added tokens.

    Raises:
        FormatError: A file is not JSON.
    """
    tokens: set[str] = set()
    older = ("vocab.json", "added_tokens.json", "tokenizer_config.json")
    for name in ("tokenizer.json",) if "tokenizer.json" in files else older:
        value = read_json(files.get(name, b"{}"), name, MAX_JSON)
        if not isinstance(value, dict):
            continue
        if name in older[:2]:
            tokens.update(value)
        model, decoder = value.get("model"), value.get("added_tokens_decoder")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        tokens.update(vocabulary if isinstance(vocabulary, dict) else ())
        added = decoder.values() if isinstance(decoder, dict) else value.get("added_tokens")
        for token in added if isinstance(added, Iterable) else ():
            if isinstance(token, dict) and isinstance(token.get("content"), str):
                tokens.add(token["content"])
    return tokens


def _iter_ids(value: Mapping[str, Any], name: str) -> Iterable[int]:
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
