"""Pictures in the Python interface."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

    from clowder_aimage.model.picture_mark import PictureMark


class Picture:
    """A generated picture: RGB ``pixels`` (height, width, 3), its seed, and its metadata.

    The ``mark`` of its files says that a machine made it; set it to None to write none.
    """

    def __init__(
        self,
        pixels: npt.NDArray[np.uint8],
        seed: int,
        facts: Mapping[str, Any],
        mark: PictureMark | None = None,
    ) -> None:
        self._pixels: npt.NDArray[np.uint8] | None = pixels
        self._png = b""
        self._mark = mark
        self.seed, self.facts = seed, facts

    def __repr__(self) -> str:
        # The header of a PNG file begins with the width and the height.
        if self._pixels is None:
            width, height = (int.from_bytes(self._png[at : at + 4]) for at in (16, 20))
        else:
            height, width = self._pixels.shape[:2]
        return f"<Picture {width}x{height}, seed {self.seed}>"

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """Return the pixels: height, width, and red, green and blue."""
        if self._pixels is None:
            from clowder_aimage.model.picture import read_picture

            self._pixels = read_picture(self._png, "the picture").pixels
        return self._pixels

    @property
    def image(self) -> Image:
        """Return the picture as an image of Pillow."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def encode(self, kind: str = "png") -> bytes:
        """Return the bytes of a file: png, jpeg or webp."""
        if kind == "png" and self._png:
            return self._png
        from clowder_aimage.model.picture import encode_picture

        facts = self.facts if self.mark else {**self.facts, "mark": False}
        return encode_picture(self.pixels, facts, kind, mark=self.mark)

    @property
    def mark(self) -> PictureMark | None:
        """Return what its files say about its origin; None without a mark."""
        if self._png and self._mark is None:
            from clowder_aimage.pictures.provenance.marking import read_mark

            self._mark = read_mark(self._png, "the picture")
        return self._mark

    @mark.setter
    def mark(self, mark: PictureMark | None) -> None:
        if mark != self.mark:
            # Decoded before the file is forgotten
            self._pixels, self._png, self._mark = self.pixels, b"", mark

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a .png, .jpg or .webp file and return its path. Raises UsageError for others."""
        from clowder_aimage.content.atomic_file import write_file

        path = Path(path)
        kind = path.suffix.lower().removeprefix(".").replace("jpg", "jpeg")
        if kind not in ("png", "jpeg", "webp"):
            raise UsageError(f"only .png, .jpg and .webp files can be written, not {path.name}")
        write_file(path, self.encode(kind), durable=False)
        return path

    def _repr_png_(self) -> bytes:
        """Return the file that a notebook shows."""
        return self.encode()


class PictureFile(Picture):
    """A picture in a PNG file, which is decoded when its pixels are used."""

    def __init__(self, png: bytes, seed: int, facts: Mapping[str, Any]) -> None:
        self._pixels, self._png, self._mark = None, png, None
        self.seed, self.facts = seed, facts
