"""The model of bytes by which grammars are tried, read as any GGUF file."""

from __future__ import annotations

import io
import math

from clowder_aimage.formats.gguf_header import read_header
from clowder_aimage.model.llama.byte_model import CONTEXT, build_byte_model
from clowder_aimage.model.text.token_table import BYTES


def test_the_model_has_a_token_for_each_byte() -> None:
    raw = build_byte_model()
    header = read_header(io.BytesIO(raw), len(raw), is_whole=True)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.context_length"] == CONTEXT
    tokens = header.metadata["tokenizer.ggml.tokens"].items
    assert len(tokens) == len(BYTES) + 2 == 258
    assert header.metadata["tokenizer.ggml.eos_token_id"] == 257


def test_the_weights_are_zeros_of_the_declared_shapes() -> None:
    raw = build_byte_model()
    header = read_header(io.BytesIO(raw), len(raw))
    count = sum(math.prod(tensor.shape) for tensor in header.tensors)
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors) == 11
    assert raw[-4 * count :] == bytes(4 * count) and len(raw) < 80_000
