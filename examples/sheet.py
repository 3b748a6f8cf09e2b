"""Combine pictures, grouped by prompt, into one: ``python sheet.py SHEET PICTURE...``.

The only requirement is Pillow, which ``clowder-aimage[mlx]`` installs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MARGIN, TITLE = 10, 22  # pixels: the margin, and the height of a row's title
ACROSS = 2  # columns of prompts
PAPER, INK = (246, 246, 244), (40, 40, 40)


def sheet(paths: list[Path]) -> Image.Image:
    """Return the pictures in order, grouped by the prompts in their files."""
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
