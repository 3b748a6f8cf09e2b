"""Decoders of tokenizers: known ones give the bytes of tokens, others are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.token_table import TokenTable

SPACE = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def make_table(*decoders: dict[str, Any], text: str = "a") -> TokenTable:
    backend: Any = SimpleNamespace(decoders=decoders, find_text=lambda _: text, added={})
    return TokenTable(backend)


@pytest.mark.parametrize(
    ("decoders", "token", "data"),
    [
        ([{"type": "ByteLevel"}], "Ġa", b" a"),
        ([REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP], f"{SPACE}a", b" a"),
        ([REPLACE, {"type": "ByteFallback"}], "<0xE6>", b"\xe6"),
        ([{"type": "Metaspace", "replacement": SPACE}], f"{SPACE}a", b" a"),
        ([{"type": "BPEDecoder", "suffix": "</w>"}], "a</w>", b"a "),
    ],
)
def test_known_decoders(decoders: list[dict[str, Any]], token: str, data: bytes) -> None:
    assert make_table(*decoders, text=token).get_bytes(0) == data


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##"},
        {"type": "CTC"},
        REPLACE | {"pattern": {"String": "_"}},
        REPLACE | {"pattern": {"Regex": SPACE}},
        REPLACE | {"content": "-"},
        STRIP | {"stop": 1},
        {"type": "Metaspace", "replacement": "_"},
    ],
)
def test_unknown_decoders_are_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"the decoder {decoder['type']} of the tokenizer"):
        make_table(decoder)
    with pytest.raises(ModelError, match="no decoder"):
        make_table()
