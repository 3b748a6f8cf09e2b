"""Measure the memory that each use of a picture takes: ``python -m tests.picture_memory FOLDER``.

Each use runs in a process of its own, which has the modules already. Printed are the bytes that it
used at most, and those of its decoded pictures: four bytes for a pixel of what it takes and makes.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flux2.reference_picture import fit_reference
from clowder_aimage.oci import Digest
from clowder_aimage.pictures.file_parts import read_parts
from clowder_aimage.pictures.input import (
    PictureInputs,
    PreparedPicture,
    TiledPicture,
    check_mask,
    inspect,
    whiten_mask,
)
from tests.model.model_blobs import FolderStore

SIDE = 2048
NARROW = 512, 8192
MODES = "1", "L", "LA", "P", "RGB", "RGBA", "I;16"
Use = Callable[[], object]


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    # The encoder takes most of the time, and its level changes nothing for a decoder
    image.save(file, kind, **({"compress_level": 1} if kind == "PNG" else {}), **options)
    return file.getvalue()


def draw(mode: str, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Return a picture of gradients."""
    grey = Image.linear_gradient("L").resize(size)
    if mode == "I;16":
        return Image.fromarray(np.asarray(grey).astype(np.uint16) * 200)
    return grey.convert("RGB").convert(mode) if mode in ("P", "CMYK") else grey.convert(mode)


def encode_mode(mode: str) -> bytes:
    return encode(draw(mode))


def encode_interlaced() -> bytes:
    """Return a black picture in seven passes (PNG, 8.2), which Pillow does not write."""
    passes = (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)
    rows = b"".join(
        bytes(1 + 3 * len(range(x, SIDE, across))) * len(range(y, SIDE, down))
        for x, y, across, down in (*passes, (0, 1, 1, 2))
    )
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 1)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )


def encode_deep() -> bytes:
    """Return a PNG file of 16 bits without compression, with metadata."""
    rows = (b"\0" + bytes(SIDE * 8)) * SIDE
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", head),
            (b"tEXt", b"a\0b"),
            (b"IDAT", zlib.compress(rows, 0)),
            (b"IEND", b""),
        )
    )


def build_profile() -> bytes:
    """Return the profile of sRGB with another white, so that colours are converted."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    # The first numbers of the red, green and blue colorants, at their places in the table of tags
    for tag in (b"rXYZ", b"gXYZ", b"bXYZ"):
        entry = profile.index(tag)
        place = int.from_bytes(profile[entry + 4 : entry + 8], "big") + 8
        value = int.from_bytes(profile[place : place + 4], "big")
        profile[place : place + 4] = int(value * 0.9).to_bytes(4, "big")
    return bytes(profile)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


# Files that are accepted
FILES: Mapping[str, Callable[[], bytes]] = {
    **{mode: partial(encode_mode, mode) for mode in MODES},
    "P with transparency": lambda: encode(draw("P"), transparency=0),
    "RGB with transparency": lambda: encode(draw("RGB"), transparency=(0, 0, 0)),
    "JPEG": lambda: encode(draw("RGB"), "JPEG"),
    "JPEG L": lambda: encode(draw("L"), "JPEG"),
    "JPEG CMYK": lambda: encode(draw("CMYK"), "JPEG"),
    "JPEG progressive": lambda: encode(draw("RGB"), "JPEG", progressive=True, subsampling=0),
    "JPEG CMYK progressive": lambda: encode(draw("CMYK"), "JPEG", progressive=True),
    "WebP": lambda: encode(draw("RGB"), "WEBP", method=0),
    "WebP lossless": lambda: encode(draw("RGBA"), "WEBP", lossless=True, method=0),
    "WebP lossless and turned": lambda: encode(
        Image.new("RGBA", (8192, 4096), "navy"), "WEBP", lossless=True, method=0, exif=turned(8)
    ),
    "PNG turned": lambda: encode(draw("RGB"), exif=turned(6)),
    "JPEG turned": lambda: encode(draw("RGB"), "JPEG", exif=turned(3)),
    "WebP turned": lambda: encode(draw("RGB"), "WEBP", exif=turned(5)),
    "L turned": lambda: encode(draw("L"), exif=turned(8)),
    "I;16 turned": lambda: encode(draw("I;16"), exif=turned(2)),
    "interlaced": encode_interlaced,
    "high": lambda: encode(draw("RGB", NARROW)),
    "wide": lambda: encode(draw("RGB", NARROW[::-1])),
    "long metadata": lambda: encode(draw("RGB"), exif=b"II*\0\x08" + bytes(8 << 20)),
    "metadata alone": lambda: encode(draw("RGB", (64, 64)), exif=b"II*\0\x08" + bytes(4 << 20)),
    "RGBA with a profile": lambda: encode(draw("RGBA"), icc_profile=build_profile()),
    "deep with metadata": encode_deep,
    "a profile that grows": lambda: encode(draw("RGB", (64, 64)), icc_profile=bytes(60 << 20)),
    "10 MiB of metadata": lambda: encode(draw("RGB", (64, 64)), exif=bytes(10 << 20)),
}


class Pictures:
    """The pictures of a request in a folder."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder)
        self.image = self.add(draw("RGB"))
        self.mask = self.add(Image.new("L", (SIDE, SIDE), 255))
        self.part = Image.new("L", (SIDE, SIDE))
        self.part.paste(255, (100, 100, SIDE // 2, SIDE // 3))
        self.part_mask = self.add(self.part)
        self.high, self.wide = self.add(draw("RGB", NARROW)), self.add(draw("RGB", NARROW[::-1]))
        self.small = self.add(draw("RGB", (SIDE // 2, SIDE // 2)))

    def add(self, image: Image.Image) -> str:
        return str(self.store.add("image/png", encode(image)).digest)

    def read(self, digest: str) -> bytes:
        return (self.store.root / Digest.parse(digest).encoded).read_bytes()

    def open(self, **values: Any) -> PreparedPicture | TiledPicture:
        values = {"width": 512, "height": 512, **values}
        opened = PictureInputs(self.store).open(GenerateRequest.of("a fox", **values))
        assert opened is not None
        return opened

    def finish(self, **values: Any) -> PreparedPicture | TiledPicture:
        """Open the pictures of a request, and join what a model makes of them."""
        opened = self.open(**values)
        if isinstance(opened, TiledPicture):
            opened.finish([np.asarray(part.pixels) for part in opened.parts])
        else:
            opened.finish(np.asarray(opened.inputs.pixels))
        return opened


def list_uses(pictures: Pictures) -> dict[str, tuple[int, Use]]:
    """Return the uses by their names, with the pixels that they take and make."""
    area, made = SIDE * SIDE, 512 * 512
    image = {"image": pictures.image}
    uses: dict[str, tuple[int, Use]] = {
        "mask of a picture": (
            2 * area,
            lambda: check_mask(pictures.read(pictures.image), pictures.read(pictures.mask)),
        ),
        "mask that is reversed": (
            area,
            lambda: whiten_mask(encode(draw("RGBA", (1024, 1024))), "it", "transparent"),
        ),
        "control": (area + made, lambda: pictures.open(control=pictures.image)),
        "mask and control": (
            3 * area + made,
            lambda: pictures.finish(**image, mask=pictures.mask, control=pictures.image),
        ),
        "paste": (
            2 * area + made,
            lambda: pictures.finish(**image, mask=pictures.mask, paste=True, feather=8),
        ),
        "crop to the mask": (
            2 * area + made,
            lambda: pictures.finish(**image, mask=pictures.part_mask, crop=True, feather=8),
        ),
        "expand": (
            area + (SIDE + 512) ** 2,
            lambda: pictures.finish(
                **image, expand=(256,) * 4, width=SIDE + 512, height=SIDE + 512
            ),
        ),
        "upscale": (
            area // 4 + area,
            lambda: pictures.finish(image=pictures.small, upscale=2, width=1024, height=1024),
        ),
        "references": (
            4 * area,
            lambda: [
                fit_reference(np.asarray(pixels), 32)
                for opened in [pictures.open(references=(pictures.image,) * 4)]
                if isinstance(opened, PreparedPicture)
                for pixels in opened.inputs.references
            ],
        ),
    }
    for name, digest in ("image", pictures.image), ("high", pictures.high), ("wide", pictures.wide):
        for mode in ("crop", "pad", "stretch"):
            uses[f"{mode} of the {name}"] = (
                area + made,
                partial(pictures.open, image=digest, fit=mode),
            )
    uses["crop of the high one to a wide one"] = (
        area + 4096 * 256,
        lambda: pictures.open(image=pictures.high, width=4096, height=256),
    )
    for name, build in FILES.items():
        data = build()
        with Image.open(io.BytesIO(read_parts(data, "it").pixels)) as opened:
            uses[f"file: {name}"] = opened.width * opened.height, partial(inspect, data, "it")
    return uses


def measure(use: Use) -> int:
    """Return the bytes that a use takes at most, in a process of its own."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            use()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, str(used * 1024).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, encoding="ascii") as result:  # noqa: PTH123 - a descriptor
        return int(result.read())


if __name__ == "__main__":
    found = Pictures(Path(sys.argv[1]))
    measured = {name: (measure(use), 4 * area) for name, (area, use) in list_uses(found).items()}
    sys.stdout.write(json.dumps(measured))
