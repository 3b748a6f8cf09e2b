"""The metadata of a picture file that decide its look: its orientation and its colours.

They are read within bounds, and those that are damaged are as good as missing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

# Bytes of a colour profile; those of printers have 1 to 3 MiB
MAX_PROFILE = 4 << 20
# Bytes of Exif and XMP: the orientation is near their begin
_MAX_TEXT = 1 << 20
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_ICC = b"ICC_PROFILE\0"
# A JUMBF box in a segment (ISO/IEC 19566-5, D.2): before it are an instance and a number
_JUMBF_HEAD = 8
# The header of the box, which each segment repeats, and that of its description with its type
_BOX_HEAD, _STORE_TYPE = 8, slice(24, 28)
# Characters of a keyword in a PNG file
_MAX_KEYWORD = 79
_XMP_KEYWORD = b"XML:com.adobe.xmp"
# ImageMagick's form of Exif, in hexadecimal digits
_RAW_EXIF = (b"Raw profile type exif", b"Raw profile type APP1")
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:\s*=\s*[\"']|>)\s*([1-8])\b")
# Names of Pillow's
_TURNS: Mapping[int, str] = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@dataclass(slots=True, eq=False)
class FileMetadata:
    """The first Exif and XMP data of a file, its colour profile, and its manifests of C2PA.

    The parts of a profile are by their numbers: a JPEG has several, of the number that each states.
    """

    exif: bytes = b""
    xmp: bytes = b""
    _profile_parts: dict[int, bytes | memoryview] = field(default_factory=dict)
    _profile_count: int = 1
    manifests: int = 0
    _manifest_parts: list[memoryview] = field(default_factory=list)
    _manifest_instance: bytes = b""

    @property
    def profile(self) -> bytes | None:
        """Return the colour profile, or None without one.

        It is empty if it cannot be read, and longer than MAX_PROFILE if it is too long.
        """
        parts = self._profile_parts
        if not parts:
            return None
        if sorted(parts) != list(range(1, self._profile_count + 1)):
            return b""
        return b"".join(parts[number] for number in sorted(parts))

    @property
    def manifest(self) -> bytes:
        """Return the first manifest store of C2PA; empty without one."""
        return b"".join(self._manifest_parts)

    def add_segment(self, kind: int, body: memoryview) -> None:
        """Read a segment of a JPEG, of a kind from 0xE0 on."""
        if kind == 0xE1 and body[: len(_EXIF)] == _EXIF:
            # Exif data that are longer than a segment go on in the next one
            self.exif += bytes(body[len(_EXIF) :])[: _MAX_TEXT - len(self.exif)]
        elif kind == 0xE1 and body[: len(_XMP)] == _XMP:
            self.xmp = self.xmp or bytes(body[len(_XMP) :])
        elif kind == 0xE2 and body[: len(_ICC)] == _ICC and len(body) > len(_ICC) + 2:
            number, self._profile_count = body[len(_ICC) : len(_ICC) + 2]
            self._profile_parts[number] = body[len(_ICC) + 2 :]
        elif kind == 0xEB and bytes(body[:2]) == b"JP":
            self._add_jumbf(body)

    def _add_jumbf(self, body: memoryview) -> None:
        instance, number = bytes(body[2:4]), int.from_bytes(body[4:_JUMBF_HEAD], "big")
        if number == 1 and bytes(body[_STORE_TYPE]) == b"c2pa":
            self._add_manifest(body[_JUMBF_HEAD:])
            self._manifest_instance = instance
        elif number > 1 and instance == self._manifest_instance and self.manifests == 1:
            self._manifest_parts.append(body[_JUMBF_HEAD + _BOX_HEAD :])

    def _add_manifest(self, body: memoryview) -> None:
        self.manifests += 1
        if self.manifests == 1:
            self._manifest_parts.append(body)

    def add_chunk(self, name: bytes, body: memoryview) -> None:
        """Read a chunk of a PNG or WebP file."""
        if name in (b"eXIf", b"EXIF"):
            self.exif = self.exif or bytes(body[:_MAX_TEXT])
        elif name == b"XMP ":
            self.xmp = self.xmp or bytes(body[:_MAX_TEXT])
        elif name in (b"caBX", b"C2PA"):
            self._add_manifest(body)
        elif name == b"ICCP":
            self._profile_parts.setdefault(1, body[: MAX_PROFILE + 1])
        elif name == b"iCCP" and not self._profile_parts:
            _, _, rest = bytes(body[: _MAX_KEYWORD + 2]).partition(b"\0")
            packed = body[min(len(body), _MAX_KEYWORD + 2) - len(rest) :]
            self._profile_parts[1] = _inflate(packed, MAX_PROFILE)
        elif name in (b"tEXt", b"zTXt", b"iTXt"):
            self._add_text(name, body)

    def _add_text(self, name: bytes, body: memoryview) -> None:
        keyword, _, _ = bytes(body[: _MAX_KEYWORD + 1]).partition(b"\0")
        rest = body[len(keyword) + 1 :]
        if keyword == _XMP_KEYWORD and name == b"iTXt" and not self.xmp:
            head, text = bytes(rest[:2]), bytes(rest[2:][:_MAX_TEXT])
            # The language and the translated keyword are before the text
            text = text.split(b"\0", 2)[-1]
            self.xmp = _inflate(b"\0" + text, _MAX_TEXT) if head[:1] == b"\1" else text
        elif keyword in _RAW_EXIF and name != b"iTXt" and not self.exif:
            text = _inflate(rest, _MAX_TEXT) if name == b"zTXt" else bytes(rest[:_MAX_TEXT])
            # The name of the profile and its length are in lines before it
            digits = b"".join(text.split(b"\n")[3:]).decode("ascii", "replace")
            self.exif = _decode_digits(digits)

    def turn(self, image: Image.Image) -> Image.Image:
        """Return a picture upright."""
        from PIL import Image

        turn = _TURNS.get(_read_exif_orientation(self.exif) or _read_xmp_orientation(self.xmp))
        return image if turn is None else image.transpose(Image.Transpose[turn])


def _inflate(data: bytes | memoryview, limit: int) -> bytes:
    """Return data that follow the number of their compression, up to one byte above a limit.

    They are empty if they are damaged.
    """
    try:
        return zlib.decompressobj().decompress(data[1:], limit + 1) if data[:1] == b"\0" else b""
    except zlib.error:
        return b""


def _decode_digits(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return b""


def _read_xmp_orientation(xmp: bytes) -> int:
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match else 0


def _read_exif_orientation(exif: bytes) -> int:
    """Return the orientation in Exif data, 1 to 8, of whatever type; 0 if it is not clear."""
    from PIL import ExifTags, Image

    reader = Image.Exif()
    try:
        reader.load(exif)
        value = reader.get(ExifTags.Base.Orientation)
        value = value[0] if isinstance(value, tuple) else value
        if isinstance(value, str | bytes):
            return _parse_orientation(value if isinstance(value, bytes) else value.encode())
        number = int(value) if value is not None and int(value) == value else 0
    except Exception:
        # Pillow has no common class for the errors of damaged data
        return 0
    return number if number in range(1, 9) else 0


def _parse_orientation(text: bytes) -> int:
    """Return an orientation as a digit, or as a number of one or more bytes."""
    text = text.strip(b" \0")
    if len(text) != 1:
        return 0
    number = text[0] - ord("0") if text.isdigit() else text[0]
    return number if number in range(1, 9) else 0
