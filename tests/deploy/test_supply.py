"""Actions and images of others are named by commit or digest everywhere: a tag can be moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.written import ROOT

# Where workflows, images and their examples are written
PLACES = (".ci", ".github", "deploy", "docs", "examples", ".")
REFERENCE = re.compile(
    r"^[ >-]*(?P<kind>uses: |image: |container: |FROM |COPY --from=|# syntax=)"
    r"[\"']?(?P<name>[a-z][\w./:@-]*)[\"']?(?P<rest>.*)$",
    re.MULTILINE,
)
ACTION = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
IMAGE = re.compile(r"[\w./-]+(:[0-9]+/[\w./-]+)?:[\w.-]+@sha256:[0-9a-f]{64}")
VERSION = re.compile(r" # v[0-9]+(\.[0-9]+)+$")
# The images of this program, which a user builds and names
OUR_IMAGES = re.compile(r"(registry\.example\.com/)?clowder-aimage\b")


def list_files() -> list[Path]:
    files = {path for place in PLACES[:-1] for path in (ROOT / place).rglob("*")}
    files |= set(ROOT.glob("*"))
    return sorted(path for path in files if path.is_file())


def is_fixed(kind: str, name: str, rest: str) -> bool:
    """Return True if a reference is one to a commit, a digest, or what this program builds."""
    if kind == "uses: ":
        return bool(ACTION.fullmatch(name) and VERSION.match(rest))
    is_stage = kind == "COPY --from=" and ":" not in name
    return is_stage or bool(IMAGE.fullmatch(name) or OUR_IMAGES.match(name))


def list_movable(text: str) -> list[str]:
    """Return the references of a text that a tag alone decides."""
    matches = REFERENCE.finditer(text)
    return [
        match[0].strip()
        for match in matches
        if not is_fixed(match["kind"], match["name"], match["rest"])
    ]


@pytest.mark.parametrize(
    ("text", "is_movable"),
    [
        ("      - uses: actions/checkout@v4", True),
        ("      - uses: pypa/gh-action-pypi-publish@release/v1", True),
        (f"      - uses: actions/checkout@{'0' * 40} # v4.2.2", False),
        (f"      - uses: actions/checkout@{'0' * 40}", True),
        ("FROM python:3.13-slim AS build", True),
        (f"FROM python:3.13-slim@sha256:{'0' * 64} AS build", False),
        (f"FROM python@sha256:{'0' * 64}", True),
        ("FROM python", True),
        ("    image: nats:2.11-alpine", True),
        ("  image: registry.example.com/clowder-aimage:0.1.0", False),
        ("# syntax=docker/dockerfile:1", True),
        ("COPY --from=ghcr.io/astral-sh/uv:0.9 /uv /uv", True),
        ("COPY --from=build /opt /opt", False),
    ],
)
def test_a_movable_reference_is_recognized(text: str, is_movable: bool) -> None:
    assert bool(list_movable(text)) is is_movable


def test_every_action_and_image_is_named_by_commit_or_digest() -> None:
    texts = {path: path.read_text("utf-8", "replace") for path in list_files()}
    assert sum(len(REFERENCE.findall(text)) for text in texts.values()) > 30
    movable = {
        str(path.relative_to(ROOT)): lines
        for path, text in texts.items()
        if (lines := list_movable(text))
    }
    assert not movable
