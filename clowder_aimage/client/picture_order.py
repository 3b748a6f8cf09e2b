"""Requests for pictures in the Python interface, and the pictures that they begin with."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clowder_aimage.client.picture import Picture
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import ALPHA, GenerateRequest, LoraUse
from clowder_aimage.generation.seed import read_seed
from clowder_aimage.generation.size import parse_size

if TYPE_CHECKING:
    import numpy.typing as npt

    from clowder_aimage.generation.keywords import PictureKeywords
    from clowder_aimage.pictures.input_file import InputFile
    from clowder_aimage.pictures.input_source import InputSource

    PictureSource = Picture | bytes | str | os.PathLike[str] | npt.ArrayLike
    # Adds a file to those of a request, by its bytes and its name in errors.
    AddPicture = Callable[[bytes, str], InputFile]
Lora = str | tuple[str, float]
# Single pictures of a request. Others are references.
_SINGLE = ("image", "mask", "control")


@dataclass(frozen=True, slots=True)
class PictureOrder:
    """A prompt, the sources of its pictures by their names, adapters, and stated parameters."""

    prompt: str
    sources: Mapping[str, PictureSource]
    loras: tuple[LoraUse, ...]
    values: dict[str, Any]

    @classmethod
    def of(
        cls,
        prompt: str,
        sources: Mapping[str, PictureSource | None],
        references: Sequence[PictureSource],
        loras: Sequence[Lora],
        size: str | None,
        parameters: PictureKeywords,
    ) -> PictureOrder:
        """Return the order of a call; the seed is drawn unless it is stated. Raises UsageError."""
        named = {name: source for name, source in sources.items() if source is not None}
        named |= {f"reference {number}": source for number, source in enumerate(references, 1)}
        stated: dict[str, Any] = {**parameters, "seed": read_seed(parameters.get("seed"))}
        values = {name: value for name, value in stated.items() if value is not None}
        for name, side in parse_size(size or "auto").items():
            if values.setdefault(name, side) != side:
                raise UsageError(f"{name} is {values[name]}, but size is {size}")
        return cls(prompt, named, read_uses(loras), {"seed": secrets.randbits(32), **values})

    def read(
        self, reader: Callable[[], InputSource], add: AddPicture
    ) -> tuple[GenerateRequest, InputFile | None]:
        """Return the draft with the digests of its pictures, and the first of them.

        ``add`` is called with each file. Raises UsageError, and as ``InputSource.read``.
        """
        fields, expand = dict[str, Any](), self.values.get("expand")
        sources, mask = dict(self.sources), self.sources.get("mask")
        if isinstance(mask, str) and mask == ALPHA:
            fields["mask"] = sources.pop("mask")
        data = {name: _read(source, name, reader) for name, source in sources.items()}
        if mask is not None and "image" in data and not (expand or "upscale" in self.values):
            from clowder_aimage.pictures.input import check_mask

            check_mask(data["image"], data.get("mask"))
        files = {name: add(data[name], f"the {name}") for name in data}
        digests = {name: str(file.descriptor.digest) for name, file in files.items()}
        single = {name: digests.pop(name) for name in _SINGLE if name in digests}
        fields |= {**single, "references": tuple(digests.values())}
        if expand and self.values.keys() & {"width", "height"}:
            raise UsageError("expand determines the size: omit width and height")
        draft = GenerateRequest.draft(self.prompt, **self.values | fields, loras=self.loras)
        names = [name for name in ("image", *digests, "control") if name in files]
        return draft, files[names[0]] if names else None


def read_uses(loras: Sequence[Lora]) -> tuple[LoraUse, ...]:
    """Return adapters with their strengths. Raises UsageError."""
    return tuple(LoraUse(lora) if isinstance(lora, str) else LoraUse(*lora) for lora in loras)


def _read(source: PictureSource, label: str, reader: Callable[[], InputSource]) -> bytes:
    """Return the bytes of a picture file."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, Picture):
        return source.encode()
    if isinstance(source, str | os.PathLike):
        return reader().read(os.fspath(source), label)
    from clowder_aimage.pictures.input import encode_array

    return encode_array(source, f"the {label}")
