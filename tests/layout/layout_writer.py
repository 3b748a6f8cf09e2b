"""A process that tags artifacts in a layout: ``python layout_writer.py ROOT WHO COUNT``."""

from __future__ import annotations

import sys
from pathlib import Path

from clowder_aimage.layout import ImageLayout
from tests.content.artifact import put_artifact


def main(root: str, who: str, count: str) -> None:
    layout = ImageLayout(Path(root))
    for number in range(int(count)):
        put_artifact(layout, f"writer{who}:v{number}", b"common", f"{who}/{number}".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
