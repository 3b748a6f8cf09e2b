"""Invalid safetensors files, derived from valid ones; deterministic for a seed.

There are three levels: the contents (still valid), the spelling of the JSON (as tokens, so that
``1.0``, ``-0`` and duplicate keys are possible), and bytes. ``mutant(seed)`` returns the file.
"""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

from clowder_aimage.tensor import DTYPE_BITS, compute_nbytes, encode_header

Tensor = tuple[str, str, tuple[int, ...]]
Blob = tuple[list[Tensor], dict[str, str]]
Pairs = list[list[Any]]  # an object: its keys and values; keys may be duplicated


def token(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def affine(name: str, rows: int, columns: int, bits: int, group: int) -> list[Tensor]:
    return [
        (name, "U32", (rows, columns * bits // 32)),
        (f"{name}.scale", "BF16", (rows, columns // group)),
        (f"{name}.bias", "BF16", (rows, columns // group)),
    ]


SEEDS: dict[str, Blob] = {
    "unquantized": ([("model.norm.weight", "BF16", (2, 3))], {}),
    "legacy": ([("data", "F32", (2, 2))], {}),
    "several": (
        [("b", "F32", (2,)), ("a", "F16", (1, 2)), ("z", "U8", (0, 3)), ("s", "I64", ())],
        {"format": "pt"},
    ),
    "empty": ([("e", "F32", (0, 4)), ("f", "U8", (2, 0))], {}),
    "small types": (
        [("f4", "F4", (3, 2)), ("f6", "F6_E2M3", (4,)), ("f8", "F8_E4M3FNUZ", (3,))],
        {},
    ),
    "int4": (affine("w", 2, 64, 4, 32), {"quant_type": "int4", "group_size": "32"}),
    "int8": (affine("w", 2, 64, 8, 64), {"quant_type": "int8", "group_size": "64"}),
    "nvfp4": (
        [
            ("w", "U32", (2, 2)),
            ("w.scale", "U8", (2, 1)),
            ("w.global_scale", "F32", ()),
            ("w.input_scale", "F32", ()),
        ],
        {"quant_type": "nvfp4", "group_size": "16"},
    ),
    "mlx": (
        [("x.weight", "U32", (2, 8)), ("x.scales", "F16", (2, 1)), ("x.biases", "F16", (2, 1))],
        {"quant_type": "int4", "group_size": "64"},
    ),
    "packed": (
        [
            *affine(EXPERT.format(0), 2, 64, 4, 64),
            (EXPERT.format(1), "U32", (2, 8)),
            (EXPERT.format(1) + ".scale", "U8", (2, 1)),
            (EXPERT.format(2), "F16", (1, 2)),
        ],
        {
            EXPERT.format(0) + ".quant_type": "int4",
            EXPERT.format(0) + ".group_size": "64",
            EXPERT.format(1) + ".quant_type": "mxfp8",
            EXPERT.format(1) + ".group_size": "32",
        },
    ),
    "metadata": (
        [("größe.重み", "U8", (4,))],
        {"format": "pt", "description": 'a "quoted"\\ line\n and \U0001f600', "": ""},
    ),
}
WORDS = (
    "0 1 2 7 -0 -1 1.0 0.0 1e0 1E3 01 +1 .5 1. 1e400 NaN Infinity true false null {} [] [0] "
    '"1" "" 0x1 1_0 ١ 2147483648 9007199254740993 72057594037927936 72057594037927937 '
    "9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616"
)
NUMBERS = (*WORDS.split(), "9" * 30, "9" * 5000)
NAMES = ["", "a", "data", "__metadata__", "a\nb", "\x00", "\x7f", "\x9b", "\u202e", "w", "w.scale"]
LONG_NAME = "layers.0." * 114  # 1026 characters
RAW_NAMES = ['"\\ud800"', '"\\u0061"', '"\\u005f_metadata__"', '"a\nb"', '"\\x"', "a", "1", "'a'"]
FIELDS = ["dtype", "shape", "data_offsets", "Dtype", "dtype ", "x", "offsets"]
METADATA = ["null", "[]", "{}", '{"a":1}', '{"a":null}', '{"a":"\\ud800"}', '{"a":"b","a":"b"}']
ITEMS = ["null", "[]", "{}", '["U8",[1],[0,1]]', '["U8",[0],[0,0]]', '"F32"', "[" * 200 + "]" * 200]
SUFFIXES = ["", ".scale", ".bias", ".global_scale", ".input_scale", ".weight", ".scales", "2"]
KINDS = [token(kind) for kind in (*DTYPE_BITS, "F4_E2M1", "f32", "I4", "", "F8_E4M3FN")]
KINDS += ['{"F32":null}', '{"U8":null}', "4", "null"]
FIELD_VALUES = ["null", "1.5", "NaN", "-0", "[[[[]]]]", '{"a":1,"a":1}', '"x"', "9" * 25]


def pairs_of(blob: Blob) -> tuple[Pairs, int]:
    """Return a header as keys and values in JSON text, and the size of its data."""
    tensors, metadata = blob
    written: Pairs = []
    if metadata:
        written.append([token("__metadata__"), [[token(k), token(v)] for k, v in metadata.items()]])
    start = 0
    for name, dtype, shape in tensors:
        end = start + compute_nbytes(dtype, shape)
        span = [token(start), token(end)]
        fields = [
            [token("dtype"), token(dtype)],
            [token("shape"), tuple(map(token, shape))],
            [token("data_offsets"), tuple(span)],
        ]
        written.append([token(name), fields])
        start = end
    return written, start


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return f"[{','.join(map(text_of, value))}]"
    return "{" + ",".join(f"{key}:{text_of(item)}" for key, item in value) + "}"


def file_of(text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def respell(rng: random.Random, blob: Blob) -> Blob:
    """Return another blob, which is still valid."""
    tensors, metadata = list(blob[0]), dict(blob[1])
    at = rng.randrange(len(tensors))
    match rng.randrange(6):
        case 0 | 1 | 2:
            tensors[at] = another(rng, tensors[at])
        case 3:
            rng.shuffle(tensors)
        case 4:
            tensors.pop(at)
        case _:
            if metadata and rng.random() < 0.4:
                metadata.pop(rng.choice(sorted(metadata)))
            claim(rng, tensors, metadata)
    if len({name for name, _, _ in tensors}) < len(tensors) or not all(map(whole, tensors)):
        return blob
    return tensors, metadata


def another(rng: random.Random, tensor: Tensor) -> Tensor:
    """Return a tensor with another name, type or shape."""
    name, dtype, shape = tensor
    match rng.randrange(4):
        case 0:
            dtype = rng.choice(sorted(DTYPE_BITS))
        case 1:
            shape = tuple(rng.choice((0, 1, 2, 3, 4, 8, 16)) for _ in range(rng.randrange(4)))
        case 2 if shape:
            axis = rng.randrange(len(shape))
            shape = (*shape[:axis], rng.choice((0, 1, 2, 8, 64)), *shape[axis + 1 :])
        case _:
            name = rng.choice((name, "w", EXPERT.format(1))) + rng.choice(SUFFIXES)
    return name, dtype, shape


def claim(rng: random.Random, tensors: list[Tensor], metadata: dict[str, str]) -> None:
    """Add metadata on the quantization of the blob, or of one of its tensors."""
    owner = rng.choice(["", *(f"{name}." for name, _, _ in tensors)])
    kinds = ("int4", "INT8", "nvfp4", "mxfp4", "mxfp8", "fp8", "x", "32", "64", "16", "-1", "")
    metadata[owner + rng.choice(("quant_type", "group_size"))] = rng.choice((*kinds, "9" * 5000))


def whole(tensor: Tensor) -> bool:
    """Return whether it ends on a byte boundary; otherwise it cannot be written."""
    return math.prod(tensor[2]) * DTYPE_BITS[tensor[1]] % 8 == 0


def rewrite(rng: random.Random, pairs: Pairs) -> None:
    """Replace one token of the JSON."""
    objects = [pair for pair in pairs if isinstance(pair[1], list) and pair[1]]
    if not objects:
        pairs.append([token("a"), rng.choice(ITEMS)])
        return
    pair = rng.choice(objects)
    if pair[0] == token("__metadata__") and rng.random() < 0.6:
        rng.choice(pair[1])[rng.randrange(2)] = rng.choice((*RAW_NAMES, "null", token("w")))
        return
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            renumber(rng, pair[1])
        case 4 | 5:
            refield(rng, pair[1])
        case 6:
            names = (
                [token(name) for name in (*NAMES, LONG_NAME)]
                + RAW_NAMES
                + [other[0] for other in pairs]
            )
            pair[0] = rng.choice(names)
        case 7:
            pair[1] = rng.choice(ITEMS)
        case 8:
            if len(objects) == len(pairs) or rng.random() < 0.2:
                pairs.insert(0, [token("__metadata__"), rng.choice(METADATA)])
        case _:
            reorder(rng, pairs, pair)


def renumber(rng: random.Random, fields: Pairs) -> None:
    """Change a number in a shape or a span, or the length of either."""
    lists = [field for field in fields if isinstance(field[1], tuple)]
    if not lists:
        return
    field = rng.choice(lists)
    numbers = list(field[1])
    if numbers and rng.random() < 0.8:
        at = rng.randrange(len(numbers))
        numbers[at] = rng.choice(NUMBERS if rng.random() < 0.4 else near(numbers[at]))
        field[1] = tuple(numbers)
        return
    others = [(*numbers, "1"), (*numbers, "0"), ("0", *numbers), ("1",) * 40, (*numbers, *NUMBERS)]
    field[1] = rng.choice([*others, tuple(numbers[1:]), tuple(numbers[::-1]), rng.choice(NUMBERS)])


def near(number: str) -> list[str]:
    """Return the neighbours of a number, and other spellings of it."""
    if not number.isdigit() or len(number) > 18:
        return [number[1:], number[:-1]]
    truth = {"0": ["-0", "-0", "false"], "1": ["true"]}.get(number, [])
    steps = [str(int(number) + step) for step in (-1, 1, 4)]
    return [*steps, *truth, f"{number}.0", f"{number}e0", f"0{number}", f'"{number}"']


def refield(rng: random.Random, fields: Pairs) -> None:
    """Add, remove or rename a field, or change the dtype."""
    at = rng.randrange(len(fields))
    key, value = fields[at]
    match rng.randrange(6):
        case 0:
            fields[at] = [token(rng.choice(FIELDS)), value]
        case 1:
            fields[at] = [key.replace("a", "\\u0061"), value]
        case 2:
            fields.insert(at, list(rng.choice(fields)))
        case 3:
            fields.pop(at)
        case 4:
            fields.append([token(rng.choice(FIELDS)), rng.choice(FIELD_VALUES)])
        case _:
            fields[:] = [
                [key, rng.choice(KINDS) if key == token("dtype") else value]
                for key, value in fields
            ]


def reorder(rng: random.Random, pairs: Pairs, pair: list[Any]) -> None:
    if rng.random() < 0.3:
        pairs.insert(rng.randrange(len(pairs)), list(pair))
    elif rng.random() < 0.2:
        pairs.remove(pair)
    rng.shuffle(pairs)


def respace(rng: random.Random, text: bytes) -> bytes:
    """Change padding and white space, validly or not."""
    around = (b"", b" ", b"\n", b"\t \r", b"\0", b"\x0b", b"\xc2\xa0", b"\xef\xbb\xbf", b"{}", b",")
    inside = rng.choice((b",", b":", b"{", b"["))
    if rng.random() < 0.3:
        return text.replace(inside, inside + rng.choice(around[:4]))
    if rng.random() < 0.3:
        return rng.choice(around) + text
    return text + rng.choice(around) * rng.randrange(1, 4)


def damage(rng: random.Random, raw: bytearray) -> None:
    """Damage the bytes of a file once."""
    at = rng.randrange(len(raw)) if raw else 0
    match rng.randrange(10):
        case 0 if raw:
            raw[at] ^= 1 << rng.randrange(8)
        case 1 if raw:
            raw[at] = rng.randrange(256)
        case 2:
            del raw[at:]
        case 3:
            del raw[at : at + rng.randrange(1, 9)]
        case 4:
            raw[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 5:
            raw[at:at] = raw[at : at + rng.randrange(1, 60)]
        case 6:
            lengths = (0, 1, len(raw) - 8, len(raw), 100_000_000, 100_000_001, 2**63, 2**64 - 1)
            raw[:8] = struct.pack("<Q", max(0, rng.choice(lengths)))
        case 7:
            raw += rng.choice((b"\0", b"}", bytes(8), rng.randbytes(3)))
        case _:
            digits = [i for i, byte in enumerate(raw[:400]) if 48 <= byte <= 57]
            if digits:
                raw[rng.choice(digits)] = rng.choice(b"0123456789-.e")


def respelled(rng: random.Random, pairs: Pairs, data: bytes) -> tuple[bytes, bytes]:
    """Return a rewritten header and its data."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rewrite(rng, pairs)
    text = text_of(pairs).encode()
    if rng.random() < 0.2:
        text = respace(rng, text)
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)] + bytes(rng.randrange(3))
    return text, data


def mutant(seed: int) -> bytes:
    """Return the file of this number: the same on every machine. Data are consecutive numbers."""
    rng = random.Random(seed)
    blob = SEEDS[rng.choice(sorted(SEEDS))]
    levels = rng.choice(("blob", "text", "bytes", "blob text", "text bytes", "blob text bytes"))
    if "blob" in levels:
        for _ in range(rng.randrange(1, 4)):
            if blob[0]:
                blob = respell(rng, blob)
    pairs, size = pairs_of(blob)
    data = bytes(i % 251 for i in range(size))
    text = text_of(pairs).encode()
    if "text" in levels:
        text, data = respelled(rng, pairs, data)
    elif levels == "blob":
        return encode_header(*blob) + data
    if "bytes" in levels and rng.random() < 0.6:  # a valid length, so that more is read
        raw = bytearray(text)
        damage(rng, raw)
        return file_of(bytes(raw), data)
    raw = bytearray(file_of(text, data))
    if "bytes" in levels:
        for _ in range(rng.randrange(1, 4)):
            damage(rng, raw)
    return bytes(raw)
