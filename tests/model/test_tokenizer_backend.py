"""Tokenizers that panic, grow their text, or do not end."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from clowder_aimage.errors import ModelError, StuckError
from clowder_aimage.model.tokenizer_backend import EncodingLimits, TokenizerBackend
from tests.conftest import TINY

BASE = json.loads((TINY / "tokenizer" / "tokenizer.json").read_text())
PIECE = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "s", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
ADDED = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": True,
}


def backend(**fields: Any) -> TokenizerBackend:
    return TokenizerBackend.from_json(json.dumps(BASE | fields), {})


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


GROWING = replace({"String": "a"}, "a" * 99)


def split(pattern: str) -> dict[str, Any]:
    fields = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Split", **fields}


def template(*single: object, ids: int = 1, text: str = "s") -> dict[str, Any]:
    token = {"id": "s", "ids": [1] * ids, "tokens": [text] * ids}
    fields = {"single": single, "pair": [], "special_tokens": {"s": token}}
    return {"post_processor": {"type": "TemplateProcessing", **fields}}


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        template({"Sequence": {"id": "B", "type_id": 0}}),
        {"normalizer": replace({"String": ""}, "x")},
        {"pre_tokenizer": split("(a+)+$")},
    ],
)
def test_a_panic_is_an_error_that_does_not_quote(
    fields: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match=r"^the tokenizer failed: PanicException$"):
        backend(**fields).encode("a" * 60 + "!")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "the tokenizer cannot be read",
        ),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [GROWING] * 5,
                }
            },
            "may make more than",
        ),
        ({"normalizer": replace({"Regex": "b*"}, "a" * 99999)}, "may make more than"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 99999}}, "may make more than"),
        (template(PIECE, PIECE), "repeats the text"),
        (template(PIECE, *[SPECIAL] * 33, ids=2), "adds more than 64 tokens"),
        (template(PIECE, SPECIAL, text="a" * 9999), "an added token exceeds"),
        (
            {
                "post_processor": {
                    "type": "Sequence",
                    "processors": [
                        {"type": "BertProcessing", "sep": ["s", 1], "cls": ["c", 2]},
                        {"type": "BertProcessing", "sep": ["s", 1], "cls": ["c", 2]},
                    ],
                }
            },
            "several post-processors",
        ),
        (
            {
                "post_processor": {
                    "type": "RobertaProcessing",
                    "sep": ["s" * 9999, 1],
                    "cls": ["c", 2],
                    "trim_offsets": True,
                    "add_prefix_space": True,
                }
            },
            "an added token exceeds",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 2}}, "bytes of bytes"),
        ({"pre_tokenizer": split(r"\p{L}" * 999)}, "a pattern of the tokenizer exceeds"),
        (
            {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99}},
            "more than 64 components",
        ),
        ({"model": BASE["model"] | {"unk_token": "U" * 99}}, "unk_token exceeds"),
        ({"added_tokens": [{"id": 9, "content": "a" * 9999, **ADDED}]}, "an added token exceeds"),
    ],
)
def test_what_would_grow_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        backend(**fields).encode("a fox" * 9)


def test_too_many_added_tokens_are_refused() -> None:
    tokens = [{"id": number, "content": f"{number}", **ADDED} for number in range(40_000)]
    with pytest.raises(ModelError, match="an added token exceeds"):
        backend(added_tokens=tokens).encode("a fox")


def test_a_tokenizer_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    class Endless:
        def encode_batch(self, _: list[str], add_special_tokens: bool) -> None:
            is_over.wait(30)

    slow = backend()
    monkeypatch.setattr(slow, "_backend", Endless())
    with pytest.raises(StuckError, match="takes longer than"):
        slow.encode("a fox", limits=EncodingLimits(seconds=0.0))
    is_over.set()


def test_normalizers_of_other_models_are_accepted() -> None:
    steps = [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁"), {"type": "NFKC"}]
    fields = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    assert backend(**fields).encode("a fox" * 999)
    assert backend(**template(SPECIAL, PIECE, SPECIAL)).encode("a fox")[0] == 1
