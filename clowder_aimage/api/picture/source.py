"""The pictures in a body: taken from its fields, and the types that they declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from clowder_aimage.api.request_body import RequestBody, build_field_error
from clowder_aimage.generation.request import ALPHA, MAX_REFERENCES
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.pictures.input_file import BASE64, DECLARED_TYPES, TYPES, decode_base64
from clowder_aimage.pictures.input_source import BARE, PATTERN

IMAGE, IMAGES, MASK, CONTROL = "image", "images", "mask", "control"
# Fields that are files in a form
NAMES = (IMAGE, IMAGES, MASK, CONTROL)
# The fields as keys in JSON
KEYS = tuple(f'"{name}"'.encode() for name in NAMES)
_UNSET = (None, "")
# The pictures of a request: files, or texts that name them
Sources = dict[str, list[str | bytes]]


_NAMED = rf"\s*({PATTERN}|{BARE}|{ALPHA}\s*$)"
_Source = Annotated[str, Field(json_schema_extra={"pattern": f"^{_NAMED}"})]
_Given = Annotated[str, Field(json_schema_extra={"pattern": f"^({_NAMED}|$)"})]
_Bare = Annotated[str, Field(json_schema_extra={"pattern": f"^({_NAMED}|{BASE64}$)"})]


class PictureLink(RequestBody):
    """A picture as in other requests of OpenAI's API."""

    image_url: _Source


_Picture = _Given | PictureLink
_Listed = _Source | PictureLink


_Pictures = Annotated[list[_Listed], Field(max_length=MAX_REFERENCES)]


class PictureSources(RequestBody):
    """The fields of a JSON body that name pictures; ``take_pictures`` removes them."""

    image: _Picture | _Pictures | None = Field(
        default=None,
        description="The picture to begin with: a data: URL or its base64, an https: URL, or "
        "an artifact such as `oci://registry.example.com/pictures/cat:v1`. Only allowed hosts are "
        "asked.",
        examples=["data:image/png;base64,iVBORw0KGgo="],
    )
    images: _Pictures | None = Field(
        default=None,
        description="In place of `image`: a list. Models that begin with a picture take one; the "
        "model's `max_images` is the most.",
    )
    mask: _Picture | None = Field(
        default=None,
        description="A picture as large as the image, of which `painted` is painted; or `alpha`: "
        "what is transparent in the image.",
        examples=["alpha"],
    )
    control: _Picture | None = Field(
        default=None,
        description="A picture that guides a ControlNet; sources as of `image`.",
        examples=["data:image/png;base64,iVBORw0KGgo="],
    )


class BarePictureSources(RequestBody):
    """The fields of a body of ollama's API that name pictures."""

    images: Annotated[list[_Bare], Field(max_length=MAX_REFERENCES)] | None = Field(
        default=None,
        description="Pictures in base64, URLs or artifacts: one to begin with, or up to the "
        "`max_images` of the model.",
    )
    mask: _Bare | None = Field(
        default=None,
        description="With `images`: a picture of which `painted` is painted; or `alpha`.",
    )
    control: _Bare | None = Field(default=None, description="A picture that guides a ControlNet.")


class BareBase64(str):
    """A picture in base64 without a URL around it, as in ollama's API."""

    __slots__ = ()

    def decode(self, name: str) -> bytes:
        """Return the bytes of the picture. Raises ApiError."""
        try:
            return decode_base64(self.encode())
        except ValueError:
            raise build_field_error(name, "must be in base64") from None


def iter_ignored_links(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of the unknown fields of objects that name pictures."""
    for name in NAMES:
        value = fields.get(name)
        links = enumerate(value) if isinstance(value, list) else [("", value)]
        for index, link in links:
            if isinstance(link, Mapping):
                path = name if index == "" else f"{name}[{index}]"
                unknown = link.keys() - PictureLink.model_fields.keys()
                yield from (f"{path}.{key}" for key in sorted(unknown) if link[key] is not None)


def take_pictures(fields: dict[str, Any]) -> Sources:
    """Remove the pictures from the fields of a body, and return them. Raises ApiError.

    A picture is a text or a file, alone or in a list, or an object with ``image_url``.
    """
    pictures = {name: list(_read_pictures(name, fields.pop(name, None))) for name in NAMES}
    return {name: values for name, values in pictures.items() if values}


def take_bare_pictures(fields: dict[str, Any]) -> Sources:
    """Return the pictures of a request of ollama's API, as ``take_pictures``.

    They are in base64, or named by a URL or an artifact. Raises ApiError.
    """
    images = fields.get(IMAGES) or []
    if not isinstance(images, list) or not all(isinstance(picture, str) for picture in images):
        raise build_field_error(IMAGES, "must be a list of pictures in base64", "invalid_type")
    if fields.get(IMAGE):
        raise build_field_error(
            IMAGE, "is not a field of this API: use images", "unknown_parameter"
        )
    return {name: list(map(_wrap_bare, values)) for name, values in take_pictures(fields).items()}


def _wrap_bare(value: str | bytes) -> str | bytes:
    is_named = not isinstance(value, str) or value == ALPHA or ":" in value[:20]
    return value if is_named else BareBase64(value)


def _read_pictures(name: str, value: object) -> Iterator[str | bytes]:
    if value in _UNSET:
        return
    values: Iterable[object] = value if isinstance(value, list) else [value]
    for picture in values:
        text = picture.get("image_url") if isinstance(picture, Mapping) else picture
        text = text.strip() if isinstance(text, str) else text
        if not isinstance(text, str | bytes) or not text:
            message = "must be a picture: base64, a data: or https: URL, an artifact, or a file"
            raise build_field_error(name, message, "invalid_type")
        yield text


def parse_declared_type(text: str) -> str:
    """Return the type that a data: URL declares, or the empty text."""
    is_data = text[:5].lower() == "data:"
    return text[5:100].partition(",")[0].partition(";")[0].strip().lower() if is_data else ""


def check_type(name: str, kind: str) -> None:
    """Refuse a declared type that is not a picture's. Raises ApiError (415)."""
    if kind not in DECLARED_TYPES:
        raise _build_type_error(
            name, f"has the type {kind[:60]!a}: expected image/png, image/jpeg or image/webp"
        )


def check_content(name: str, kind: str, data: bytes) -> None:
    """Refuse a picture of another type than it declares. Raises ApiError (415)."""
    actual = detect_type(data)
    declared = kind.replace("image/jpg", "image/jpeg")
    if actual and declared in TYPES.values() and declared != actual:
        raise _build_type_error(name, f"is declared as {kind}, but its bytes are {actual}")


def detect_type(data: bytes) -> str:
    """Return the type of a picture by its first bytes, or the empty text."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    starts = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
    return next((kind for start, kind in starts.items() if data.startswith(start)), "")


def _build_type_error(name: str, message: str) -> ApiError:
    return ApiError(415, f"{name} {message}", code="unsupported_media_type", param=name)
