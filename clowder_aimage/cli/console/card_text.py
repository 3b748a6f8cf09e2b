"""Model cards as text for a terminal."""

from __future__ import annotations

import re

from clowder_aimage.cli.console.output import clean_text

# Each begins and ends on a line, and holds no mark of another one: a scan of a text is linear.
_PICTURE = re.compile(r"!\[([^\[\]\n]{0,200})\]\([^()\n]{0,2000}\)")
_LINK = re.compile(r"\[([^\[\]\n]{1,200})\]\(([^()\s]{1,2000})\)")
_TAG = re.compile(r"<[^<>\n]{1,2000}>")
_FENCE = ("```", "~~~")


def render_card(text: str) -> str:
    """Return a card without its front matter, and with its pictures, links and tags as words."""
    lines = clean_text(text.replace("\r\n", "\n")).expandtabs(4).splitlines()
    if lines[:1] == ["---"] and "---" in lines[1:]:
        lines = lines[lines.index("---", 1) + 1 :]
    is_code, rendered = False, list[str]()
    for line in lines:
        is_fence = line.lstrip().startswith(_FENCE)
        is_code ^= is_fence
        line = line if is_code or is_fence else _render_line(line)
        # A line of tags alone leaves nothing; one empty line divides paragraphs.
        if line or is_code or (rendered and rendered[-1]):
            rendered.append(line)
    return "\n".join(rendered).strip("\n")


def _render_line(line: str) -> str:
    line = _PICTURE.sub(lambda match: f"(picture: {match[1]})" if match[1] else "(picture)", line)
    line = _LINK.sub(r"\1 (\2)", line)
    return _TAG.sub("", line).rstrip()
