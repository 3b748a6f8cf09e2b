"""Parsers for the files of deploy/, as far as the tests need them."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_CUDA = ROOT / "docker-compose.cuda.yml"
IGNORE = ROOT / ".dockerignore"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SOCKET = DEPLOY / "systemd" / "aimage.socket"
WORKER = DEPLOY / "systemd" / "aimage.service"
PLIST = DEPLOY / "launchd" / "org.clowder.aimage.plist"
PROGRAM = "/opt/aimage/bin/aimage"  # the path in the units and the images


@cache
def compose(file: Path = COMPOSE) -> dict[str, Any]:
    """Return a compose file with YAML merges applied."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    pairs = (line.strip().partition(" ") for line in joined if line.strip())
    return [(word, " ".join(rest.split())) for word, _, rest in pairs]


def last(path: Path, word: str) -> str:
    """Return the last instruction of a kind, which is the effective one."""
    return [rest for found, rest in instructions(path) if found == word][-1]


def unit(path: Path) -> dict[str, str]:
    """Return the settings of a unit; of repeated ones, the last."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line and line[0] not in "#;")
    return {key: value for key, _, value in pairs}


def plist(home: str = "/Users/ada") -> dict[str, Any]:
    """Return the agent, with a home directory filled in."""
    text = PLIST.read_bytes().replace(b"@HOME@", home.encode())
    found: dict[str, Any] = plistlib.loads(text)
    return found


def typed() -> dict[str, list[str]]:
    """Return everything after ``aimage`` of each command line, by its location."""
    found = {path.name: json.loads(last(path, "CMD")) for path in DOCKERFILES}
    for name, service in compose()["services"].items():
        if "build" in service and "command" in service:
            found[f"docker-compose.yml, {name}"] = list(service["command"])
    for path in UNITS:
        found[path.name] = shlex.split(unit(path)["ExecStart"])[1:]
    found[PLIST.name] = plist()["ProgramArguments"][1:]
    for number, line in enumerate((DEPLOY / "README.md").read_text().splitlines(), 1):
        if line.startswith(f"ExecStart={PROGRAM}"):
            found[f"README.md:{number}"] = shlex.split(line)[1:]
    return found
