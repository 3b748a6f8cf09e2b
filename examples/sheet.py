"""Pictures side by side, those of one prompt under its words: ``python sheet.py SHEET PICTURE...``.

Pillow, which ``clowder-aimage[mlx]`` brings, is all that it needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MARGIN, TITLE = 10, 22  # pixels: around everything, and for the words over a row
ACROSS = 2  # prompts beside each other
PAPER, INK = (246, 246, 244), (40, 40, 40)


def sheet(paths: list[Path]) -> Image.Image:
    """The pictures in their order; their prompt is in the files."""
    rows: dict[str, list[Image.Image]] = {}
    for path in paths:
        with Image.open(path) as picture:
            prompt = str(picture.info.get("Description", path.name))
            rows.setdefault(prompt, []).append(picture.convert("RGB"))
    width = max(sum(picture.width + MARGIN for picture in row) for row in rows.values()) + MARGIN
    height = max(picture.height for row in rows.values() for picture in row) + TITLE + MARGIN
    down = -(-len(rows) // ACROSS)
    paper = Image.new("RGB", (width * min(ACROSS, len(rows)), height * down + MARGIN), PAPER)
    pen, font = ImageDraw.Draw(paper), ImageFont.load_default(13)
    for index, (prompt, row) in enumerate(rows.items()):
        left, top = MARGIN + width * (index % ACROSS), MARGIN + height * (index // ACROSS)
        pen.text((left, top), prompt, fill=INK, font=font)
        for picture in row:
            box = left - 1, top + TITLE - 5, left + picture.width, top + TITLE - 4 + picture.height
            pen.rectangle(box, outline=(205, 205, 200))
            paper.paste(picture, (left, top + TITLE - 4))
            left += picture.width + MARGIN
    return paper


if __name__ == "__main__":
    sheet([Path(name) for name in sys.argv[2:]]).save(sys.argv[1])
