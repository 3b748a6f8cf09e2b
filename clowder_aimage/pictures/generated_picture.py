"""A picture that was generated, as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.oci import Descriptor, mediatype
from clowder_aimage.pictures.provenance.annotation import describe_origin

if TYPE_CHECKING:
    from clowder_aimage.model.pipeline import Image
    from clowder_aimage.pictures.provenance.marking import PictureMarking

_SUFFIXES = {"png": "png", "jpeg": "jpg", "webp": "webp"}


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedPicture:
    """A picture file of a kind (png, jpeg, webp), its seed, and its metadata."""

    data: bytes
    seed: int
    kind: str
    facts: Mapping[str, Any] = field(repr=False)

    @property
    def layer(self) -> Descriptor:
        """Return its descriptor, titled with the seed, with its mark as annotations."""
        title = f"{self.seed}.{_SUFFIXES[self.kind]}"
        descriptor = Descriptor.of(f"image/{self.kind}", self.data)
        annotations = {mediatype.TITLE: title, **describe_origin(self.data)}
        return replace(descriptor, annotations=annotations)


def encode_image(
    image: Image,
    facts: Mapping[str, Any],
    encoding: PictureEncoding,
    marking: PictureMarking,
) -> GeneratedPicture:
    """Return the file of an image; ``facts`` are those of its request, without its own seed.

    Blocks while the file is signed; raises as ``PictureMarking.sign``.
    """
    # Imported late: a worker without numpy does not encode
    from clowder_aimage.model.picture import encode_picture
    from clowder_aimage.model.picture_metadata import add_quality

    kind, quality = encoding.kind, encoding.quality
    made = {"forward": image.forward, "seed": image.seed, "batch": image.batch}
    stated = add_quality({**facts, **made}, kind, quality)
    shown = stated if encoding.has_facts else None
    data = encode_picture(image.pixels, shown, kind, quality, marking.mark)
    data = marking.sign(data, kind, shown)
    return GeneratedPicture(data, image.seed, kind, stated)
