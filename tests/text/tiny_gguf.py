"""GGUF files of tiny language models, by the package ``gguf``.

Names of tensors: gguf-py/gguf/tensor_mapping.py of llama.cpp. The rotary position embedding of
``llama`` pairs neighbours in GGUF and halves in Transformers, so its rows are permuted, as by
convert_hf_to_gguf.py (LlamaModel.permute).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

_Q8_0 = gguf.GGMLQuantizationType.Q8_0
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # gguf.TokenType


def write_gguf(path: Path, directory: Path, *, quantized: bool = False, **metadata: Any) -> Path:
    """Write a Transformers directory as GGUF in F32, or its matrices in Q8_0, and return the path.

    metadata: Further scalars, with ``__`` for a point; ``arch`` in front of a key is replaced.
    """
    config = json.loads((directory / "config.json").read_bytes())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    _add_config(writer, config)
    _add_tokenizer(writer, directory, config)
    for key, value in metadata.items():
        _add(writer, key.replace("__", ".").replace("arch.", f"{kind}.", 1), value)
    for name, tensor in _tensors(directory, config).items():
        if quantized and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor, _Q8_0), raw_dtype=_Q8_0)
        else:
            writer.add_tensor(name, tensor)
    _finish(writer)
    return path


def write_lora(path: Path, directory: Path, *, seed: int = 1, scale: float = 1.0) -> Path:
    """Write an adapter of rank 4 for the queries and the values of such a directory."""
    config = json.loads((directory / "config.json").read_bytes())
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0 * scale)
    draw = np.random.default_rng(seed)
    for name, tensor in _tensors(directory, config).items():
        if name.endswith(("attn_q.weight", "attn_v.weight")):
            rows, columns = tensor.shape
            for part, shape in (("a", (4, columns)), ("b", (rows, 4))):
                values = draw.standard_normal(shape) / 2
                writer.add_tensor(f"{name}.lora_{part}", values.astype(np.float32))
    _finish(writer)
    return path


def split_gguf(path: Path, parts: int) -> list[Path]:
    """Split a file as llama.cpp's gguf-split does, beside it; the metadata is in the first part."""
    reader = gguf.GGUFReader(path)
    groups = np.array_split(np.arange(len(reader.tensors)), parts)
    made = []
    for number, group in enumerate(groups):
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{parts:05}.gguf")
        architecture = reader.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(part, architecture)
        if number == 0:
            _copy_fields(writer, reader)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for index in group:
            tensor = reader.tensors[int(index)]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _finish(writer)
        made.append(part)
    return made


def write_projector(path: Path) -> Path:
    """Write what looks like an encoder of pictures for another model."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    _finish(writer)
    return path


def _copy_fields(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    stored = json.loads((directory / "tokenizer.json").read_bytes())
    texts = json.loads((directory / "tokenizer_config.json").read_bytes())
    vocabulary = dict(stored["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary.values(), _NORMAL)
    for token in stored["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        kinds[token["id"]] = _CONTROL if token["special"] else _USER
    names = {number: text for text, number in vocabulary.items()}
    count = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(count)])
    writer.add_token_types([kinds.get(number, _UNUSED) for number in range(count)])
    merges = stored["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    for name in ("bos", "eos", "pad"):
        if (text := texts[f"{name}_token"]) is not None:
            getattr(writer, f"add_{name}_token_id")(vocabulary[text])
    writer.add_add_bos_token(texts["bos_token"] is not None)
    writer.add_chat_template(texts["chat_template"])


def _tensors(directory: Path, config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors by GGUF's names."""
    arch = {"qwen3": gguf.MODEL_ARCH.QWEN3, "qwen2": gguf.MODEL_ARCH.QWEN2}.get(
        config["model_type"], gguf.MODEL_ARCH.LLAMA
    )
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    for name, value in load_file(directory / "model.safetensors").items():
        if arch == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = value.shape[0] // config["head_dim"]
            value = _permute(value, heads)
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        tensors[known] = value
    return tensors


def _permute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bert(path: Path, words: str, *, seed: int = 0, **metadata: Any) -> Path:
    """Write a random encoder with a WordPiece vocabulary of these words, and return the path."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *(f"\u2581{word}" for word in words.split())]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL] * len(special) + [_NORMAL] * (len(tokens) - len(special)))
    writer.add_token_type_count(2)
    for name, number in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(number)
    for key, value in metadata.items():
        _add(writer, key.replace("arch__", "bert."), value)
    draw = np.random.default_rng(seed)
    layer = "blk.0."
    shapes = {
        "token_embd": (len(tokens), 32),
        "position_embd": (128, 32),
        "token_types": (2, 32),
        **{f"{layer}attn_{part}": (32, 32) for part in ("q", "k", "v", "output")},
        f"{layer}ffn_up": (64, 32),
        f"{layer}ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        values = draw.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
        if name.startswith(layer):
            writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))
    for name in ("token_embd_norm", f"{layer}attn_output_norm", f"{layer}layer_output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(32, np.float32))
    _finish(writer)
    return path
