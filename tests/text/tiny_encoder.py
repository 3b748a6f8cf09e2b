"""Tiny encoders with random weights and real tokenizers, made without a network.

Directories are those of sentence-transformers. The widths are as small as the forms permit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

KINDS = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "electra")
WORD_PIECE = ("bert", "mpnet", "distilbert", "electra")
WIDTH, LAYERS, HEADS, INNER, POSITIONS = 24, 2, 3, 40, 60
_CLASSES = dict(
    zip(
        KINDS,
        ("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "DistilBert", "Electra"),
        strict=True,
    )
)
# Texts of all lengths and scripts; the last two exceed the positions
TEXTS = (
    "a",
    "the red ball",
    "The RED Ball is on the table!",
    "x" * 300,
    "🙂🎈 party",
    "東京は日本の首都です",
    "Größe, été, naïve, Привет",
    "e\u0301 combining and \u200b zero width",
    "[SEP] </s> <mask> [MASK] <pad> inside",
    "  spaces \t and\nlines  ",
    "1234567890 3.14 $%&",
    "one two three " * 5,
    "the blue cube under the chair " * 30,
    "ball " * 400,
)
_CORPUS = """the red ball is on the table and the blue cube is under the chair
a small green circle at the top left of a large yellow square in the middle of the picture
one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9
Größe, été, naïve, 東京は日本, Привет, 🙂🎈 ! ? . , : ; $ %
"""
Weights = dict[str, npt.NDArray[np.float32]]


def write_encoder(
    directory: Path, kind: str = "bert", seed: int = 0, *, pooling: Any = "mean", **config: Any
) -> Path:
    """Write a model of a kind and return its directory.

    pooling: a mode or several; None states no pooling. config: further fields of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer, special = make_tokenizer(kind)
    tokenizer.save(str(directory / "tokenizer.json"))
    name = {"electra": "Bert", "bert": "Bert"}.get(kind, _CLASSES[kind])
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": f"{name}Tokenizer", "model_max_length": 40, **special},
    )
    fields = make_config(kind, tokenizer.get_vocab_size()) | config
    write_json(directory / "config.json", fields)
    save_file(make_weights(kind, fields, seed), directory / "model.safetensors")
    if pooling is not None:
        write_modules(directory, pooling)
    return directory


def write_modules(directory: Path, pooling: Any = "mean", *more: str) -> None:
    """State a pooling, and further modules by their classes, whose folders are numbered."""
    names = ["Transformer", "Pooling", *more]
    write_json(
        directory / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": f"{index}_{name}" if index else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for index, name in enumerate(names)
        ],
    )
    write_json(
        directory / "1_Pooling/config.json",
        {"word_embedding_dimension": WIDTH, "pooling_mode": pooling},
    )


def write_dense(
    directory: Path, inputs: int, outputs: int, activation: str = "activation.Tanh", **more: Any
) -> None:
    """Write a module Dense with random weights into its folder."""
    draw = np.random.default_rng(outputs)
    fields = {"in_features": inputs, "out_features": outputs, "bias": True, **more}
    path = f"torch.nn.modules.{activation}"
    write_json(directory / "config.json", fields | {"activation_function": path})
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    shapes |= {"linear.bias": (outputs,)} if fields["bias"] else {}
    has_matrix = more.get("use_residual") and inputs != outputs
    shapes |= {"residual.weight": (outputs, inputs)} if has_matrix else {}
    save_file(
        {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
        directory / "model.safetensors",
    )


def make_tokenizer(kind: str) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer of a kind, and its special tokens by role."""
    is_bert = kind in ("bert", "distilbert", "electra")
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if not is_bert:
        texts = ["<s>", "<pad>", "</s>", "[UNK]" if kind == "mpnet" else "<unk>", "<mask>"]
    roles = (
        ("pad", "unk", "cls", "sep", "mask") if is_bert else ("cls", "pad", "sep", "unk", "mask")
    )
    special = {f"{role}_token": text for role, text in zip(roles, texts, strict=True)}
    tokenizer = _TRAINED[kind in WORD_PIECE, kind == "roberta"](special, texts)
    cls, sep = (
        (text, tokenizer.token_to_id(text) or 0)
        for text in (special["cls_token"], special["sep_token"])
    )
    tokenizer.post_processor = (
        processors.RobertaProcessing(sep, cls, add_prefix_space=False)
        if kind == "roberta"
        else processors.TemplateProcessing(
            single=f"{cls[0]} $A {sep[0]}", special_tokens=[cls, sep]
        )
    )
    # As in published files: of the last use, to be ignored
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=9)
    return tokenizer, special


def _train_word_piece(special: dict[str, str], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=special["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=220, special_tokens=texts, show_progress=False, continuing_subword_prefix="##"
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return tokenizer


def _train_bpe(_: dict[str, str], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=texts,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return tokenizer


def _train_unigram(special: dict[str, str], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=180,
        special_tokens=texts,
        unk_token=special["unk_token"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    return tokenizer


# By: is WordPiece, is byte-level BPE
_TRAINED = {
    (True, False): _train_word_piece,
    (False, True): _train_bpe,
    (False, False): _train_unigram,
}


def make_config(kind: str, vocabulary: int) -> dict[str, Any]:
    """Return config.json."""
    fields: dict[str, Any] = {
        "architectures": [f"{_CLASSES[kind]}Model"],
        "model_type": kind,
        "vocab_size": vocabulary,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 1 if kind in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0,
        "hidden_dropout_prob": 0.1,
    }
    if kind == "distilbert":
        return fields | {
            "dim": WIDTH,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "hidden_dim": INNER,
            "activation": "gelu",
        }
    return fields | {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        **({"type_vocab_size": 2} if kind in ("bert", "electra") else {}),
        **({"type_vocab_size": 1} if kind in ("roberta", "xlm-roberta", "camembert") else {}),
        **({"embedding_size": 16} if kind == "electra" else {}),
        **({"relative_attention_num_buckets": 32} if kind == "mpnet" else {}),
    }


def make_weights(kind: str, config: dict[str, Any], seed: int) -> Weights:
    """Return the tensors by Hugging Face's names, in float32."""
    draw = np.random.default_rng(seed)
    narrow = config.get("embedding_size", WIDTH)

    def random(*shape: int) -> npt.NDArray[np.float32]:
        return draw.standard_normal(shape).astype(np.float32) * np.float32(0.3)

    weights = {
        "embeddings.word_embeddings.weight": random(config["vocab_size"], narrow) * 3,
        "embeddings.position_embeddings.weight": random(config["max_position_embeddings"], narrow),
    }
    if count := config.get("type_vocab_size"):
        weights["embeddings.token_type_embeddings.weight"] = random(count, narrow)
    if kind == "mpnet":
        weights["encoder.relative_attention_bias.weight"] = random(32, HEADS) * 3
    names = _LAYER[kind] if kind in _LAYER else _LAYER["bert"]
    linear = dict.fromkeys(names[:4], (WIDTH, WIDTH))
    linear |= {names[4]: (INNER, WIDTH), names[5]: (WIDTH, INNER)}
    prefix = "transformer" if kind == "distilbert" else "encoder"
    norms = {"embeddings.LayerNorm": narrow}
    for index in range(config.get("num_hidden_layers") or config["n_layers"]):
        layer = f"{prefix}.layer.{index}."
        for name, shape in linear.items():
            weights |= {
                layer + name + ".weight": random(*shape),
                layer + name + ".bias": random(shape[0]),
            }
        norms |= {layer + name: WIDTH for name in names[6:]}
    for name, width in norms.items():
        weights |= {f"{name}.weight": 1 + random(width), f"{name}.bias": random(width)}
    if narrow != WIDTH:
        weights |= {
            "embeddings_project.weight": random(WIDTH, narrow),
            "embeddings_project.bias": random(WIDTH),
        }
    return weights


# Names of the parts of a layer: query, key, value, output, two of the feed-forward network, norms
_LAYER = {
    "bert": (
        *(f"attention.self.{part}" for part in ("query", "key", "value")),
        *("attention.output.dense", "intermediate.dense", "output.dense"),
        *("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    "mpnet": (
        *(f"attention.attn.{part}" for part in "qkvo"),
        *("intermediate.dense", "output.dense"),
        *("attention.LayerNorm", "output.LayerNorm"),
    ),
    "distilbert": (
        *(f"attention.{part}_lin" for part in ("q", "k", "v", "out")),
        *("ffn.lin1", "ffn.lin2", "sa_layer_norm", "output_layer_norm"),
    ),
}


def write_json(path: Path, value: Any) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
