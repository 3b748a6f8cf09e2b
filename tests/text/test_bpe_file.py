"""Tokenizers of vocab.json and merges.txt: by their class, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.errors import ModelError, UnrunnableError
from clowder_aimage.model.text.bpe_file import find_class
from clowder_aimage.model.text.prefix_space import set_prefix_space
from tests.text.mlx_models import load, text_of, write
from tests.text.tiny_text import write_model

END = "<|im_end|>"


def split_tokenizer(directory: Path, **config: Any) -> Path:
    """Replace tokenizer.json of a model by the two files."""
    path = directory / "tokenizer.json"
    value = json.loads(path.read_text("utf-8"))
    path.unlink()
    (directory / "vocab.json").write_text(json.dumps(value["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in value["model"]["merges"])
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    added = {token["content"]: token["id"] for token in value["added_tokens"]}
    (directory / "added_tokens.json").write_text(json.dumps(added))
    place = directory / "tokenizer_config.json"
    fields = {**json.loads(place.read_text("utf-8")), **config}
    place.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return directory


def encode(model: Any, text: str) -> list[int]:
    tokens: list[int] = model._encode(text, has_special=True)
    return tokens


def test_the_class_decides_how_texts_are_split(tmp_path: Path) -> None:
    whole = load(write_model(tmp_path / "whole", "qwen2"))
    text = f"the red ball, 12345 I'll{END} e\u0301 y"
    split: dict[str, list[int]] = {}
    for name in ("GPT2TokenizerFast", "Qwen2Tokenizer"):
        directory = split_tokenizer(write_model(tmp_path / name, "qwen2"), tokenizer_class=name)
        model = load(directory)
        split[name] = encode(model, text)
        assert text_of(write(model)) == text_of(write(whole))
    assert split["GPT2TokenizerFast"] == encode(whole, text) != split["Qwen2Tokenizer"]


def test_the_model_decides_if_no_class_is_named(tmp_path: Path) -> None:
    model = load(split_tokenizer(write_model(tmp_path / "m", "qwen2"), tokenizer_class=None))
    assert encode(model, "12") == [*encode(model, "1"), *encode(model, "2")]


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({"add_bos_token": True, "bos_token": END}, END, "l"),
        ({"add_eos_token": True, "eos_token": {"content": END}}, "b", END),
        ({"add_prefix_space": True}, "Ġ", "l"),
    ],
)
def test_ends_and_spaces_are_added_as_stated(
    tmp_path: Path, config: dict[str, Any], first: str, last: str
) -> None:
    stated = {"tokenizer_class": "GPT2Tokenizer", **config}
    model = load(split_tokenizer(write_model(tmp_path / "m", "qwen2"), **stated))
    tokens = [model._backend.find_text(token) for token in encode(model, "ball")]
    assert tokens[0].startswith(first) and tokens[-1].endswith(last)


@pytest.mark.parametrize(
    ("config", "model_type", "said"),
    [
        ({"tokenizer_class": "CohereTokenizer"}, "cohere", "of the class 'CohereTokenizer', which"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2", "of the class 'PreTrained"),
        ({"tokenizer_class": 5}, "qwen2", "of the class 5"),
        ({}, "llama", "whose class is not stated"),
    ],
)
def test_unknown_classes_are_refused(config: dict[str, Any], model_type: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        find_class(config, model_type)


def test_added_tokens_with_other_ids_are_refused(tmp_path: Path) -> None:
    directory = split_tokenizer(
        write_model(tmp_path / "m", "qwen2"), tokenizer_class="Qwen2Tokenizer"
    )
    path = directory / "added_tokens.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "<new>": 390}))
    with pytest.raises(UnrunnableError, match="the added token '<new>' cannot have the id 390"):
        load(directory)


BYTES: Any = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPLIT: Any = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, BYTES]}
SYMBOL: Any = {"type": "Metaspace", "replacement": "_", "add_prefix_space": True}


@pytest.mark.parametrize(
    ("name", "kind", "stated", "splits", "expected"),
    [
        ("GPT2TokenizerFast", "x", True, BYTES, '"add_prefix_space": true'),
        ("Qwen2Tokenizer", "x", True, SPLIT, '"add_prefix_space": true'),
        (None, "roberta", True, BYTES, '"add_prefix_space": true'),
        ("RobertaTokenizer", "x", False, BYTES, None),
        ("RobertaTokenizer", "x", None, BYTES, None),
        ("PreTrainedTokenizerFast", "x", True, BYTES, None),
        ("XLMRobertaTokenizer", "x", False, SYMBOL, '"prepend_scheme": "never"'),
        (None, "camembert", True, SYMBOL, '"prepend_scheme": "always"'),
        ("LlamaTokenizer", "x", False, SYMBOL, None),
    ],
)
def test_the_space_before_a_text_is_that_of_the_configuration(
    name: str | None, kind: str, stated: bool | None, splits: Any, expected: str | None
) -> None:
    value = json.loads(json.dumps({"pre_tokenizer": splits}))
    config = {"tokenizer_class": name, "add_prefix_space": stated}
    assert set_prefix_space(value, config, kind) is (expected is not None)
    assert (expected or json.dumps(splits)) in json.dumps(value)


def test_a_model_has_the_space_of_its_configuration(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model") / "tokenizer_config.json"
    fields = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields))
    model = load(path.parent)
    assert encode(model, "word") == encode(model, " word")
