"""Checks of a GGUF language model before llama.cpp reads it.

llama.cpp trusts much of a file: it ends the process if a token occurs twice, and reads beyond the
end of a list that is shorter than the vocabulary. Source: ggml-org/llama.cpp, src/llama-vocab.cpp
(llama_vocab::impl::load), src/llama-model.cpp (load_hparams), src/llama-adapter.cpp; the keys are
those of docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.gguf_header import (
    FLOAT32,
    INT8,
    INT32,
    STRING,
    UINT8,
    GgufList,
    GgufTensor,
)

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_TOKENS = 1 << 21
_MAX_CONTEXT = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_HEADS = 1 << 12
_MAX_EXPERTS = 512  # LLAMA_MAX_EXPERTS
_INT32 = 1 << 31
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
# The types of vectors that llama.cpp's operations accept
_VECTORS = ("F32", "I32")
_VECTOR_NAMES = ("norm.weight", ".bias")
_REFUSED = ("I8", "I16", "I64", "F64", "Q8_1", "Q8_K")  # types of no weight
# Special tokens of a tokenizer without their keys, whose spelling is that of the format
_ASSUMED = {
    "llama": {"unknown": 0, "bos": 1, "eos": 2},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"unknown": 100, "bos": 101, "seperator": 102},
    "t5": {"eos": 1, "unknown": 2},
}
_ADDED = {"seperator": "sep"}
_KINDS = range(7)  # enum llama_token_type
_CONTROL, _USER_DEFINED = 3, 4
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_TOKEN = re.compile(r"tokenizer\.ggml\.\w+_token_id")
_WORD = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """The properties that a language model states.

    context: tokens that it was trained for. cache: bytes of keys and values of a token in float16.
    pooling: the number of the way to pool embeddings (enum llama_pooling_type), None if unstated.
    """

    architecture: str
    context: int
    layers: int
    width: int
    inner: int
    cache: int
    pooling: int | None
    tokens: tuple[bytes, ...]

    def decode_special_token(self, metadata: Mapping[str, Any], name: str) -> str:
        """Return the text of the special token ``name`` ("bos", "eos"), empty if there is none."""
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return "" if number is None else self.tokens[number].decode(errors="replace")

    def list_added_tokens(self, metadata: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the texts of control tokens and tokens that users defined, and of the former."""
        kinds = metadata.get("tokenizer.ggml.token_type")
        items = kinds.items if isinstance(kinds, GgufList) else ()
        pairs = [*zip(self.tokens, items, strict=False)]
        control, added = (
            [text.decode(errors="replace") for text, kind in pairs if kind in chosen]
            for chosen in ((_CONTROL,), (_CONTROL, _USER_DEFINED))
        )
        return added, control


class _Keys:
    """The metadata of a file, read with its types."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self.metadata, self._prefix = metadata, prefix

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self._prefix}.{key}")

    def get_number(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """Return an integer. Raises FormatError if it is missing without a default, or invalid."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        return self._check(key, value, least, most)

    def get_numbers(self, key: str, count: int, most: int) -> list[int]:
        """Return an integer of each layer, from a list or one number; zeros if it is missing."""
        value = self.get(key)
        if isinstance(value, GgufList):
            if len(value.items) < count:
                raise FormatError(
                    f"{self._prefix}.{key} has {len(value.items)} values for {count} layers"
                )
            return [self._check(key, number, 0, most) for number in value.items[:count]]
        return [0 if value is None else self._check(key, value, 0, most)] * count

    def _check(self, key: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise FormatError(
                f"{self._prefix}.{key} must be an integer from {least} to {most}, not {value!r:.60}"
            )
        return value


def check_model(metadata: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> GgufFacts:
    """Check a model; ``metadata`` is whole. Raises FormatError, ModelError."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not _WORD.fullmatch(architecture):
        raise FormatError(f"general.architecture is not a name: {architecture!r:.80}")
    keys = _Keys(metadata, architecture)
    _check_scalars(metadata, architecture)
    layers = keys.get_number("block_count", 1, _MAX_LAYERS)
    width = keys.get_number("embedding_length", 1, _MAX_WIDTH)
    inner = max(keys.get_numbers("feed_forward_length", layers, _MAX_WIDTH))
    tokens = _check_vocabulary(metadata)
    facts = GgufFacts(
        architecture,
        keys.get_number("context_length", 1, _MAX_CONTEXT),
        layers,
        width,
        inner,
        _check_attention(keys, layers, width),
        None if (pooling := keys.get("pooling_type")) is None else _parse_pooling(pooling),
        tokens,
    )
    _check_experts(keys)
    _check_tensors({tensor.name: tensor for tensor in tensors}, facts)
    return facts


def check_adapter(
    metadata: Mapping[str, Any],
    tensors: Iterable[GgufTensor],
    architecture: str,
    base: Mapping[str, GgufTensor],
) -> None:
    """Check a LoRA adapter of a model with the tensors ``base``. Raises FormatError, ModelError."""
    stated = metadata.get("general.architecture")
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise ModelError("the adapter is not a LoRA adapter in GGUF")
    if stated != architecture:
        raise ModelError(f"the adapter is for {stated!r:.60}, the model is {architecture!r}")
    alpha = metadata.get("adapter.lora.alpha")
    if type(alpha) is not float or not math.isfinite(alpha):
        raise FormatError(f"adapter.lora.alpha is not a number: {alpha!r:.60}")
    matrices = {tensor.name: tensor for tensor in tensors}
    for name, tensor in matrices.items():
        stem, _, suffix = name.rpartition(".")
        partner = matrices.get(f"{stem}.lora_{'b' if suffix == 'lora_a' else 'a'}")
        if suffix not in ("lora_a", "lora_b") or partner is None:
            raise FormatError(f"{name:.120} is not one of a pair of matrices of the adapter")
        if tensor.type not in ("F32", "F16", "BF16"):
            raise ModelError(f"{name:.120} has the type {tensor.type}, which is not supported")
        if suffix == "lora_a":
            _check_pair(stem, tensor, partner, base.get(stem))


def _check_pair(name: str, a: GgufTensor, b: GgufTensor, weight: GgufTensor | None) -> None:
    if weight is None:
        raise ModelError(f"the adapter changes {name:.120}, which the model does not have")
    is_pair = len(a.shape) == len(b.shape) == len(weight.shape) == 2 and a.shape[1] == b.shape[0]
    # llama.cpp stores the pair of the embedding transposed
    is_turned = weight.name == _EMBEDDING
    rows, columns = (b.shape[-1], a.shape[0]) if is_pair else (0, 0)
    sizes = (columns, rows) if not is_turned else (rows, columns)
    if not is_pair or a.shape[1] < 1 or (not is_turned and sizes != weight.shape):
        raise ModelError(
            f"the matrices of the adapter for {name:.120} have the shapes {a.shape} and {b.shape}, "
            f"the weight has {weight.shape}"
        )


def _check_scalars(metadata: Mapping[str, Any], architecture: str) -> None:
    """Check that numbers are finite and fit in 32 bits."""
    for key, value in metadata.items():
        if not key.startswith((f"{architecture}.", "tokenizer.")):
            continue
        for number in value.items if isinstance(value, GgufList) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise FormatError(f"{key:.100} is not a finite number: {number}")
            if type(number) is int and not -_INT32 <= number < 2 * _INT32:
                raise FormatError(f"{key:.100} is too large: {number}")


def _check_attention(keys: _Keys, layers: int, width: int) -> int:
    """Return the bytes of keys and values of a token. Raises FormatError."""
    heads = keys.get_numbers("attention.head_count", layers, _MAX_HEADS)
    groups = keys.get_numbers("attention.head_count_kv", layers, _MAX_HEADS)
    if keys.get("attention.head_count_kv") is None:
        groups = heads
    for count, group in zip(heads, groups, strict=True):
        if group and count % group:
            raise FormatError(f"{count} heads cannot share {group} heads of keys and values")
    head_count = next((count for count in heads if count), 0)
    size = width // head_count if head_count else 0
    if head_count and not size:
        raise FormatError(f"{head_count} heads do not fit in a width of {width}")
    key = keys.get_number("attention.key_length", 0, _MAX_WIDTH, size)
    value = keys.get_number("attention.value_length", 0, _MAX_WIDTH, size)
    rotated = keys.get_number("rope.dimension_count", 0, _MAX_WIDTH, key)
    if rotated % 2 or (key and rotated > key):
        raise FormatError(f"rope.dimension_count is {rotated} for heads of {key} dimensions")
    for name in ("rope.freq_base", "rope.scaling.factor"):
        base = keys.get(name)
        if base is not None and (type(base) is not float or base < 0):
            raise FormatError(f"{name} is not a positive number: {base!r:.60}")
    return 2 * sum(group * (key + value) for group in groups)


def _check_experts(keys: _Keys) -> None:
    experts = keys.get_number("expert_count", 0, _MAX_EXPERTS, 0)
    active = keys.get_number("expert_used_count", 0, _MAX_EXPERTS, 0)
    if active > experts or (experts and not active):
        raise FormatError(f"{active} of {experts} experts are used")


def _parse_pooling(value: Any) -> int:
    if type(value) is not int or value not in range(5):
        raise FormatError(f"pooling_type is not one of llama.cpp's: {value!r:.60}")
    return value


def _check_vocabulary(metadata: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return the tokens. Raises FormatError, ModelError."""
    prefix = "tokenizer.ggml."
    if not isinstance(metadata.get(f"{prefix}model"), str):
        raise ModelError("the model has no tokenizer", hint="a language model is required")
    tokens = _list(metadata, f"{prefix}tokens", STRING)
    if not tokens or not tokens.items or len(tokens.items) > _MAX_TOKENS:
        raise FormatError(f"{prefix}tokens must have 1 to {_MAX_TOKENS} tokens")
    count = len(tokens.items)
    texts = [text for text in tokens.items if text]
    if len(set(texts)) < len(texts):
        raise FormatError(f"{prefix}tokens contains a token twice")
    kinds, scores = (
        _list(metadata, f"{prefix}{name}", kind)
        for name, kind in (("token_type", INT32), ("scores", FLOAT32))
    )
    # llama.cpp reads as many values as there are tokens, beyond the end of a shorter list
    for name, numbers in (("token_type", kinds), ("scores", scores)):
        if numbers is not None and len(numbers.items) != count:
            raise FormatError(f"{prefix}{name} has {len(numbers.items)} values for {count} tokens")
    if kinds is not None and not set(kinds.items) <= set(_KINDS):
        raise FormatError(f"{prefix}token_type has an unknown type of token")
    merges = _list(metadata, f"{prefix}merges", STRING)
    if merges is not None and not all(b" " in merge[1:] for merge in merges.items):
        raise FormatError(f"{prefix}merges has an item that is not two parts")
    _list(metadata, f"{prefix}precompiled_charsmap", INT8, UINT8)
    for key, value in metadata.items():
        if _TOKEN.fullmatch(key) and (type(value) is not int or not 0 <= value < count):
            raise FormatError(f"{key:.100} is {value!r:.40}: not one of {count} tokens")
    _check_special(metadata, count)
    return tuple(tokens.items)


def _check_special(metadata: Mapping[str, Any], count: int) -> None:
    """Check the special tokens that are not stated: llama.cpp assumes some, and needs others."""
    prefix = "tokenizer.ggml."
    assumed = _ASSUMED.get(str(metadata.get(f"{prefix}model")), {})
    for name in ("bos", "eos", "unknown", "seperator"):
        is_added = metadata.get(f"{prefix}add_{_ADDED.get(name, name)}_token") is True
        number = assumed.get(name, count if is_added else 0)
        if number >= count and f"{prefix}{name}_token_id" not in metadata:
            raise FormatError(f"{prefix}{name}_token_id is missing")


def _list(metadata: Mapping[str, Any], key: str, *kinds: int) -> GgufList | None:
    value = metadata.get(key)
    if value is not None and not (isinstance(value, GgufList) and value.kind in kinds):
        raise FormatError(f"{key} is not a list of the expected type")
    return value


def _check_tensors(tensors: Mapping[str, GgufTensor], facts: GgufFacts) -> None:
    for tensor in tensors.values():
        name, shape = tensor.name, tensor.shape
        if not shape or 0 in shape or any(side >= _INT32 for side in shape):
            raise FormatError(f"{name:.120} has the shape {shape}")
        is_vector = len(shape) == 1 or name.endswith(_VECTOR_NAMES)
        if tensor.type in _REFUSED or (is_vector and tensor.type not in _VECTORS):
            raise ModelError(f"{name:.120} has the type {tensor.type}, which is not supported")
        match = _BLOCK.match(name)
        if match and int(match[1]) >= facts.layers:
            raise FormatError(f"{name:.120} is not in one of the {facts.layers} layers")
    for name in (_EMBEDDING, _OUTPUT):
        expected = (facts.width, len(facts.tokens))
        matrix = tensors.get(name)
        if matrix is None and name == _EMBEDDING:
            raise FormatError(f"the model has no tensor {name}")
        if matrix is not None and matrix.shape != expected:
            raise FormatError(
                f"{name} has the shape {matrix.shape}; {expected[1]} tokens of width {expected[0]} "
                f"require {expected}"
            )
