"""Picture files, which store their generation parameters.

In a PNG these are JSON in an international text chunk named ``aimage`` (PNG specification,
11.3.3.4), beside the registered keywords ``Description`` and ``Software``. ``parameters`` is text
in the form of stable-diffusion-webui (its ``create_infotext``), which sites and viewers read. JPEG
and WebP have this text only, in the Exif tag ``UserComment``, as stable-diffusion-webui writes it.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageDraw, ImageFont, PngImagePlugin

from clowder_aimage import __version__
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.model.pipeline import FORMATS
from clowder_aimage.oci import read_json

KEY = "aimage"
_LARGEST_EXIF = 65_533  # bytes in a segment of a JPEG file
_THUMBNAIL, _MARGIN, _CAPTION = 256, 8, 18  # pixels of a sheet
_PAPER, _INK = (246, 246, 244), (40, 40, 40)
_MAX_PIXELS = 1 << 26  # 8192 by 8192, the largest picture that is made


def encode_picture(
    pixels: npt.NDArray[np.uint8],
    facts: Mapping[str, Any] | None,
    kind: str = "png",
    quality: int | None = None,
) -> bytes:
    """Encode ``pixels`` (height, width, 3) as a file of ``pipeline.FORMATS``.

    The file stores ``facts``; ``quality`` (0 to 100, the best) applies to JPEG and WebP.
    """
    options: dict[str, Any] = {}
    if kind != "png" and quality is not None:
        options["quality"] = quality
    if facts is not None and kind == "png":
        options["pnginfo"] = _chunks(facts, pixels.shape)
    elif facts is not None:
        options["exif"] = _exif(_parameters(facts, pixels.shape))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind.upper(), **options)
    return buffer.getvalue()


def contact_sheet(pictures: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a PNG file with the pictures of seeds, reduced, above the seeds, in rows.

    Raises FormatError: one is not a picture.
    """
    thumbnails = [_thumbnail(data) for _, data in pictures]
    columns = math.ceil(math.sqrt(len(pictures)))
    across = max(one.width for one in thumbnails) + _MARGIN
    down = max(one.height for one in thumbnails) + _CAPTION + _MARGIN
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * across + _MARGIN, rows * down + _MARGIN), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for index, ((seed, _), thumbnail) in enumerate(zip(pictures, thumbnails, strict=True)):
        left, top = _MARGIN + index % columns * across, _MARGIN + index // columns * down
        sheet.paste(thumbnail, (left, top))
        pen.text((left, top + thumbnail.height + 1), str(seed), fill=_INK, font=font)
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


def _thumbnail(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=[kind.upper() for kind in FORMATS]) as image:
                if math.prod(image.size) > _MAX_PIXELS:
                    raise Image.DecompressionBombError
                image.thumbnail((_THUMBNAIL, _THUMBNAIL))
                return image.convert("RGB")
    except Exception:  # Pillow has no common class for what it raises for damaged files
        raise FormatError("a picture is damaged, or too large for the sheet") from None


def _chunks(facts: Mapping[str, Any], shape: tuple[int, ...]) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt(KEY, json.dumps(facts, ensure_ascii=False))
    info.add_itxt("Description", str(facts.get("prompt", "")))
    info.add_text("parameters", _parameters(facts, shape))
    info.add_text("Software", "aimage")
    return info


def _exif(text: str) -> bytes:
    """Return Exif data with a comment (Exif 2.3, 4.6.5); none if it is too long for a JPEG."""
    exif = Image.Exif()
    exif.endian = ">"  # programs read the UTF-16 of the comment in this order
    exif[ExifTags.Base.Software] = "aimage"
    comment = b"UNICODE\0" + text.encode("utf-16-be", "replace")
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    data = exif.tobytes()
    return data if len(data) <= _LARGEST_EXIF else b""


def _parameters(facts: Mapping[str, Any], shape: tuple[int, ...]) -> str:
    """Return the facts as stable-diffusion-webui writes them."""
    negative, end = facts.get("negative"), facts.get("guidance_end")
    stated = {
        "Steps": facts.get("steps"),
        "Sampler": "Euler",  # of flow matching, the only one
        "CFG scale": facts.get("guidance"),
        "Guidance end": None if end == 1 else end,
        "Cache threshold": facts.get("cache_threshold") or None,
        "Seed": facts.get("seed"),
        "Size": f"{shape[1]}x{shape[0]}",
        "Model hash": str(facts.get("digest", "")).rpartition(":")[2][:10] or None,
        "Model": str(facts.get("reference", "")).rpartition("/")[2].removesuffix(":latest") or None,
        "Lora hashes": _lora_hashes(facts) or None,
        "Version": f"aimage {__version__}",
    }
    last = ", ".join(
        f"{key}: {_quoted(value)}" for key, value in stated.items() if value is not None
    )
    tags = "".join(
        f" <lora:{use.get('model')}:{use.get('strength')}>" for use in facts.get("loras", ())
    )
    prompt = f"{facts.get('prompt', '')}{tags}"
    lines = [prompt, f"Negative prompt: {negative}" if negative else "", last]
    return "\n".join(filter(None, lines))


def _lora_hashes(facts: Mapping[str, Any]) -> str:
    """Return the names of adapters with the first digits of their digests."""
    uses = [(use.get("model"), str(use.get("digest") or "")) for use in facts.get("loras", ())]
    return ", ".join(f"{name}: {digest.rpartition(':')[2][:12]}" for name, digest in uses)


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if set(text) & set(',:"\n') else text


def load_picture(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """Return the pixels (height, width, 3) of a PNG file, and its facts.

    Raises:
        NotFoundError: The file does not exist.
        UsageError: It is not a PNG, or has no facts.
    """
    pixels, facts = read_picture(path, str(path))
    if not facts:
        raise UsageError(
            f"{path} has no generation settings",
            hint="only pictures that this program wrote can be replayed, if they were not edited",
        )
    return pixels, facts


def read_picture(file: Path | BinaryIO, name: str) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """Return the pixels of a PNG file as ``load_picture``, and its facts, empty without any.

    Raises NotFoundError, UsageError with its ``name``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file, formats=["PNG"]) as image:
                if math.prod(image.size) > _MAX_PIXELS:
                    raise Image.DecompressionBombError
                image.load()
                texts = dict(getattr(image, "text", {}))
                pixels = np.asarray(image.convert("RGB"))
    except FileNotFoundError:
        raise NotFoundError(f"picture {name} not found") from None
    except Image.DecompressionBombError:
        raise UsageError(f"{name} has more than {_MAX_PIXELS} pixels") from None
    except Exception:  # Pillow has no common class for what it raises for damaged files
        raise UsageError(f"{name} is not a valid PNG file") from None
    try:
        facts = read_json(texts[KEY].encode("utf-8", "surrogatepass"), KEY)
    except (KeyError, FormatError):
        facts = {}
    return pixels, facts if isinstance(facts, dict) else {}
