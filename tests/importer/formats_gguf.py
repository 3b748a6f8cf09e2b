"""Write GGUF files after docs/gguf.md, including invalid ones, without the gguf package."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from clowder_aimage.formats.gguf_header import TENSORS

UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 2, 4, 5, 6, 7, 8, 9, 10
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
Pair = tuple[str, int, Any]
Tensor = tuple[str, int, tuple[int, ...]]  # name, number of the type, shape in file order

LLAMA: list[Pair] = [
    ("general.architecture", STRING, "llama"),
    ("general.name", STRING, "Small Llama"),
    ("general.license", STRING, "apache-2.0"),
    ("general.file_type", UINT32, 15),
    ("llama.context_length", UINT32, 4096),
    ("llama.rope.freq_base", FLOAT32, 10000.0),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<s>", "größe", ""])),
    ("tokenizer.ggml.scores", ARRAY, (FLOAT32, [0.0, -1.0, 2.0])),
    ("tokenizer.ggml.add_bos_token", BOOL, 1),
]
WEIGHTS: list[Tensor] = [
    ("token_embd.weight", 12, (256, 3)),
    ("blk.0.attn_norm.weight", 0, (5,)),
    ("output.weight", 8, (32, 2)),
]
ADAPTER: list[Pair] = [
    ("general.type", STRING, "adapter"),
    ("general.architecture", STRING, "llama"),
    ("adapter.type", STRING, "lora"),
    ("adapter.lora.alpha", FLOAT32, 16.0),
    ("general.base_model.count", UINT32, 1),
    ("general.base_model.0.name", STRING, "Llama 2 7B"),
]
LORA: list[Tensor] = [
    ("blk.0.attn_q.weight.lora_a", 0, (16, 4)),
    ("blk.0.attn_q.weight.lora_b", 0, (4, 16)),
    ("blk.0.ffn_up.weight.lora_a", 0, (16, 4)),
    ("blk.0.ffn_up.weight.lora_b", 0, (4, 32)),
]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value_of(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, items = value
        head = struct.pack("<IQ", inner, len(items))
        return head + b"".join(value_of(inner, item) for item in items)
    return struct.pack("<" + _CODES[kind], value)


def pair_of(pair: Pair) -> bytes:
    key, kind, value = pair
    return text(key) + struct.pack("<I", kind) + value_of(kind, value)


def size_of(tensor: Tensor) -> int:
    _, block, size = TENSORS[tensor[1]]
    count = 1
    for dimension in tensor[2]:
        count *= dimension
    return count // block * size


def info_of(tensor: Tensor, offset: int) -> bytes:
    name, kind, shape = tensor
    rank = struct.pack("<I", len(shape))
    return text(name) + rank + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


def padded(raw: bytes, alignment: int) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def gguf(
    pairs: Sequence[Pair] = tuple(LLAMA),
    tensors: Sequence[Tensor] = tuple(WEIGHTS),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Return a whole file; its data is a running number."""
    if alignment != 32:
        pairs = [*pairs, ("general.alignment", UINT32, alignment)]
    infos, data = b"", b""
    for tensor in tensors:
        infos += info_of(tensor, len(data))
        data = padded(data + bytes(i % 251 for i in range(size_of(tensor))), alignment)
    head = magic + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(map(pair_of, pairs)) + infos
    return padded(head, alignment) + data


def split(count: int, tensors: Sequence[Tensor] = tuple(WEIGHTS)) -> list[bytes]:
    """Return the parts of a model as gguf-split writes them, metadata in the first only."""
    share = -(-len(tensors) // count)
    parts = []
    for number in range(count):
        said = [
            ("split.no", UINT16, number),
            ("split.count", UINT16, count),
            ("split.tensors.count", INT32, len(tensors)),
        ]
        some = tensors[number * share : (number + 1) * share]
        parts.append(gguf([*LLAMA, *said] if number == 0 else said, some))
    return parts
