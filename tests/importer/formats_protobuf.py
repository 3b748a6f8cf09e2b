"""Write protocol buffers, ONNX models and SavedModels without their packages.

Field numbers: onnx/onnx, onnx/onnx.proto3; tensorflow/tensorflow,
tensorflow/core/protobuf/saved_model.proto and meta_graph.proto.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FLOAT, INT4 = 1, 22


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    raw = bytearray()
    while value > 0x7F:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*raw, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, *parts: bytes) -> bytes:
    raw = b"".join(parts)
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def text(field: int, value: str) -> bytes:
    return message(field, value.encode())


def entry(key: str, value: str) -> bytes:
    """Return an entry of a tensor's external_data."""
    return message(13, text(1, key), text(2, value))


def tensor(
    name: str,
    dims: Sequence[int],
    *,
    kind: int = FLOAT,
    raw: bytes | None = None,
    external: dict[str, str] | None = None,
    packed: bool = False,
) -> bytes:
    """Return the fields of a TensorProto; its data is embedded unless ``external``."""
    shape = message(1, *map(varint, dims)) if packed else b"".join(number(1, d) for d in dims)
    body = shape + number(2, kind) + text(8, name)
    if external is not None:
        return body + b"".join(entry(*pair) for pair in external.items()) + number(14, 1)
    bits = {FLOAT: 32, INT4: 4}.get(kind, 8)
    size = (math.prod(dims) * bits + 7) // 8
    return body + message(9, bytes(size) if raw is None else raw)


def attribute(name: str, *fields: bytes) -> bytes:
    return message(5, text(1, name), *fields)


def node(kind: str, *attributes: bytes) -> bytes:
    return message(1, text(1, "x"), text(2, "y"), text(4, kind), *attributes)


def graph(*fields: bytes, name: str = "main") -> bytes:
    """Return the fields of a GraphProto."""
    return node("Add") + text(2, name) + b"".join(fields)


def initializer(*args: object, **options: object) -> bytes:
    return message(5, tensor(*args, **options))  # type: ignore[arg-type]


def model(inner: bytes, *fields: bytes, ir: int = 9, opset: int = 18) -> bytes:
    """Return a whole ONNX file."""
    imports = message(8, text(1, "com.microsoft"), number(2, 99)) + message(8, number(2, opset))
    return number(1, ir) + text(2, "by hand") + message(7, inner) + imports + b"".join(fields)


def plain_model() -> bytes:
    return model(graph(initializer("w", (2, 3)), initializer("b", (3,), packed=True)))


def external(location: str, offset: int | None = None, length: int | None = None) -> dict[str, str]:
    said = {"location": location}
    if offset is not None:
        said["offset"] = str(offset)
    if length is not None:
        said["length"] = str(length)
    return said


def saved_model(*, version: str = "2.16.1", schema: int = 1, has_saver: bool = True) -> bytes:
    """Return a whole saved_model.pb."""
    info = message(1, text(4, "serve"), text(5, version), text(6, "v2.16.1-0-g5bc9d26649c"))
    saver = message(3, text(1, "save/Const:0")) if has_saver else b""
    nodes = message(2, message(1, text(1, "x"), text(2, "Placeholder")))
    return number(1, schema) + message(2, info, nodes, saver)


def value(field: int, name: str, kind: int, *dims: int | str) -> bytes:
    """Return an input (field 11) or output (12) of a graph; texts are variable dimensions."""
    shape = [message(1, number(1, d) if isinstance(d, int) else text(2, d)) for d in dims]
    return message(
        field, text(1, name), message(2, message(1, number(1, kind), message(2, *shape)))
    )
