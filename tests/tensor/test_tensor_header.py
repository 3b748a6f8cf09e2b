"""The safetensors header: strict in, byte-stable out."""

from __future__ import annotations

import io
import json
import math
import struct
from random import Random
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import (
    DTYPE_BITS,
    compute_nbytes,
    encode_header,
    header,
    parse_header,
    read_header,
)
from clowder_aimage.tensor.header import (
    MAX_ELEMENTS,
    MAX_HEADER_SIZE,
    MAX_NAME,
    MAX_RANK,
    MAX_TENSORS,
    MAX_VALUES,
)

names = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]),
    min_size=1,
    max_size=30,
).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def ends_at_a_byte(tensor: tuple[str, str, tuple[int, ...]]) -> bool:
    return math.prod(tensor[2]) * DTYPE_BITS[tensor[1]] % 8 == 0


tensors = st.lists(
    st.tuples(names, st.sampled_from(sorted(DTYPE_BITS)), shapes).filter(ends_at_a_byte),
    max_size=5,
    unique_by=lambda tensor: tensor[0],
)
# The dtypes that numpy has too.
NUMPY = {
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}


def file_of(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (
            ("model.norm.weight", "BF16", (2, 3)),
            b"\x50\0\0\0\0\0\0\0"
            b'{"model.norm.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}      ',
        ),
        (
            ("s", "F32", ()),
            b'\x38\0\0\0\0\0\0\0{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   ',
        ),
        (
            ("e", "F16", (0, 7)),
            b'\x38\0\0\0\0\0\0\0{"e":{"dtype":"F16","shape":[0,7],"data_offsets":[0,0]}}',
        ),
        (
            ('größe"\\', "U8", (1,)),
            b"\x40\0\0\0\0\0\0\0"
            + '{"größe\\"\\\\":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode()
            + b" ",
        ),
    ],
    ids=["matrix", "scalar", "no-elements", "quoted"],
)
def test_the_bytes_of_a_header_are_pinned(
    tensor: tuple[str, str, tuple[int, ...]], expected: bytes
) -> None:
    """Digests of tensors hang on these bytes: they may never change."""
    assert encode_header([tensor]) == expected


def test_the_bytes_of_a_header_with_metadata_are_pinned() -> None:
    written = encode_header([("w", "U32", [1]), ("w.scale", "BF16", [1])], {"quant_type": "int4"})
    text = (
        b'{"__metadata__":{"quant_type":"int4"},'
        b'"w":{"dtype":"U32","shape":[1],"data_offsets":[0,4]},'
        b'"w.scale":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]}}'
    )
    assert written == struct.pack("<Q", 152) + text.ljust(152)


@given(tensors, st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]))))
def test_encoded_headers_are_read_back(
    given_tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[Any, Any]
) -> None:
    raw = encode_header(given_tensors, metadata)
    assert len(raw) % 8 == 0
    size = sum(compute_nbytes(dtype, shape) for _, dtype, shape in given_tensors)
    header = read_header(io.BytesIO(raw), len(raw) + size)
    assert [(n, i.dtype, i.shape) for n, i in header.tensors.items()] == given_tensors
    assert header.metadata == metadata
    assert header.data_offset == len(raw)
    assert raw == encode_header(given_tensors, metadata)


@given(names, st.sampled_from(sorted(NUMPY)), shapes, st.randoms())
def test_a_blob_equals_that_of_the_reference_package(
    name: str, dtype: Any, shape: tuple[int, ...], random: Random
) -> None:
    data = random.randbytes(compute_nbytes(dtype, shape))
    values = numpy.frombuffer(data, NUMPY[dtype]).reshape(shape)
    assert encode_header([(name, dtype, shape)]) + data == safetensors.numpy.save({name: values})


@given(tensors)
def test_the_reference_package_reads_every_written_file(
    given_tensors: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    data = bytes(
        i % 251 for i in range(sum(compute_nbytes(t, shape) for _, t, shape in given_tensors))
    )
    found = dict(safetensors.deserialize(encode_header(given_tensors) + data))
    assert {(n, i["dtype"], tuple(i["shape"])) for n, i in found.items()} == set(given_tensors)
    assert b"".join(bytes(found[name]["data"]) for name, _, _ in given_tensors) == data


@pytest.mark.parametrize(
    ("dtype", "kind", "shape"),
    [
        ("F32", "float32", ()),
        ("F16", "float16", (3,)),
        ("I64", "int64", (2, 0, 4)),
        ("BOOL", "bool", (2, 3, 1, 2)),
    ],
)
def test_numbers_survive(dtype: str, kind: str, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    values = numpy.arange(count).reshape(shape).astype(kind)
    blob = encode_header([("x", dtype, shape)]) + values.tobytes()
    read = safetensors.numpy.load(blob)["x"]
    assert read.dtype == values.dtype
    numpy.testing.assert_array_equal(read, values)


def test_files_of_the_reference_package_are_read() -> None:
    values = {"b": numpy.ones((2, 2), "float16"), "a": numpy.zeros((), "float32")}
    raw = safetensors.numpy.save(values, metadata={"format": "pt"})
    header = read_header(io.BytesIO(raw), len(raw))
    assert {n: (i.dtype, i.shape, i.nbytes) for n, i in header.tensors.items()} == {
        "a": ("F32", (), 4),
        "b": ("F16", (2, 2), 8),
    }
    assert header.metadata == {"format": "pt"}


def holds(raw: bytes) -> bool:
    """Read ``raw`` as a file; if that works, its tensors must cover exactly its data."""
    try:
        header = read_header(io.BytesIO(raw), len(raw))
    except FormatError:
        return False
    spans = sorted((i.start, i.end) for i in header.tensors.values())
    position = 0
    for start, end in spans:
        assert start == position
        position = end
    assert header.data_offset + position == len(raw)
    for info in header.tensors.values():
        assert compute_nbytes(info.dtype, info.shape) == info.end - info.start
    return True


@settings(max_examples=150)
@given(tensors, st.data())
def test_a_mutated_file_still_describes_itself_or_is_refused(
    given_tensors: list[tuple[str, str, tuple[int, ...]]], data: st.DataObject
) -> None:
    raw = bytearray(encode_header(given_tensors, {"a": "b"}))
    raw += bytes(sum(compute_nbytes(dtype, shape) for _, dtype, shape in given_tensors))
    assert holds(bytes(raw))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["set", "digit", "cut", "insert", "copy"])):
            case "set":
                raw[at] = data.draw(st.integers(0, 255))
            case "digit":
                digits = [i for i, byte in enumerate(raw) if chr(byte).isdigit()] or [at]
                raw[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789"))
            case "cut" if at:
                del raw[at:]
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "copy":
                raw[at:at] = raw[at : at + 30]
    holds(bytes(raw))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_break_the_reader(raw: bytes) -> None:
    holds(raw)


@given(
    st.dictionaries(
        names,
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "F64", "X", 1, None]),
                "shape": st.lists(st.sampled_from([0, 1, 2, -1, 2**63, 2**70, 1.5, None, "1"])),
                "data_offsets": st.lists(
                    st.sampled_from([0, 1, 4, 8, 16, -1, 2**64, 2**70, 0.0, None, True]),
                    min_size=1,
                    max_size=3,
                ),
            }
        ),
        max_size=3,
    ),
    st.integers(0, 20),
)
def test_inconsistent_headers_are_refused_with_format_error(
    value: dict[Any, Any], size: int
) -> None:
    text = json.dumps(value).encode()
    holds(file_of(text, bytes(size)))


def test_the_reader_stops_at_the_promised_length() -> None:
    raw = encode_header([("a", "U8", (3,))])
    for cut in range(len(raw)):
        with pytest.raises(FormatError):
            read_header(io.BytesIO(raw[:cut]), cut)
    with pytest.raises(FormatError, match="invalid header length"):
        read_header(io.BytesIO(raw), len(raw) - 1)
    with pytest.raises(FormatError, match="truncated"):
        read_header(io.BytesIO(raw[:-1]), len(raw) + 3)  # cut while it was read


@pytest.mark.parametrize("length", [MAX_HEADER_SIZE + 1, 2**64 - 1])
def test_a_huge_header_is_refused_before_it_is_read(length: int) -> None:
    class Watched(io.BytesIO):
        asked = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.asked = max(self.asked, size or 0)
            return super().read(size)

    file = Watched(struct.pack("<Q", length))
    with pytest.raises(FormatError, match="invalid header length"):
        read_header(file, 2**62)
    assert file.asked == 8


def test_a_header_nested_deep_is_refused() -> None:
    for text in (b'{"a":' + b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(FormatError):
            parse_header(text, 0)


def test_too_many_tensors_are_refused() -> None:
    item = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(item % i for i in range(MAX_TENSORS + 1)) + "}"
    with pytest.raises(FormatError, match="100001 tensors"):
        parse_header(text.encode(), 0)


@pytest.mark.parametrize("text", [b"", b'{"\xff":{}}', '{"a":{}}'.encode("utf-16")])
def test_only_utf8_is_read(text: bytes) -> None:
    with pytest.raises(FormatError):
        parse_header(text, 0)


@pytest.mark.parametrize("name", ["", "__metadata__", "a\0", "\x9b2J", "\ud800"])
def test_names_that_no_reader_accepts_are_not_written(name: str) -> None:
    with pytest.raises(FormatError, match="tensor name"):
        encode_header([(name, "U8", (1,))])


def test_a_name_is_written_once() -> None:
    with pytest.raises(FormatError, match="invalid or duplicate tensor name"):
        encode_header([("a", "U8", (1,)), ("a", "U8", (1,))])


@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\udfff": "a"}, {"a": None}, {1: "a"}])
def test_metadata_that_is_not_text_is_not_written(metadata: dict[Any, Any]) -> None:
    with pytest.raises(FormatError, match="must map strings to strings"):
        encode_header([], metadata)


def test_halves_of_surrogate_pairs_are_not_read() -> None:
    parse_header(b'{"__metadata__":{"a":"\\ud83d\\ude00"}}', 0)
    for text in (b'{"a":"\\ud83d"}', b'{"a":"\\ude00\\ud83d"}', b'{"\\ud83d":"a"}'):
        with pytest.raises(FormatError, match="must map strings to strings"):
            parse_header(b'{"__metadata__":%s}' % text, 0)


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match="100001 tensors"):
        encode_header([("a", "U8", (0,))] * (MAX_TENSORS + 1))
    monkeypatch.setattr(header, "MAX_HEADER_SIZE", 104)
    raw = encode_header([], {"a": "b" * 75})
    assert len(raw) == 8 + 104
    assert parse_header(raw[8:], 0).metadata == {"a": "b" * 75}
    with pytest.raises(FormatError, match="a header of 112 bytes exceeds the limit of 104"):
        encode_header([], {"a": "b" * 85})
    with pytest.raises(FormatError, match="a header of 105 bytes exceeds the limit of 104"):
        parse_header(raw[8:] + b" ", 0)


@pytest.mark.parametrize("number", ["-0", "1.0", "-1", "9" * 5000, "true"])
def test_header_numbers_are_counts(number: str) -> None:
    for item in (
        '{"dtype":"U8","shape":[0],"data_offsets":[0,%s]}',
        '{"dtype":"U8","shape":[0],"data_offsets":[%s,0]}',
        '{"dtype":"U8","shape":[0,%s],"data_offsets":[0,0]}',
    ):
        with pytest.raises(FormatError):
            parse_header(('{"a":' + item % number + "}").encode(), 0)


def test_a_long_header_of_brackets_is_refused_before_it_is_parsed() -> None:
    text = b'{"a":[' + b"[]," * MAX_VALUES + b"0]}"
    with pytest.raises(FormatError, match="more than 2000000 values"):
        parse_header(text, 0)
    assert 12 * MAX_TENSORS < MAX_VALUES  # of so many tensors with four dimensions


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("f32", (1,), "unknown dtype"),
        ("F32", (-1,), "invalid dimension"),
        ("F32", (True,), "invalid dimension"),
        ("F32", (1.0,), "invalid dimension"),
        ("F32", (2**60,), "too large"),
        ("F32", (2**30, 0, 2**30), "too large"),
        ("F32", (0, 2**57), "too large"),
        ("U8", (1,) * (MAX_RANK + 1), "33 dimensions"),
        ("F4", (), "does not fill whole bytes"),
        ("F6_E2M3", (2,), "does not fill whole bytes"),
        ("F6_E3M2", (3, 3), "does not fill whole bytes"),
    ],
)
def test_nbytes_refuses_impossible_sizes(dtype: Any, shape: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        compute_nbytes(dtype, shape)
    with pytest.raises(FormatError, match=message):
        encode_header([("a", dtype, shape)])


def test_the_sizes_of_all_dtypes() -> None:
    for dtype, bits in DTYPE_BITS.items():
        assert compute_nbytes(dtype, (2, 4)) == bits
        assert compute_nbytes(dtype, (5, 0)) == 0
        if bits >= 8:
            assert compute_nbytes(dtype, ()) == bits // 8
    assert compute_nbytes("F4", (2, 3)) == 3  # rows share a byte
    assert compute_nbytes("U8", (1,) * MAX_RANK) == 1
    assert compute_nbytes("F64", (MAX_ELEMENTS,)) == MAX_ELEMENTS * 8


def test_an_error_names_the_tensor() -> None:
    with pytest.raises(FormatError, match=r"^a\.weight: unknown dtype 'F33'$"):
        parse_header(b'{"a.weight":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}', 4)


def test_a_name_is_as_long_as_a_layers_at_most() -> None:
    """Readers look at all parts of a name: long ones would cost the square of their length."""
    longest = "layers.0." * 113 + "a" * 7
    assert len(longest) == MAX_NAME
    raw = encode_header([(longest, "U8", (1,))])
    assert longest in parse_header(raw[8:], 1).tensors
    with pytest.raises(FormatError, match="tensor name"):
        encode_header([(longest + "a", "U8", (1,))])
    with pytest.raises(FormatError, match="invalid tensor name"):
        parse_header(raw[8:].replace(b"aaaaaaa", b"aaaaaaaa"), 1)
