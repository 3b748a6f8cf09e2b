"""GGUF of image models is decoded exactly when it is packed; diffusers decodes it in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.create import create
from clowder_aimage.export import export
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.oci import Reference
from tests.adapter.vectors import TINY

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


def test_the_transformer_of_a_gguf_is_that_of_diffusers(tmp_path: Path) -> None:
    """Loaded with ``GGUFQuantizationConfig`` from the file that an AImage was packed from."""
    import diffusers
    from safetensors.torch import load_file

    layout, root = ImageLayout(tmp_path / "store"), TINY / "transformer"
    create(layout, Reference.parse("tiny"), TINY)
    export(layout, Reference.parse("tiny"), tmp_path / "split", layout="comfyui")
    tensors = load_file(tmp_path / "split/diffusion_models/z_image.safetensors")
    path = tmp_path / "own.gguf"
    writer, coded = gguf.GGUFWriter(path, "lumina2"), 0
    for name, tensor in tensors.items():
        value = tensor.float().numpy()
        if name.endswith("feed_forward.w2.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
            coded += 1
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    like = Reference.parse("tiny")
    aimage = create(layout, Reference.parse("own"), path, like=like).aimage
    ours: Any = load_pipeline(layout, aimage, backend="torch", dtype="float32")
    theirs = diffusers.ZImageTransformer2DModel.from_single_file(
        str(path),
        config=str(root),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
        local_files_only=True,
    )
    random = torch.Generator().manual_seed(3)
    latents = torch.randn(16, 1, 8, 8, generator=random)
    features = torch.randn(12, 32, generator=random)
    network = ours.networks.transformer.get()
    found = network(latents[:, 0], 0.4, network.build_caption(features))[:, None]
    kind = diffusers.ZImageTransformer2DModel
    exact = kind.from_pretrained(root, torch_dtype=torch.float32)
    with torch.no_grad():
        other, plain = (
            one([latents], torch.tensor([0.4]), [features], return_dict=False)[0][0]
            for one in (theirs, exact)
        )
    assert coded > 1
    largest = found.abs().max()
    assert (found - other).abs().max() <= 1e-3 * largest
    assert (found - plain).abs().max() > 4 * (found - other).abs().max()
