"""The configuration of an encoder: what differs between BERT, RoBERTa, MPNet, DistilBERT, ELECTRA.

Source: transformers, ``configuration_*.py`` and ``modeling_*.py`` of these models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.embedding_recipe import EmbeddingRecipe, Read, read_recipe
from clowder_aimage.tensor.config_fields import MAX_LAYERS, ConfigFields

# The first part of the names of tensors in a model with a head, by ``model_type``
_PREFIXES = {
    "bert": "bert",
    "camembert": "roberta",
    "distilbert": "distilbert",
    "electra": "electra",
    "mpnet": "mpnet",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
}
# Their positions are counted from the padding token, which has one too
_COUNTED_FROM_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
# Their tokenizer is WordPiece, which a file of its tokens is enough for
_WORDS = ("bert", "distilbert", "electra", "mpnet")
_WORD_CLASSES = re.compile(r"(Bert|DistilBert|Electra|MPNet)Tokenizer(Fast)?")
_WITHOUT_TYPES = ("distilbert", "mpnet")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
# DistilBERT's own names of the fields
_DISTIL = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
# Of distances between tokens (MPNet)
BUCKETS = 32
# Tokens of a text: two special ones and another
_LEAST = 3
_MAX_TOKENS = 1 << 21
_MAX_POSITIONS = 1 << 17
_MAX_WIDTH = 1 << 15
# Classes whose states are those of the network alone
_PLAIN = re.compile(r"(Model|ForMaskedLM|ForPreTraining)$")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Numbers of a network.

    positions: rows of the table of positions. padding: the token from whose number positions are
    counted, None if they begin with 0. types: rows of the table of token types, 0 without one.
    embedding: the width of the tables. has_distances: attention depends on the distances of tokens.
    """

    kind: str
    tokens: int
    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    padding: int | None
    types: int
    embedding: int
    has_distances: bool
    activation: str
    eps: float

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of a text."""
        return self.positions - (0 if self.padding is None else self.padding + 1)

    @property
    def prefix(self) -> str:
        """Return the first part of the names of tensors in a model with a head."""
        return f"{_PREFIXES[self.kind]}."

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """Return the configuration in ``config.json``. Raises ModelError."""
        kind = str(config.get("model_type"))
        if kind not in _PREFIXES:
            raise ModelError(f"config.json: {kind!r:.80} is not one of {', '.join(_PREFIXES)}")
        names = _DISTIL if kind == "distilbert" else {}
        fields = ConfigFields("config.json", config)
        _check_form(fields)

        def count(key: str, most: int) -> int:
            return fields.get_integer(names.get(key, key), maximum=most)

        width, heads = count("hidden_size", _MAX_WIDTH), count("num_attention_heads", _MAX_WIDTH)
        if width % heads:
            raise ModelError(f"config.json: {heads} heads do not divide a width of {width}")
        activation = fields.get_text(names.get("hidden_act", "hidden_act"), "gelu")
        if activation not in ACTIVATIONS:
            raise fields.refuse("hidden_act", f"unsupported, expected {', '.join(ACTIVATIONS)}")
        positions = count("max_position_embeddings", _MAX_POSITIONS)
        return cls(
            kind,
            count("vocab_size", _MAX_TOKENS),
            width,
            count("num_hidden_layers", MAX_LAYERS),
            heads,
            count("intermediate_size", _MAX_WIDTH),
            positions,
            _find_padding(fields, kind, positions),
            0 if kind in _WITHOUT_TYPES else fields.get_integer("type_vocab_size", 2),
            fields.get_integer("embedding_size", width, maximum=_MAX_WIDTH)
            if kind == "electra"
            else width,
            kind == "mpnet",
            activation,
            1e-12 if names else fields.get_positive("layer_norm_eps", 1e-12, maximum=1.0),
        )


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if ``config.json`` is that of an encoder of this package."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in _PREFIXES


def find_word_kind(config: Mapping[str, Any], kind: object) -> str | None:
    """Return the kind of encoder that has a WordPiece tokenizer of its own, or None.

    config: tokenizer_config.json, whose class decides. kind: that of the network.
    """
    name = config.get("tokenizer_class")
    if name is None:
        return str(kind) if kind in _WORDS else None
    match = _WORD_CLASSES.fullmatch(str(name))
    return match and match[1].lower()


def read_encoder(
    config: Mapping[str, Any], read: Read, context: int | None = None
) -> tuple[EncoderConfig, EmbeddingRecipe]:
    """Return the network and the recipe of a model, with the maximum length of a text.

    ``read`` returns the bytes of a file, or None. Without a pooling in the files it is the mean, as
    in sentence-transformers. Raises ModelError.
    """
    encoder, recipe = EncoderConfig.read(config), read_recipe(read)
    if not recipe.has_pooling:
        _check_head(config)
    limits = (encoder.context, recipe.max_length, context)
    most = min(limit for limit in limits if limit is not None)
    if most < _LEAST:
        raise ModelError(f"texts of {most} tokens have no room for special tokens")
    return encoder, replace(recipe, max_length=most)


def _check_head(config: Mapping[str, Any]) -> None:
    """Refuse a network that was trained for something other than its states."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    if name and not _PLAIN.search(str(name)):
        raise ModelError(f"{name!s:.80} computes no embeddings: its files state no pooling")


def _check_form(fields: ConfigFields) -> None:
    """Refuse what would be another network."""
    fields.check_value("position_embedding_type", "absolute")
    fields.check_value("is_decoder", False)
    fields.check_value("add_cross_attention", False)
    fields.check_value("relative_attention_num_buckets", BUCKETS)


def _find_padding(fields: ConfigFields, kind: str, positions: int) -> int | None:
    if kind not in _COUNTED_FROM_PADDING:
        return None
    padding = 1 if kind == "mpnet" else fields.get_raw("pad_token_id", 1)
    if type(padding) is not int or not 0 <= padding < positions - 1:
        raise fields.refuse("pad_token_id", f"must be a number from 0 to {positions - 2}")
    return padding
