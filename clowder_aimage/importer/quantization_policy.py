"""Policy of quantization: a table of tensors, and the rule of expert groups.

What is kept is small or precious: quantizing it saves next to nothing and costs pictures. The
table is that of ollama's x/create, with the routers of mixtures of experts added.
"""

from __future__ import annotations

import re

from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.weight import FLOATS, Weight

QUANTIZABLE = ("text_encoder", "transformer")  # a VAE makes pixels: its errors would be seen
BARE = "transformer"  # what a type alone is about; so is a model that is a single part
LEAST = 1024  # elements
UNFIT = "rows no multiple of"  # and a group size

# Why a tensor is kept, by what its name holds; the first that fits is said.
_NAMES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("norm", re.compile(r"norm")),
    ("embedder", re.compile(r"embed")),
    ("final layer", re.compile(r"final_layer|^(.*\.)?lm_head\.")),
    ("pad token", re.compile(r"pad_token")),
    ("router", re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)\.")),
)
_GROUP = re.compile(
    r"((?:.*\.)?layers\.\d+\.(?:mlp\.(?:experts|shared_experts)|block_sparse_moe\.experts))\..+"
)


def reason_to_keep(weight: Weight, quantization: Quantization) -> str | None:
    """Why a tensor is not to be quantized; None where it is."""
    if weight.dtype not in FLOATS:
        return f"{weight.dtype} values"
    for reason, pattern in _NAMES:
        if pattern.search(weight.name):
            return reason
    if len(weight.shape) != 2:
        return f"{len(weight.shape)} dimensions" if len(weight.shape) != 1 else "1 dimension"
    if weight.elements < LEAST:
        return f"under {LEAST} elements"
    if not quantization.fits(weight.shape):
        return f"{UNFIT} {quantization.group_size}"
    return None


def expert_group(name: str) -> str | None:
    """Return the prefix of the experts that a tensor is one of.

    They share a blob for each layer (ollama, "Tensor Blob Format": packed blobs).
    """
    match = _GROUP.fullmatch(name)
    return match[1] if match else None
