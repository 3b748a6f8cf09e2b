"""Tokenizers of vocab.json and merges.txt against the classes of transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from clowder_aimage.model.text import bpe_file
from clowder_aimage.model.tokenizer_backend import EncodingLimits, TokenizerBackend
from tests.text.tiny_text import make_tokenizer

pytestmark = pytest.mark.integration
transformers = pytest.importorskip("transformers")
SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|padding|>")
TEXTS = (
    "the red ball is 12345 I'LL don't",
    "  two  spaces\n\n\tand tabs ",
    "Größe e\u0301 東京 🙂<|endoftext|>x</s><mask> y",
    "",
    "x\r\ny 3.14",
)


@pytest.mark.parametrize("name", bpe_file._FORMS)
def test_known_classes_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    value = json.loads(make_tokenizer(SPECIAL).to_str())
    vocabulary = value["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in value["added_tokens"]}
    lines = "\n".join(" ".join(pair) for pair in value["model"]["merges"])
    merges = f"#version: 0.2\n{lines}\n"
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(merges)
    for prefix, begins in itertools.product((False, True), (False, True)):
        config = {"tokenizer_class": name, "add_prefix_space": prefix, "add_bos_token": begins}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        theirs = getattr(transformers, name).from_pretrained(tmp_path)
        built = bpe_file.build_tokenizer(name, config, vocabulary, merges, {})
        special = bpe_file.list_special_tokens(name, config, vocabulary)
        ours = TokenizerBackend.from_json(json.dumps(built), special)
        for text, is_whole in itertools.product(TEXTS, (True, False)):
            expected = theirs(text, add_special_tokens=is_whole).input_ids
            assert ours.encode(text, limits=EncodingLimits(has_special=is_whole)) == [*expected]


@pytest.mark.parametrize("kind", bpe_file._CLASSES)
def test_models_have_the_class_of_transformers(kind: str) -> None:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    assert bpe_file._CLASSES[kind] == TOKENIZER_MAPPING_NAMES[kind]
