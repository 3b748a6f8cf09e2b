"""A GGUF model whose tokens are the 256 bytes, and whose weights are zeros: any text is as likely.

llama.cpp loads it in some milliseconds, and prepares a grammar for it as for any model.
Format: ggml-org/ggml, docs/gguf.md, "File Structure".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from clowder_aimage.model.text.token_table import BYTES

CONTEXT = 1024  # tokens
_WIDTH, _ALIGNMENT = 32, 32
# Not of formats/gguf_header.py, whose import takes a third of the time of a process
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9  # enum gguf_metadata_value_type
_NORMAL, _CONTROL = 1, 3  # enum llama_token_type
_F32 = 0  # enum ggml_type
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def build_byte_model() -> bytes:
    """Return the bytes of the file."""
    tokens = [*sorted(BYTES, key=lambda character: BYTES[character]), "<s>", "</s>"]
    shapes = _list_shapes(len(tokens))
    pairs = _list_metadata(tokens)
    infos, offset = [], 0
    for name, shape in shapes.items():
        sides = b"".join(struct.pack("<Q", side) for side in shape)
        infos.append(_text(name) + _number(len(shape)) + sides + struct.pack("<IQ", _F32, offset))
        offset += 4 * math.prod(shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join((*pairs, *infos))
    return head + bytes(-len(head) % _ALIGNMENT) + bytes(offset)


def _list_shapes(count: int) -> dict[str, tuple[int, ...]]:
    matrices = {f"blk.0.{name}.weight": (_WIDTH, _WIDTH) for name in _MATRICES}
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    vectors = {f"{name}.weight": (_WIDTH,) for name in norms}
    return {"token_embd.weight": (_WIDTH, count), **matrices, **vectors}


def _list_metadata(tokens: Sequence[str]) -> list[bytes]:
    count = len(tokens)
    numbers = {
        "llama.context_length": CONTEXT,
        "llama.embedding_length": _WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": _WIDTH,
        "llama.attention.head_count": 1,
        "llama.rope.dimension_count": _WIDTH,
        "tokenizer.ggml.bos_token_id": count - 2,
        "tokenizer.ggml.eos_token_id": count - 1,
    }
    texts = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
    }
    kinds = [_NORMAL] * (count - 2) + [_CONTROL] * 2
    epsilon = struct.pack("<f", 1e-5)
    return [
        *(_pair(key, _STRING, _text(value)) for key, value in texts.items()),
        *(_pair(key, _UINT32, _number(value)) for key, value in numbers.items()),
        _pair("llama.attention.layer_norm_rms_epsilon", _FLOAT32, epsilon),
        _list("tokenizer.ggml.tokens", _STRING, [_text(token) for token in tokens]),
        _list("tokenizer.ggml.token_type", _INT32, [_number(kind) for kind in kinds]),
        # One at least is required
        _list("tokenizer.ggml.merges", _STRING, [_text("a a")]),
    ]


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + _number(kind) + value


def _list(key: str, kind: int, items: Sequence[bytes]) -> bytes:
    return _pair(key, _ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _number(value: int) -> bytes:
    return struct.pack("<I", value)
