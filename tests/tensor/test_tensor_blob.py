"""The meaning of a blob's header: whole tensors, of one generation or another."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import (
    QUANT_TYPES,
    BlobTensor,
    Quantization,
    check_layer,
    compute_nbytes,
    encode_header,
    find_group,
    find_tensor,
    read_header,
    read_tensors,
)
from tests.tensor.tensor_mutants import EXPERT, SEEDS, Tensor, affine

INT4 = {"quant_type": "int4", "group_size": "32"}
NVFP4 = {"quant_type": "nvfp4", "group_size": "16"}


def read(
    tensors: Sequence[Tensor], metadata: dict[str, str] | None = None
) -> dict[str, BlobTensor]:
    raw = encode_header(tensors, metadata)
    size = sum(compute_nbytes(dtype, shape) for _, dtype, shape in tensors)
    return read_tensors(read_header(io.BytesIO(raw), len(raw) + size))


def refused(
    message: str, tensors: Sequence[Tensor], metadata: dict[str, str] | None = None
) -> None:
    with pytest.raises(FormatError, match=message):
        read(tensors, metadata)


@st.composite
def quantized(draw: st.DrawFn) -> tuple[Quantization, tuple[int, ...], str | None]:
    kind = draw(st.sampled_from(list(QUANT_TYPES.values())))
    group = draw(st.sampled_from(kind.group_sizes))
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))
    shape = (*rows, group * draw(st.integers(1, 3)))
    return Quantization(kind, group), shape, draw(st.sampled_from(kind.scale_dtypes))


def blob_of(
    name: str, given_type: Quantization, shape: tuple[int, ...], scale: Any
) -> list[Tensor]:
    parts = (".scale", ".bias") if given_type.type.has_bias else (".scale",)
    return [
        (name, "U32", given_type.compute_codes_shape(shape)),
        *((name + part, scale, given_type.compute_scales_shape(shape)) for part in parts),
    ]


@given(quantized())
def test_every_quantization_is_read_back(
    case: tuple[Quantization, tuple[int, ...], str | None],
) -> None:
    kind, shape, scale = case
    found = read(blob_of("a.weight", kind, shape, scale), kind.metadata)
    assert list(found) == ["a.weight"]
    tensor = found["a.weight"]
    assert (tensor.dtype, tensor.shape, tensor.quantization) == (kind.type.name, shape, kind)
    assert tensor.parts[".scale"] == "a.weight.scale"
    assert (".bias" in tensor.parts) == kind.type.has_bias


@given(quantized())
def test_a_group_size_that_is_left_out_is_read_from_the_shapes(
    case: tuple[Quantization, tuple[int, ...], str | None],
) -> None:
    kind, shape, scale = case
    found = read(blob_of("w", kind, shape, scale), {"quant_type": kind.type.name.upper()})
    assert found["w"].quantization == kind


def test_a_blob_of_one_tensor() -> None:
    for name in ("unquantized", "legacy", "metadata"):
        tensors, metadata = SEEDS[name]
        ((key, dtype, shape),) = tensors
        assert read(tensors, metadata) == {key: BlobTensor(key, dtype, shape, None, {})}


def test_a_packed_group_of_several_kinds() -> None:
    found = read(*SEEDS["packed"])
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        EXPERT.format(0): ("int4", (2, 64)),
        EXPERT.format(1): ("mxfp8", (2, 32)),
        EXPERT.format(2): ("F16", (1, 2)),
    }


def test_a_tensors_own_metadata_win_over_the_blobs() -> None:
    tensors = affine("a", 2, 64, 4, 32) + affine("b", 2, 64, 8, 64)
    metadata = {**INT4, "b.quant_type": "int8", "b.group_size": "64"}
    found = read(tensors, metadata)
    assert [(t.dtype, t.shape) for t in found.values()] == [("int4", (2, 64)), ("int8", (2, 64))]
    # What a tensor leaves out is what the blob says, not a default.
    found = read(affine("a", 2, 64, 8, 32), {"a.quant_type": "int8", "group_size": "32"})
    assert found["a"].quantization == Quantization(QUANT_TYPES["int8"], 32)
    refused("in groups of 64", tensors, {**metadata, "group_size": "64"})


def test_a_floating_tensor_may_stand_beside_codes() -> None:
    found = read([*affine("a", 2, 64, 4, 32), ("b", "F32", (2,)), ("b.bias", "F32", (2,))], INT4)
    assert [(name, tensor.dtype) for name, tensor in found.items()] == [
        ("a", "int4"),
        ("b", "F32"),
        ("b.bias", "F32"),
    ]


def test_names_that_only_look_like_parts_are_tensors() -> None:
    names = ["norm.scale", "fc.bias", "a.global_scale", "a", "a.scale", "x.scales", "x.weight"]
    found = read([(name, "BF16", (2,)) for name in names])
    assert list(found) == names


def test_mlx_names_are_read() -> None:
    found = read(*SEEDS["mlx"])
    assert list(found) == ["x.weight"]
    assert found["x.weight"].parts == {".scale": "x.scales", ".bias": "x.biases"}
    assert found["x.weight"].shape == (2, 64)


def test_the_first_generations_key_may_be_quantized() -> None:
    found = read(affine("data", 2, 64, 4, 32), INT4)
    assert find_tensor(found, "a.weight", "unet").shape == (2, 64)


def nvfp4(*more: Tensor, shape: tuple[int, ...] = (3, 32)) -> list[Tensor]:
    return [*blob_of("w", Quantization.parse("nvfp4"), shape, "U8"), *more]


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        ((3, 32), [(), (1,), (3,), (3, 1), (1, 1)]),
        ((1, 32), [(), (1,), (1, 1)]),
        ((2, 3, 32), [(), (1,), (2,), (2, 3), (2, 1), (2, 1, 1), (2, 3, 1), (1, 1, 1)]),
    ],
)
def test_a_global_scale_is_for_all_for_each_matrix_or_for_each_row(
    shape: tuple[int, ...], factors: list[tuple[int, ...]]
) -> None:
    for factor in factors:
        found = read(nvfp4(("w.global_scale", "F32", factor), shape=shape), NVFP4)
        assert found["w"].parts[".global_scale"] == "w.global_scale"


@pytest.mark.parametrize("factor", [(2,), (3, 32), (1, 3), (3, 1, 1), (0,)])
def test_other_global_scales_are_refused(factor: tuple[int, ...]) -> None:
    refused("is not an nvfp4 scale", nvfp4(("w.global_scale", "F32", factor)), NVFP4)


def test_a_global_scale_is_a_float_of_nvfp4() -> None:
    refused("is not an nvfp4 scale", nvfp4(("w.global_scale", "BF16", ())), NVFP4)
    refused(
        "is not an nvfp4 scale", [*affine("w", 2, 64, 4, 32), ("w.global_scale", "F32", ())], INT4
    )


def test_scales_of_activations_belong_to_the_codes() -> None:
    inputs = [("w.input_scale", "F32", ()), ("w.input_global_scale", "F32", ())]
    found = read(nvfp4(*inputs), NVFP4)
    assert list(found) == ["w"]
    assert list(found["w"].parts) == [".scale"]
    assert list(read(inputs)) == ["w.input_scale", "w.input_global_scale"]


W = affine("w", 2, 64, 4, 32)


@pytest.mark.parametrize(
    ("message", "tensors", "metadata"),
    [
        ("has scales, but no quant_type", W, {}),
        ("has scales, but no quant_type", W, {"v.quant_type": "int4"}),
        ("w: unknown quantization ''", W, {"quant_type": ""}),
        ("w: int4 requires group size 32 or 64 or 128, not '16'", W, {**INT4, "group_size": "16"}),
        ("not '-32'", W, {**INT4, "group_size": "-32"}),
        ("not '٣٢'", W, {**INT4, "group_size": "٣٢"}),
        ("in groups of 64 requires", W, {**INT4, "group_size": "64"}),
        ("do not fit int4", W, {**INT4, "group_size": "128"}),
        ("int4 requires biases", W[:2], INT4),
        ("mxfp8 does not support biases", W, {"quant_type": "mxfp8", "group_size": "32"}),
        ("w.scale: U8", [W[0], ("w.scale", "U8", (2, 2)), W[2]], INT4),
        ("w.bias: BF16", [*W[:2], ("w.bias", "BF16", (2, 3))], INT4),
        (
            "w.scale: BF16",
            [("w", "U32", (2, 8)), ("w.scale", "BF16", (2, 1))],
            {"quant_type": "mxfp8"},
        ),
        ("do not fit", [("w", "U32", ()), ("w.scale", "BF16", ()), W[2]], INT4),
        ("do not fit", [("w", "U32", (2, 0)), ("w.scale", "BF16", (2, 0)), W[2]], INT4),
        ("not 21", [W[0], ("w.scale", "BF16", (2, 3)), W[2]], {"quant_type": "int4"}),
    ],
)
def test_codes_that_do_not_fit_their_type(
    message: str, tensors: list[Any], metadata: dict[str, str]
) -> None:
    refused(message, tensors, metadata)


@pytest.mark.parametrize(
    ("message", "tensors", "metadata"),
    [
        ("w has w.bias, but no scales", [W[0], W[2]], INT4),
        ("w has w.global_scale, but no scales", [W[0], ("w.global_scale", "F32", ())], NVFP4),
        (
            "has x.biases, but no scales",
            [("x.weight", "U32", (2, 8)), ("x.biases", "F16", (2, 1))],
            {},
        ),
        ("v is marked as quantized, but has no scales", [*W, ("v", "U32", (2, 8))], INT4),
        ("w is marked as quantized", [("w", "F32", (2,))], {"w.group_size": "64"}),
        ("w.scale is marked as quantized", W, {**INT4, "w.scale.quant_type": "int4"}),
        ("but nothing is quantized", [], INT4),
        ("w has scales, but dtype I32 instead of U32", [("w", "I32", (2, 8)), *W[1:]], INT4),
        ("v has scales, but dtype F32", [*W, ("v", "F32", (2,)), ("v.scale", "F32", (2,))], INT4),
        (
            "has two sets of scales",
            [*affine("x.weight", 2, 64, 4, 32), ("x.scales", "F16", (2, 2))],
            INT4,
        ),
        ("has two sets of scales", [*SEEDS["mlx"][0], ("x.global_scale", "F32", ())], INT4),
        (
            "w.scale has scales, but belongs to another tensor",
            [W[0], ("w.scale", "U32", (2, 2)), W[2], ("w.scale.scale", "BF16", (2, 1))],
            INT4,
        ),
    ],
)
def test_blobs_with_stray_parts_or_claims_are_refused(
    message: str, tensors: list[Any], metadata: dict[str, str]
) -> None:
    refused(message, tensors, metadata)


def test_foreign_metadata_are_ignored() -> None:
    metadata = {"format": "pt", "optimizer.quant_type": "x", "group_size": "7", ".quant_type": "y"}
    assert list(read([("w", "U32", (2,))], metadata)) == ["w"]


def test_a_tensor_is_found_by_all_its_names() -> None:
    def tensor(key: str) -> BlobTensor:
        return BlobTensor(key, "F32", (1,), None, {})

    for key in ("a.weight", "unet/a.weight", "data"):
        alone = {key: tensor(key)}
        assert find_tensor(alone, "a.weight", "unet") is alone[key]
    others = {f"t{i}": tensor(f"t{i}") for i in range(10)}
    message = "^unet/a.weight: the blob contains t0, t1, t2, t3, t4, t5, t6, t7 and 2 more instead$"
    with pytest.raises(FormatError, match=message):
        find_tensor(others, "a.weight", "unet")
    with pytest.raises(FormatError, match="contains nothing instead"):
        find_tensor({}, "a.weight", "unet")
    with pytest.raises(FormatError, match=r"^a\.weight: the blob contains nothing instead"):
        find_tensor({}, "a.weight", "")  # a language model has no components


@pytest.mark.parametrize("key", ["a.weight", "unet/a.weight", "data"])
def test_a_layer_of_one_tensor_has_no_other(key: str) -> None:
    found = read([(key, "F32", (1,)), ("a.weight.more", "F32", (1,))])
    message = r"^unet/a\.weight: the blob also contains a\.weight\.more$"
    with pytest.raises(FormatError, match=message):
        find_tensor(found, "a.weight", "unet")
    with pytest.raises(FormatError, match=r"also contains|of another group"):  # nor is it a group
        find_group(found, "a.weight", "unet")


def test_the_tensors_of_a_group_are_found() -> None:
    found = read(*SEEDS["packed"])
    group = find_group(found, "model.layers.1.mlp.experts", "llm")
    assert group == found
    with_component = {f"llm/{name}": tensor for name, tensor in found.items()}
    assert find_group(with_component, "model.layers.1.mlp.experts", "llm") == found
    # ollama stacks experts under another name beside the group's.
    stacked = read(affine("model.layers.1.mlp.switch_mlp.up_proj.weight", 2, 64, 4, 32), INT4)
    assert find_group(stacked, "model.layers.1.mlp.experts", "llm") == stacked
    assert list(find_group(read([("a", "F32", ())]), "experts", "llm")) == ["a"]


def test_a_group_of_another_place_is_refused() -> None:
    found = read(*SEEDS["packed"])
    with pytest.raises(FormatError, match=r"experts\.0\.up_proj\.weight of another group"):
        find_group(found, "model.layers.2.mlp.experts", "llm")
    with pytest.raises(FormatError, match="of another group"):
        find_group(read([("m.a", "U8", ()), ("llm/m.a", "U8", ())]), "m.experts", "llm")
    with pytest.raises(FormatError, match="contains no tensors"):
        find_group({}, "model.layers.2.mlp.experts", "llm")


def test_a_layer_promises_what_its_blob_holds() -> None:
    tensor = read(W, INT4)["w"]
    for dtype, shape in (("int4", (2, 64)), ("U32", (2, 8)), ("int4", None), ("U32", None)):
        check_layer(tensor, "a/w", dtype, shape)
        check_layer(tensor, "a/w", None, shape)
    check_layer(read([("w", "F16", ())])["w"], "a/w", "F16", ())


@pytest.mark.parametrize(
    ("dtype", "shape", "promised"),
    [
        ("int8", (2, 64), r"int8 \[2, 64\]"),
        ("U32", (2, 64), r"U32 \[2, 64\]"),
        ("int4", (64, 2), r"int4 \[64, 2\]"),
        (None, (), r"\[\]"),
        ("F16", None, "F16"),
    ],
)
def test_a_layer_that_promises_something_else(
    dtype: str | None, shape: tuple[int, ...] | None, promised: str
) -> None:
    message = rf"^a/w: the blob contains int4 \[2, 64\], its layer has {promised}$"
    with pytest.raises(FormatError, match=message):
        check_layer(read(W, INT4)["w"], "a/w", dtype, shape)
