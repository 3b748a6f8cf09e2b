"""The tokenizer of an encoder: tokenizer.json, or WordPiece from vocab.txt.

Transformers' classes for WordPiece take the treatment of case, accents and Chinese characters from
``tokenizer_config.json``, whatever tokenizer.json says. So does this module.
Source: transformers 5.24, ``tokenization_bert.py``, ``tokenization_mpnet.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.model.text.encoder_config import find_word_kind
from clowder_aimage.model.text.prefix_space import set_prefix_space
from clowder_aimage.model.text.template_file import parse_special_tokens
from clowder_aimage.model.text.tokenizer_file import TokenizerFiles
from clowder_aimage.model.tokenizer_backend import TokenizerBackend
from clowder_aimage.tensor.config_fields import ConfigFields, parse_object

_FILE, _WORDS = "tokenizer.json", "vocab.txt"
# Kinds whose tokenizer is WordPiece, with the default texts of special tokens
_BERT = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_MPNET = {"unk": "[UNK]", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"}
_WORD_PIECE = {"bert": _BERT, "distilbert": _BERT, "electra": _BERT, "mpnet": _MPNET}


def build_tokenizer(files: TokenizerFiles, kind: str, *, is_lower: bool) -> TokenizerBackend:
    """Return the tokenizer of an encoder of a kind; is_lower: it puts texts in lower case first.

    Raises ModelError: there is none that is known to be exact, or it is malformed.
    """
    config = files.read_config()
    words = find_word_kind(config, kind)
    data = files.read(_FILE)
    if data is not None:
        value = parse_object(_FILE, data, MAX_JSON)
        set_prefix_space(value, config, kind)
        if words and _get_type(value.get("model")) in ("WordPiece", None):
            value["normalizer"] = _build_normalizer(config)
    else:
        value = _build_word_piece(files, config, words)
    if is_lower:
        parts = [{"type": "Lowercase"}, value.get("normalizer")]
        value["normalizer"] = {"type": "Sequence", "normalizers": [part for part in parts if part]}
    return TokenizerBackend.from_json(json.dumps(value), files.list_added_tokens(config))


def _get_type(component: Any) -> Any:
    return component.get("type") if isinstance(component, dict) else None


def _build_normalizer(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = ConfigFields("tokenizer_config.json", config)
    accents = fields.get_raw("strip_accents")
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": fields.get_boolean("tokenize_chinese_chars", True),
        "strip_accents": None if accents is None else bool(accents),
        "lowercase": fields.get_boolean("do_lower_case", True),
    }


def _build_word_piece(
    files: TokenizerFiles, config: Mapping[str, Any], kind: str | None
) -> dict[str, Any]:
    """Return what tokenizer.json would be for vocab.txt. Raises ModelError."""
    data = files.read(_WORDS)
    if data is None or kind is None or config.get("do_basic_tokenize") is False:
        raise ModelError(
            f"the model has no {_FILE}", hint="save its tokenizer with a current transformers"
        )
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise ModelError(f"{_WORDS} is not UTF-8 text") from None
    words = {line.rstrip("\r"): index for index, line in enumerate(lines) if line}
    stated = parse_special_tokens(config)
    special = {
        name: stated.get(f"{name}_token") or text for name, text in _WORD_PIECE[kind].items()
    }
    if missing := sorted(text for text in special.values() if text not in words):
        raise ModelError(f"{_WORDS} has no tokens {', '.join(missing)[:200]}")
    ends = {
        name: {"id": text, "ids": [words[text]], "tokens": [text]}
        for name, text in special.items()
        if name in ("cls", "sep")
    }
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": words[text],
                "content": text,
                "special": True,
                **options,
                "lstrip": name == "mask" and kind == "mpnet",
            }
            for name, text in sorted(special.items(), key=lambda item: words[item[1]])
        ],
        "normalizer": _build_normalizer(config),
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": special["cls"], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": special["sep"], "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {token["id"]: token for token in ends.values()},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special["unk"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": words,
        },
    }
