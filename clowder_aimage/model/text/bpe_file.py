"""Byte-level tokenizers in ``vocab.json`` and ``merges.txt``, as the tokenizer.json of their class.

The two files do not say how a text is split, which the class of the tokenizer knows. So only those
of the table are read. Source: transformers, ``models/*/tokenization_*.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.template_file import parse_special_tokens

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_END = "<|endoftext|>"
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Form:
    """Describe how a class splits texts; ``special`` are its special tokens without other ones.

    has_sentence: a text is put between cls and sep.
    """

    special: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
    )
    is_composed: bool = False
    split: str | None = None
    has_sentence: bool = False


_QWEN = _Form(dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END), True, _QWEN_SPLIT)
_ROBERTA = _Form(
    {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"}
    | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
    has_sentence=True,
)
# By the class, without the word Fast
_FORMS = {
    "GPT2Tokenizer": _Form(),
    "CodeGenTokenizer": _Form(),
    "GPTNeoXTokenizer": _Form(is_composed=True),
    "Qwen2Tokenizer": _QWEN,
    "RobertaTokenizer": _ROBERTA,
    "BartTokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "LEDTokenizer": _ROBERTA,
}
# The classes of models that name none
_CLASSES = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "gpt_neox": "GPTNeoXTokenizer",
    "roberta": "RobertaTokenizer",
}


def find_class(config: Mapping[str, Any], model_type: object) -> str:
    """Return the class of a tokenizer that its configuration or its model names.

    Raises ModelError: it is unknown how the class splits texts.
    """
    name = config.get("tokenizer_class") or _CLASSES.get(str(model_type))
    if is_byte_level(config, model_type):
        return str(name).removesuffix("Fast")
    stated = f"of the class {name!r:.80}" if name else "whose class is not stated"
    raise ModelError(
        f"the model has {VOCABULARY} and {MERGES} {stated}, which do not say how texts are split",
        hint="save its tokenizer with a current transformers, which writes tokenizer.json",
    )


def is_byte_level(config: Mapping[str, Any], model_type: object) -> bool:
    """Return True if the class of a tokenizer is one of those that are known here."""
    name = config.get("tokenizer_class") or _CLASSES.get(str(model_type))
    return str(name).removesuffix("Fast") in _FORMS


def build_tokenizer(
    name: str,
    config: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    merges: str,
    added: Mapping[str, int],
) -> dict[str, Any]:
    """Return what tokenizer.json would be for the tokenizer of a known class.

    added: the ids of tokens that are not in the vocabulary. Raises ModelError.
    """
    form, ids = _FORMS[name], {**vocabulary, **added}
    prefix = config.get("add_prefix_space") is True
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    split: dict[str, Any] = {**byte_level, "use_regex": form.split is None}
    if form.split is not None:
        pattern = {"pattern": {"Regex": form.split}, "behavior": "Isolated", "invert": False}
        split = {"type": "Sequence", "pretokenizers": [{"type": "Split", **pattern}, split]}
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"} if form.is_composed else None,
        "pre_tokenizer": split,
        "post_processor": _build_ends(form, config, ids),
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", **model, "vocab": vocabulary, "merges": _parse_merges(merges)},
    }


def list_special_tokens(
    name: str, config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, dict[str, bool]]:
    """Return the special tokens of a known class, with the options of added tokens."""
    special = _find_special(_FORMS[name], config, ids)
    return {text: {"special": True, "normalized": False} for text in special.values()}


def _find_special(form: _Form, config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, str]:
    """Return the stated special tokens, and those of the class that the vocabulary has."""
    stated = parse_special_tokens(config)
    usual = {
        role: text for role, text in form.special.items() if role not in config and text in ids
    }
    return {**usual, **stated}


def _build_ends(
    form: _Form, config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any] | None:
    """Return the tokens at the ends of a text. Raises ModelError: the vocabulary lacks one."""
    special = _find_special(form, config, ids)
    if form.has_sentence:
        first, last = special.get("cls_token"), special.get("sep_token")
    else:
        first = special.get("bos_token") if config.get("add_bos_token") is True else None
        last = special.get("eos_token") if config.get("add_eos_token") is True else None
    texts = [text for text in (first, last) if text is not None]
    if missing := [text for text in texts if text not in ids]:
        raise ModelError(f"{VOCABULARY} has no token {missing[0]!r:.80}")
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pieces = [_name_token(first), *pieces] if first is not None else pieces
    pieces = [*pieces, _name_token(last)] if last is not None else pieces
    tokens = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in texts}
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
    return {**template, "special_tokens": tokens} if texts else None


def _name_token(text: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": text, "type_id": 0}}


def _parse_merges(text: str) -> list[list[str]]:
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    pairs = [line.rstrip("\r").split(" ") for line in lines]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError(f"{MERGES}: every line must contain two tokens")
    return pairs
