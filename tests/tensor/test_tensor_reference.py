"""Next to the reference library: nothing is read here that it refuses, or read otherwise.

What is refused here and read there is a policy: they are listed in tensor_reference.py.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import (
    DTYPE_BITS,
    compute_nbytes,
    encode_header,
    read_header,
)
from clowder_aimage.tensor.header import MAX_HEADER_SIZE, MAX_TENSORS, MAX_VALUES
from tests.tensor.tensor_mutants import SEEDS, file_of, mutant
from tests.tensor.tensor_reference import LARGE, POLICY, compare, header_of, ours, theirs

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/safetensors-headers.json").read_text())
FEW = 1_000
MANY = 100_000
# The words of TensorSpec for the dtypes that the library writes.
WRITTEN = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


@pytest.mark.parametrize("name", POLICY)
def test_every_policy_refuses_what_the_library_reads(name: str) -> None:
    message, seen, text = POLICY[name]
    raw = file_of(text.encode(), bytes(1))
    assert theirs(raw) is not None
    assert message in str(ours(raw))
    assert seen(*header_of(raw))
    assert compare(raw) == name


@pytest.mark.integration
def test_large_headers_are_a_policy_too() -> None:
    item = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(item % i for i in range(MAX_TENSORS + 1)) + "}"
    raw = file_of(text.encode(), b"")
    assert len(theirs(raw) or ()) == MAX_TENSORS + 1
    assert LARGE["too many tensors"] in str(ours(raw))
    text = '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":[%s0]}}' % ("0," * MAX_VALUES)
    raw = file_of(text.encode(), b"")
    assert theirs(raw) is not None
    assert LARGE["too many values"] in str(ours(raw))


def test_both_stop_at_the_same_size_of_a_header() -> None:
    for length, message in (
        (MAX_HEADER_SIZE, "invalid header length"),  # no more than a file that is cut off
        (MAX_HEADER_SIZE + 1, "header too large"),
    ):
        raw = length.to_bytes(8, "little") + b"{}"
        with pytest.raises(safetensors.SafetensorError, match=message):
            safetensors.deserialize(raw)
        with pytest.raises(FormatError, match="invalid header length"):
            read_header(io.BytesIO(raw), len(raw))
    file = io.BytesIO((MAX_HEADER_SIZE + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(FormatError, match="invalid header length"):
        read_header(file, 2 * MAX_HEADER_SIZE)  # although so much is there
    assert file.tell() == 8


def test_the_library_reads_all_seeds() -> None:
    for name, (given_tensors, metadata) in SEEDS.items():
        size = sum(compute_nbytes(dtype, shape) for _, dtype, shape in given_tensors)
        assert compare(encode_header(given_tensors, metadata) + bytes(size)) == "read", name


def test_the_library_agrees_with_all_vectors() -> None:
    """tests/vectors/ has a case for each."""
    for vector in VECTORS:
        outcome = compare(file_of(vector["header"].encode(), bytes(vector["data"])))
        allowed = {"refused", *POLICY} if "error" in vector else {"read"}
        assert outcome in allowed, vector["name"]


def fuzz(seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes[compare(mutant(seed))] += 1
        except Exception as error:
            raise AssertionError(f"mutant {seed}") from error
    return outcomes


def test_mutants() -> None:
    outcomes = fuzz(range(FEW))
    # A fuzzer that only makes rubbish, or only what is good, shows nothing.
    assert min(outcomes[word] for word in ("read", "no blob", "refused")) > FEW // 50
    assert sum(outcomes.values()) == FEW


@pytest.mark.slow
def test_a_hundred_thousand_mutants() -> None:
    outcomes = fuzz(range(FEW, FEW + MANY))
    assert sum(outcomes.values()) == MANY
    assert POLICY.keys() <= outcomes.keys(), dict(outcomes)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def tensor(draw: Callable[[Any], Any]) -> tuple[str, str, tuple[int, ...]]:
    """Draw a tensor of any type. Small types end at a byte when a dimension is a multiple of 4."""
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    if DTYPE_BITS[dtype] < 8:
        shape.insert(draw(st.integers(0, len(shape))), draw(st.sampled_from((0, 4, 8))))
    return draw(NAMES), dtype, tuple(shape)


FILES = st.lists(tensor(), max_size=6, unique_by=lambda item: item[0])


def running(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


@given(FILES, st.dictionaries(TEXTS, TEXTS, max_size=4))
def test_the_library_reads_what_we_write(
    given_tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[Any, Any]
) -> None:
    raw = encode_header(given_tensors, metadata)
    data = running(sum(compute_nbytes(dtype, shape) for _, dtype, shape in given_tensors))
    assert compare(raw + data) in ("read", "no blob")
    header = read_header(io.BytesIO(raw), len(raw) + len(data))
    found = [(name, info.dtype, info.shape) for name, info in header.tensors.items()]
    assert found == given_tensors
    assert header.metadata == metadata


@settings(max_examples=50)
@given(FILES, st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=4))
def test_the_library_opens_the_files_we_write(
    given_tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[Any, Any]
) -> None:
    size = sum(compute_nbytes(dtype, shape) for _, dtype, shape in given_tensors)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        path.write_bytes(encode_header(given_tensors, metadata) + running(size))
        with safetensors.safe_open(path, "np") as file:
            assert file.metadata() == metadata
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    assert found == {name: (dtype, shape) for name, dtype, shape in given_tensors}


@settings(max_examples=50)
@given(FILES, st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=4))
def test_we_read_what_the_library_writes(
    given_tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[Any, Any]
) -> None:
    kept, specs, expected = [], {}, {}
    for name, dtype, shape in given_tensors:
        if dtype not in WRITTEN:
            continue
        if dtype == "F4":  # told as pairs
            shape = (*shape[:-1], shape[-1] // 2 * 2)
        expected[name] = (dtype, shape)
        data = running(compute_nbytes(dtype, shape))
        kept.append(ctypes.create_string_buffer(data, max(1, len(data))))
        specs[name] = safetensors.TensorSpec(
            dtype=WRITTEN[dtype],
            shape=[*shape[:-1], shape[-1] // 2] if dtype == "F4" else list(shape),
            data_ptr=ctypes.addressof(kept[-1]),
            data_len=len(data),
        )
    raw = safetensors.serialize(specs, metadata)
    assert compare(raw) in ("read", "no blob")
    header = read_header(io.BytesIO(raw), len(raw))
    assert {name: (i.dtype, i.shape) for name, i in header.tensors.items()} == expected
    assert header.metadata == metadata
    for info in header.tensors.values():
        start = header.data_offset + info.start
        assert raw[start : start + info.nbytes] == running(info.nbytes)


def test_all_dtypes_of_the_library_are_known() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(
            file_of(b'{"a":{"dtype":"?","shape":[],"data_offsets":[0,0]}}', b"")
        )
    listed = str(caught.value).partition("expected one of")[2]
    assert set(re.findall(r"`(\w+)`", listed)) == set(DTYPE_BITS)


def test_all_dtypes_that_the_library_writes_are_tried() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.TensorSpec(dtype="?", shape=[], data_ptr=1, data_len=0)
    listed = str(caught.value).partition("Supported dtypes: ")[2]
    assert set(listed.split(", ")) == set(WRITTEN.values())


def test_the_library_agrees_on_the_size_of_every_dtype() -> None:
    for dtype, bits in DTYPE_BITS.items():
        for shape in ((), (1,), (2,), (3,), (2, 2), (5, 0)):
            size = math.prod(shape) * bits // 8
            for stated in range(max(0, size - 1), size + 3):
                item = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, stated]}
                outcome = compare(file_of(json.dumps({"a": item}).encode(), bytes(stated)))
                assert outcome in ("read", "refused"), item
