"""Comparison of two readers: ours and the reference library's.

Input that ours rejects and the library accepts is in POLICY, each with an example and a check that
does not use our reader.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import safetensors

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import Header, read_header, read_tensors
from clowder_aimage.tensor.header import MAX_ELEMENTS, MAX_NAME, MAX_RANK

Value = Any
U8 = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


class Twice(dict[str, Value]):
    """An object with a duplicate key."""


def hook(pairs: list[tuple[str, Value]]) -> Value:
    kind = dict if len(dict(pairs)) == len(pairs) else Twice
    return kind(pairs)


def header_of(raw: bytes) -> tuple[str, Value]:
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")].decode()
    return text, json.loads(text, object_pairs_hook=hook)


def values(value: Value) -> list[Value]:
    """Return ``value`` and all nested values."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(found for item in inner for found in values(item))]


def tensors(value: Value) -> list[Value]:
    return [item for name, item in value.items() if name != "__metadata__"]


def shapes(value: Value) -> list[list[int]]:
    return [item["shape"] for item in tensors(value) if isinstance(item, dict)]


def extra(item: Value) -> bool:
    return not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}


# For each policy: our message, a check of the JSON, and an example file.
POLICY: dict[str, tuple[str, Callable[[str, Value], bool], str]] = {
    "a key twice": (
        "has a duplicate key",
        lambda _, value: any(isinstance(found, Twice) for found in values(value)),
        f'{{"a":{U8},"a":{U8}}}',
    ),
    "fields of another form, or more of them": (
        "expected only dtype, shape and data_offsets",
        lambda _, value: any(map(extra, tensors(value))),
        '{"a":["U8",[1],[0,1]]}',
    ),
    "a dtype that is an object": (
        "dtype must be a string",
        lambda _, value: any(isinstance(item["dtype"], dict) for item in tensors(value)),
        '{"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}',
    ),
    "space before the object": (
        "the header is not a JSON object",
        lambda text, _: text[0] in " \t\r\n",
        f' {{"a":{U8}}}',
    ),
    "names that cannot be shown": (
        "invalid tensor name",
        lambda _, value: any(not name or not name.isprintable() for name in value),
        f'{{"":{U8}}}',
    ),
    "names of over 1024 characters": (
        "invalid tensor name",
        lambda _, value: any(len(name) > MAX_NAME for name in value),
        f'{{"{"a" * (MAX_NAME + 1)}":{U8}}}',
    ),
    "dimensions out of reason": (
        "is too large",
        lambda _, value: any(
            math.prod(n or 1 for n in shape) > MAX_ELEMENTS for shape in shapes(value)
        ),
        f'{{"a":{U8},"b":{{"dtype":"U8","shape":[{2**57},0],"data_offsets":[1,1]}}}}',
    ),
    "too many dimensions": (
        f"dimensions exceed the limit of {MAX_RANK}",
        lambda _, value: any(len(shape) > MAX_RANK for shape in shapes(value)),
        U8.join(('{"a":', "}")).replace("[1]", str([1] * (MAX_RANK + 1))),
    ),
    "numbers of no use in a field of no use": (
        "an invalid number",
        lambda _, value: any(map(extra, tensors(value))),
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":-0}}',
    ),
}
# These two need headers of megabytes; separate tests have their examples.
LARGE = {
    "too many tensors": "tensors in one file exceed the limit",
    "too many values": "the header has more than",
}


def theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Return the tensors read by the library, or None."""
    try:
        found = safetensors.deserialize(raw)
    except safetensors.SafetensorError:
        return None
    return {
        name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in found
    }


def ours(raw: bytes) -> Header | str:
    """Return the header, or the error message. No other error may be raised."""
    try:
        return read_header(io.BytesIO(raw), len(raw))
    except FormatError as error:
        return str(error)


def check_parts(header: Header) -> bool:
    """Check that blobs use every name in their header, or are rejected."""
    try:
        found = read_tensors(header)
    except FormatError:
        return False
    keys = set(found)
    for key, tensor in found.items():
        info = header.tensors[key]
        assert tensor.key == key
        if tensor.quantization is None:
            assert (tensor.dtype, tensor.shape, tensor.parts) == (info.dtype, info.shape, {})
            continue
        kind = tensor.quantization
        assert (tensor.dtype, info.dtype) == (kind.type.name, "U32")
        assert kind.compute_codes_shape(tensor.shape) == info.shape
        for part in (".scale", ".bias") if kind.type.has_bias else (".scale",):
            beside = header.tensors[tensor.parts[part]]
            assert beside.shape == kind.compute_scales_shape(tensor.shape)
            assert beside.dtype in kind.type.scale_dtypes
        keys.update(tensor.parts.values())
        keys.update(key + word for word in (".input_scale", ".input_global_scale"))
    assert keys >= set(header.tensors)
    return True


def compare(raw: bytes) -> str:
    """Read ``raw`` with both readers and return the outcome: a word or a policy."""
    header, expected = ours(raw), theirs(raw)
    if isinstance(header, Header):
        assert expected is not None, f"we read what the library refuses: {raw[:2000]!r}"
        found = {
            name: (
                info.dtype,
                info.shape,
                raw[header.data_offset + info.start : header.data_offset + info.end],
            )
            for name, info in header.tensors.items()
        }
        assert found == expected, f"we read other tensors than the library: {raw[:2000]!r}"
        return "read" if check_parts(header) else "no blob"
    if expected is None:
        return "refused"
    text, value = header_of(raw)
    for name, (message, seen, _) in POLICY.items():
        if message in header and seen(text, value):
            return name
    raise AssertionError(f"refused without a policy: {header}: {raw[:2000]!r}")
