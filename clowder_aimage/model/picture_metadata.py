"""The metadata of a picture file: its generation settings, as JSON and as text.

In a PNG the JSON is an international text chunk named ``aimage`` (PNG specification, 11.3.3.4),
beside the registered keywords ``Description`` and ``Software``. JPEG and WebP have it in the Exif
tag ``MakerNote`` (Exif 2.3, 4.6.5), after ``aimage`` and a zero byte. ``parameters``, in Exif the
tag ``UserComment``, is text in the form of stable-diffusion-webui (its ``create_infotext``), for
sites and viewers. All of it is read here without Pillow, within the bounds of the file.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from clowder_aimage import __version__
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import read_json

KEY = "aimage"
MAX_METADATA = 1 << 20  # bytes of JSON
# Default qualities; PNG is lossless and has none
QUALITIES = {"jpeg": 75, "webp": 80}
MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}
_NOTE = b"aimage\0"
_EXIF = b"Exif\0\0"
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_EXIF_TAG, _NOTE_TAG = 0x8769, 0x927C


def add_quality(metadata: Mapping[str, Any], kind: str, quality: int | None) -> dict[str, Any]:
    """Return the metadata of a file in a format, with its quality if it has one."""
    stated_quality = QUALITIES.get(kind) if quality is None else quality
    return {**metadata, **({"quality": stated_quality} if kind in QUALITIES else {})}


def encode_maker_note(metadata: Mapping[str, Any]) -> bytes:
    """Return the Exif tag of metadata."""
    return _NOTE + json.dumps(metadata, ensure_ascii=False).encode()


def detect_kind(data: bytes) -> str:
    """Return the format of a file by its first bytes; empty if it is another."""
    return next((kind for kind, magic in MAGIC.items() if data.startswith(magic)), "")


def read_metadata(data: bytes) -> dict[str, Any]:
    """Return the metadata of a picture file; empty without any.

    Raises FormatError: the Exif data is damaged.
    """
    kind = detect_kind(data)
    if kind == "png":
        return _parse_metadata(_find_text(data))
    exif = {"jpeg": _find_jpeg_exif, "webp": _find_webp_exif}.get(kind, lambda _: b"")(data)
    try:
        note = _find_maker_note(exif) if exif else b""
    except (struct.error, LookupError):
        raise FormatError("the Exif data is damaged") from None
    return _parse_metadata(note.removeprefix(_NOTE)) if note.startswith(_NOTE) else {}


def _parse_metadata(raw: bytes) -> dict[str, Any]:
    try:
        metadata = read_json(raw, KEY, MAX_METADATA)
    except FormatError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _find_text(data: bytes) -> bytes:
    """Return the text of the chunk of metadata of a PNG file (PNG specification, 5.3)."""
    at = len(MAGIC["png"])
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"iTXt" and data.startswith(b"aimage\0", at + 8):
            compressed, text = data[at + 15 : at + 16] != b"\0", data[at + 17 : at + 8 + length]
            # The text follows the language and the translated keyword
            text = text.split(b"\0", 2)[-1]
            return _inflate(text) if compressed else text
        at += 12 + length
    return b""


def _inflate(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, MAX_METADATA + 1)
    except zlib.error:
        return b""


def _find_jpeg_exif(data: bytes) -> bytes:
    """Return the Exif data of a JPEG file (Exif 2.3, 4.5.4): it is before the first scan."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, at + 2)
        if data[at + 1] == 0xE1 and data.startswith(_EXIF, at + 4):
            return data[at + 4 + len(_EXIF) : at + 2 + length]
        at += 2 + length
    return b""


def _find_webp_exif(data: bytes) -> bytes:
    """Return the Exif data of a WebP file (RFC 9649, 2.7)."""
    at = 12
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            return data[at + 8 : at + 8 + length].removeprefix(_EXIF)
        at += 8 + length + length % 2
    return b""


def _find_maker_note(exif: bytes) -> bytes:
    """Return the tag MakerNote of Exif data; empty without it. Raises struct.error, LookupError."""
    order = _ORDERS[exif[:4]]
    (root,) = struct.unpack_from(f"{order}I", exif, 4)
    _, directory = _tag(exif, order, root, _EXIF_TAG)
    size, start = _tag(exif, order, directory, _NOTE_TAG) if directory else (0, 0)
    if start + size > len(exif):
        raise LookupError
    return exif[start : start + size]


def _tag(exif: bytes, order: str, at: int, number: int) -> tuple[int, int]:
    """Return the count and the offset of the values of a tag in a directory (TIFF 6.0, 2), or 0."""
    (count,) = struct.unpack_from(f"{order}H", exif, at)
    for index in range(count):
        tag, _, size, value = struct.unpack_from(f"{order}HHII", exif, at + 2 + 12 * index)
        if tag == number:
            return size, value
    return 0, 0


def format_parameters(metadata: Mapping[str, Any], width: int, height: int) -> str:
    """Return metadata as stable-diffusion-webui writes them."""
    negative, end = metadata.get("negative"), metadata.get("guidance_end")
    stated = {
        "Steps": metadata.get("steps"),
        # The only sampler of flow matching
        "Sampler": "Euler",
        "CFG scale": metadata.get("guidance"),
        "Guidance end": None if end == 1 else end,
        "Cache threshold": metadata.get("cache_threshold") or None,
        "Seed": metadata.get("seed"),
        "Size": f"{width}x{height}",
        "Model hash": str(metadata.get("digest", "")).rpartition(":")[2][:10] or None,
        "Model": str(metadata.get("reference", "")).rpartition("/")[2].removesuffix(":latest")
        or None,
        "Lora hashes": _format_lora_hashes(metadata) or None,
        "Version": f"aimage {__version__}",
    }
    settings_line = ", ".join(
        f"{key}: {_quote(value)}" for key, value in stated.items() if value is not None
    )
    tags = "".join(
        f" <lora:{use.get('model')}:{use.get('strength')}>" for use in metadata.get("loras", ())
    )
    prompt = f"{metadata.get('prompt', '')}{tags}"
    lines = [prompt, f"Negative prompt: {negative}" if negative else "", settings_line]
    return "\n".join(filter(None, lines))


def _format_lora_hashes(metadata: Mapping[str, Any]) -> str:
    """Return the names of adapters with the first digits of their digests."""
    uses = [(use.get("model"), str(use.get("digest") or "")) for use in metadata.get("loras", ())]
    return ", ".join(f"{name}: {digest.rpartition(':')[2][:12]}" for name, digest in uses)


def _quote(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if set(text) & set(',:"\n') else text
