"""GGUF of image models is decoded exactly when it is packed; diffusers decodes it in float16."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pytest.importorskip("diffusers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()


@pytest.mark.parametrize("kind", TYPES)
def test_values_of_diffusers_are_within_a_thousandth(kind: str) -> None:
    """Of the largest value; ours have all bits (tests/importer/test_gguf_weights.py)."""
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(1)
    codes = random.integers(0, 40, (8, 512 // block * size), np.uint8)
    exact = gguf.dequantize(codes, type_)
    parameter = GGUFParameter(torch.from_numpy(codes), quant_type=type_)
    other = dequantize_gguf_tensor(parameter).float().numpy()
    assert np.abs(other - exact).max() <= 2**-10 * np.abs(exact).max()
