"""Matrices of 8-bit floats with a factor for each row, and products with them, on PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.importer.row_quantizer import quantize_rows
from clowder_aimage.model.dequantize import dequantize as dequantize_exactly
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.blob import BIAS, GLOBAL_SCALE, SCALE
from clowder_aimage.tensor.float_code import E4M3, E8M0
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import Maker, made, opened

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
ROWS, COLUMNS = 48, 96


@pytest.fixture(scope="module")
def module() -> Any:
    from clowder_aimage.model.torch import row_scaled

    return row_scaled


def draw(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.fixture
def weight(module: Any) -> Any:
    return module.RowScaledTensor.of(draw(ROWS, COLUMNS), torch.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_and_scales_are_those_of_create(module: Any, dtype: str) -> None:
    exponents = np.arange(-14, 15) if dtype == "float16" else np.arange(-127, 118)
    values = (
        draw(len(exponents), 64).clamp(-3.9, 3.9)
        * torch.ldexp(torch.tensor(1.0), torch.from_numpy(exponents))[:, None].float()
    )
    values[3] = 0
    stored = values.to(getattr(torch, dtype))
    words = stored.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else stored
    kinds = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    codes, scales = quantize_rows(np.asarray(words), kinds[dtype])
    found, factors = module.quantize_rows(stored)
    assert found.view(torch.uint8).numpy().tobytes() == codes
    by_row = np.frombuffer(scales, np.uint8).reshape(len(values), -1)[:, 0]
    assert np.array_equal(factors.numpy(), E8M0[by_row])


def test_a_product_is_that_of_the_dequantized_values(module: Any, weight: Any) -> None:
    """The card's function, which PyTorch has on a CPU too, agrees to the rounding of its result."""
    inputs = module.quantize_inputs(draw(7, COLUMNS, seed=1).bfloat16())
    exact = module.multiply_exactly(*inputs, weight.codes, weight.scales)
    left = E4M3[inputs[0].view(torch.uint8).numpy()].astype(np.float64) * inputs[1].numpy()
    right = E4M3[weight.codes.view(torch.uint8).numpy()].astype(np.float64)
    expected = left @ (right * weight.scales.numpy()[:, None]).T
    np.testing.assert_allclose(exact.numpy(), expected, rtol=1e-5, atol=1e-5)
    scaled = module.multiply_scaled(*inputs, weight.codes, weight.scales)
    assert scaled.dtype == torch.bfloat16
    np.testing.assert_allclose(scaled.float().numpy(), expected, rtol=2**-8, atol=1e-5)


def test_a_card_multiplies_with_codes(
    module: Any, weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(2, 5, COLUMNS, seed=1).bfloat16()
    exact = torch.nn.functional.linear(x, weight)
    used = []
    real = module.multiply_scaled

    def multiply(*arguments: Any) -> Any:
        used.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(module, "CUDA", "cpu")
    monkeypatch.setattr(module, "multiply_scaled", multiply)
    bias = draw(ROWS, seed=2).bfloat16()
    found = torch.nn.functional.linear(x, weight, bias)
    assert used
    assert found.shape == (2, 5, ROWS)
    assert (found - bias - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_linear_layer_is_near_the_unquantized_one(module: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)
    values, x = draw(ROWS, COLUMNS), draw(3, COLUMNS, seed=1)
    layer = torch.nn.Linear(COLUMNS, ROWS).to(kind)
    expected = torch.nn.functional.linear(x, values) + layer.bias.float()
    weight = module.RowScaledTensor.of(values, kind)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    with torch.inference_mode():
        found = layer(x.to(kind))
    assert found.dtype == kind
    error = (found.float() - expected).norm() / expected.norm()
    # Each factor is rounded by up to 2**-4
    assert error < 0.05


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38, np.nan])
def test_inputs_of_any_magnitude(module: Any, weight: Any, value: float) -> None:
    x = torch.ones(2, COLUMNS)
    x[0] = value
    found = torch.nn.functional.linear(x, weight)
    expected = torch.nn.functional.linear(x, weight.compute_values().float())
    assert torch.allclose(found[1], expected[1], rtol=1e-3, atol=1e-3)
    if np.isnan(value):
        assert found[0].isnan().all()
    elif value < 1e30:
        assert torch.allclose(found[0], expected[0], rtol=1e-3, atol=1e-29)


def test_other_operations_have_the_values(module: Any, weight: Any) -> None:
    values = weight.compute_values()
    assert torch.equal(weight.detach().to("cpu", torch.float32, copy=True), values.float())
    assert torch.equal(weight + 1, values + 1)
    assert torch.equal(torch.cat([weight, values]), torch.cat([values, values]))
    assert torch.equal(weight.split(32, 1)[1], values.split(32, 1)[1])
    assert torch.equal(
        torch.nn.functional.linear(weight, torch.eye(COLUMNS).bfloat16()),
        torch.nn.functional.linear(values, torch.eye(COLUMNS).bfloat16()),
    )
    assert weight.dtype == torch.bfloat16
    assert repr(weight) == "RowScaledTensor((48, 96), torch.bfloat16, cpu)"


def test_matrices_are_joined_and_split_by_rows(module: Any, weight: Any) -> None:
    other = module.RowScaledTensor.of(draw(16, COLUMNS, seed=3), torch.bfloat16)
    joined = torch.cat([weight, other])
    assert isinstance(joined, module.RowScaledTensor)
    x = draw(2, COLUMNS, seed=4).bfloat16()
    apart = [torch.nn.functional.linear(x, one) for one in (weight, other)]
    assert torch.equal(torch.nn.functional.linear(x, joined), torch.cat(apart, dim=1))
    first, second = joined.split((ROWS, 16))
    assert isinstance(torch.nn.Parameter(first, requires_grad=False), module.RowScaledTensor)
    assert first.codes.data_ptr() == joined.codes.data_ptr()
    assert torch.equal(second.compute_values(), other.compute_values())


@pytest.mark.no_cover
def test_a_layer_can_be_compiled(module: Any, weight: Any) -> None:
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = draw(3, COLUMNS, seed=1).bfloat16()
    with torch.inference_mode():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), layer(x))


def test_a_device_without_products_is_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module.check_fp8.cache_clear()
    module.check_fp8("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="cannot compute in fp8 on the device cuda: ") as none:
            module.check_fp8("cuda")
        assert "compute in bfloat16" in str(none.value.hint)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices 8.9 or above")

    monkeypatch.setattr(module, "multiply_exactly", refuse)
    module.check_fp8.cache_clear()
    with pytest.raises(UsageError, match=r"8\.9 or above"):
        module.check_fp8("cpu")
    monkeypatch.setattr(module, "multiply_exactly", lambda *_: torch.zeros(16, 16))
    with pytest.raises(UsageError, match="its products are wrong"):
        module.check_fp8("cpu")
    module.check_fp8.cache_clear()


@pytest.mark.parametrize("component", ["text_encoder", "transformer"])
@pytest.mark.parametrize("kind", ["int8", "mxfp8"])
def test_stored_codes_of_another_component_count_only_if_they_are_of_fp8(
    tmp_path: Path, kind: str, component: str
) -> None:
    """Others have values of the compute type there; those of a transformer are refused."""
    from clowder_aimage.model.library_choice import TorchTuning
    from clowder_aimage.model.torch.library import TorchLibrary
    from clowder_aimage.model.torch.row_scaled_weights import RowScaledWeights

    maker = Maker(FolderStore(tmp_path), component=component)
    for layer in range(3):
        maker.quantized(f"layers.{layer}.w.weight", draw(64, 64).numpy(), kind, "combined", None)
    library = TorchLibrary("cpu", torch.float32, TorchTuning(compute="fp8"))
    found = RowScaledWeights(library, opened(maker)).has("layers.1.w.weight")
    assert found == (kind == "mxfp8" or component == "transformer")


# -- dequantization of other codes


@pytest.mark.parametrize("kind", ["int4", "int8", "nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("factors", [None, (), (5,)])
def test_codes_are_dequantized_bit_for_bit(kind: str, factors: tuple[int, ...] | None) -> None:
    from clowder_aimage.model.torch.dequantize import dequantize_into

    quantization, random = Quantization.parse(kind), np.random.default_rng(1)
    codes = random.integers(0, 1 << 32, (5, 128 // quantization.per_word), np.uint32)
    shape = (5, 128 // quantization.group_size)
    # every E8M0 but infinity, and no NaN of E4M3
    scales: Any = random.integers(0, 127 if kind == "nvfp4" else 255, shape, np.uint8)
    biases = None
    if quantization.type.has_bias:
        scales, biases = random.standard_normal((2, *shape)).astype(np.float32)
    factor = None
    if factors is not None:
        factor = np.asarray(random.standard_normal(factors), np.float32)
    expected = dequantize_exactly(quantization, codes, scales, biases, factor)
    parts = {"": codes.view(np.uint8), SCALE: scales}
    parts |= {} if biases is None else {BIAS: biases}
    parts |= {} if factor is None else {GLOBAL_SCALE: factor}
    found = torch.empty(expected.shape)
    tensors = {key: torch.from_numpy(part) for key, part in parts.items()}
    dequantize_into(found, quantization, tensors)
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["int8", "mxfp8"])
def test_stored_codes_are_read(tmp_path: Path, kind: str) -> None:
    from clowder_aimage.model.torch.weight_load import MappedLoad

    weights = opened(made(FolderStore(tmp_path), kind, "combined"))
    for name in weights:
        found = MappedLoad("cpu", torch.float32).read(weights.find(name))
        assert np.array_equal(found.float().numpy(), weights.read_numpy(name))
