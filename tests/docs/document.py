"""A parser of Markdown for these tests: fenced blocks, headings, links, code spans."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Documents with commands for the reader.
GUIDES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# All prose.
PROSE = [
    *GUIDES,
    *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "schemas/README.md")),
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
]
SHELLS = ("sh", "bash", "shell", "zsh", "shell-session")
_FENCE = re.compile(r"^(`{3,})([\w-]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: \S.*-->\s*\Z")
_CODE = re.compile(r"#\s*exit code (\d+)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its line, and the line above it."""

    language: str
    text: str
    line: int
    above: str

    @property
    def has_reason(self) -> bool:
        """Return whether ``<!-- not run: why -->`` is directly above."""
        return _NOT_RUN.search(self.above) is not None


@dataclass(frozen=True)
class Command:
    """A line after ``$``, its output and the expected exit code."""

    text: str
    expected: tuple[str, ...]
    line: int

    @property
    def code(self) -> int:
        """Return the number in a comment ``# exit code N`` at its end, or 0."""
        found = _CODE.search(self.text)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Document:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(
                match[2], match[3], self.text.count("\n", 0, match.start()) + 1, self._above(match)
            )
            for match in _FENCE.finditer(self.text)
        ]

    def _above(self, match: re.Match[str]) -> str:
        return self.text[: match.start()].rstrip().rpartition("\n")[2]

    @cached_property
    def prose(self) -> str:
        """Return the text without its fenced blocks."""
        return _FENCE.sub("", self.text)

    @property
    def spans(self) -> list[str]:
        """Return the texts between single backticks."""
        return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]

    @property
    def links(self) -> list[str]:
        """Return the targets of links and pictures."""
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @property
    def anchors(self) -> set[str]:
        """Return the anchors of headings (GitHub's rule)."""
        headings = re.findall(r"^#+\s+(.*)$", self.prose, re.MULTILINE)
        plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
        return {heading.strip().replace(" ", "-") for heading in plain}

    def section(self, heading: str) -> str:
        """Return the text under a heading, to the next one of its level. Raises KeyError."""
        found = re.search(
            rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", self.text, re.MULTILINE | re.DOTALL
        )
        if found is None:
            raise KeyError(f"{self.name} has no heading {heading!r}")
        return found[2]

    @property
    def commands(self) -> list[Command]:
        """Return the commands of all console blocks, in order."""
        return [
            command
            for block in self.blocks
            if block.language == "console"
            for command in _commands(block)
        ]


def _commands(block: Block) -> list[Command]:
    commands: list[Command] = []
    text, start = "", 0
    expected: list[str] = []
    lines = block.text.splitlines()
    for number, line in enumerate([*lines, "$ "], block.line + 1):
        if text.endswith("\\"):
            text += f"\n{line}"
        elif line.startswith("$ "):
            if text:
                commands.append(Command(text, tuple(expected), start))
            text, expected, start = line[2:], [], number
        elif not text:
            raise ValueError(f"output before any command, line {number}: {line!r}")
        else:
            expected.append(line)
    return commands
