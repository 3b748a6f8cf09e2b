"""Picture files; a PNG stores its generation parameters.

The parameters are JSON in an international text chunk named ``aimage`` (PNG specification,
11.3.3.4), beside the registered keywords ``Description`` and ``Software``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from clowder_aimage.errors import NotFoundError, UsageError

KEY = "aimage"


def encode_picture(
    pixels: npt.NDArray[np.uint8],
    facts: Mapping[str, Any] | None,
    kind: str = "png",
    quality: int | None = None,
) -> bytes:
    """Encode ``pixels`` (height, width, 3) as a file of ``pipeline.FORMATS``.

    A PNG stores ``facts``; ``quality`` (0 to 100, the best) applies to JPEG and WebP.
    """
    options: dict[str, Any] = {}
    if kind == "png":
        options["pnginfo"] = _chunks(facts) if facts is not None else None
    elif quality is not None:
        options["quality"] = quality
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind.upper(), **options)
    return buffer.getvalue()


def _chunks(facts: Mapping[str, Any]) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt(KEY, json.dumps(facts, ensure_ascii=False))
    info.add_itxt("Description", str(facts.get("prompt", "")))
    info.add_text("Software", "aimage")
    return info


def load_picture(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """Return the pixels (height, width, 3) of a PNG file, and its facts.

    Raises:
        NotFoundError: The file does not exist.
        UsageError: It is not a PNG, or has no facts.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            texts = dict(getattr(image, "text", {}))
            pixels = np.asarray(image.convert("RGB"))
    except FileNotFoundError:
        raise NotFoundError(f"picture {path} not found") from None
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        raise UsageError(f"{path} is not a valid PNG file") from None
    try:
        facts = json.loads(texts[KEY])
    except (KeyError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise UsageError(
            f"{path} has no generation settings",
            hint="only pictures that this program wrote can be replayed, if they were not edited",
        )
    return pixels, facts
