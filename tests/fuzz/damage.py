"""Random damage to JSON values, texts and bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DIGEST = "sha256:" + "0" * 64
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, 1e308, -1e308, 1e-320, 2**24, 2**31, 2**53 + 1, 2**63),
    *(2**64, 10**400, "", "a", "\n", "\0", "\x1b[31m", "\x9b2J", "\u202e", "\ud800", "é" * 300),
    *("../../x", "/etc/passwd", DIGEST, "sha256:x", "9" * 5000, "1e999", "nan", "64x64", "-1x5"),
    *("a/b/c:d", "127.0.0.1:1/a:b", "http://127.0.0.1/x", "2024-01-01", "x\0y", "BF16", "int4"),
    *("[1,2]", "{{ x }}", "a\nb  c", "\u2028", "x" * 3000, [], {}, [None], [[[]]], {"a": None}),
    *(["a"], [1, 2], [2**31] * 4, {"type": "int4", "group_size": 0}, {"bits": 10**400}),
]
KEYS = [
    *("name", "path", "dtype", "shape", "format", "config", "annotations", "subject", "platform"),
    *("artifactType", "mediaType", "urls", "data", "size", "defaults", "parameters", "license"),
    *("quantization", "rope_parameters", "_class_name", "metadata", "weight_map", "model", "error"),
    *("components", "vnd.clowder.aimage.content.size", "vnd.clowder.aimage.shape", "\u202e", ""),
]


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a document; of long lists, the first items."""
    if isinstance(value, dict):
        inside: Any = value.items()
    elif isinstance(value, list):
        inside = enumerate(value[:30])
    else:
        return
    for key, item in inside:
        yield (*above, key)
        yield from places(item, (*above, key))


def damage_json(rng: random.Random, document: Any) -> Any:
    """Return a copy with one to three changes: values replaced, removed, added or moved."""
    changed = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(changed))
        if not found:
            return rng.choice(VALUES)
        *above, last = rng.choice(found)
        owner = changed
        for key in above:
            owner = owner[key]
        value = copy.deepcopy(rng.choice(VALUES))
        match rng.randrange(10):
            case 0 | 1 if isinstance(owner, dict):
                del owner[last]
            case 2 | 3 if isinstance(owner, dict):
                owner[rng.choice(KEYS)] = value
            case 4 if isinstance(owner, list):
                owner.insert(rng.randrange(len(owner) + 1), value)
            case 5:
                *path, end = rng.choice(found)
                other = changed
                for key in path:
                    other = other[key] if isinstance(other, dict | list) else {}
                owner[last] = copy.deepcopy(other[end]) if path or end in other else value
            case 6 if isinstance(owner[last], str):
                owner[last] = damage_text(rng, owner[last])
            case _:
                owner[last] = value
    return changed


def damage_text(rng: random.Random, text: str) -> str:
    """Return a text with a part removed, repeated or replaced."""
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randrange(9))
    middle = rng.choice(("", text[start:end] * rng.randrange(2, 9), str(rng.choice(VALUES))))
    return text[:start] + middle + text[end:]


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with one to three faults."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(7):
            case 0 | 1 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                raw[at : at + 4] = rng.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "big")
            case 3:
                del raw[at : at + rng.randrange(1, 9)]
            case 4:
                raw[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                raw[at:at] = raw[at : at + rng.randrange(1, 60)]
            case _:
                if rng.random() < 0.3:
                    del raw[at:]
    return bytes(raw)


def encoded(rng: random.Random, document: Any) -> bytes:
    """Return a document as JSON, now and then with damage to its bytes."""
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    raw = text.encode("utf-8", "surrogatepass")
    return damage_bytes(rng, raw) if rng.random() < 0.1 else raw
