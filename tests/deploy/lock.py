"""Check the pinned packages of the images, offline: ``python -m tests.deploy.lock [ADVISORIES]``.

The files ``deploy/docker/*.lock`` must satisfy ``pyproject.toml`` and have digests.
ADVISORIES is a zip archive of advisories in OSV's format, one JSON document in each file, such as
the export of an ecosystem; then no pinned version may be affected by one of them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tests.deploy.written import DEPLOY, ROOT

IMAGES = DEPLOY / "docker"
# The extras of each image, and its other requirements
CONTENTS = {
    "requirements.lock": (("text", "llama", "worker", "zstd", "fleet", "trust", "c2pa"), ""),
    "requirements-cuda.lock": (
        ("torch", "llama", "worker", "zstd", "fleet", "trust", "c2pa"),
        "cuda.in",
    ),
    "requirements-build.lock": ((), "build.in"),
}
# The Pythons and processors of the images
ENVIRONMENTS = [
    {"sys_platform": "linux", "python_version": python, "python_full_version": f"{python}.1"}
    | {"platform_machine": machine}
    for python in ("3.11", "3.13")
    for machine in ("x86_64", "aarch64")
]


@dataclass(frozen=True)
class Pin:
    """A package of one version, for the environments of its marker."""

    name: str
    version: Version
    marker: Marker | None
    digests: tuple[str, ...]

    def is_for(self, environment: Mapping[str, str]) -> bool:
        """Return whether the package is installed in an environment."""
        return self.marker is None or self.marker.evaluate(dict(environment))


def pins(text: str) -> list[Pin]:
    """Read a lock file: requirements with ``==`` and ``--hash``.

    Raises:
        ValueError: a line is no pinned requirement.
    """
    found = []
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text)).splitlines():
        words, *digests = re.split(r"\s+--hash=", line.strip())
        if not words:
            continue
        requirement = Requirement(words)
        (pinned,) = requirement.specifier
        if pinned.operator != "==":
            raise ValueError(f"{words} is not pinned")
        name = canonicalize_name(requirement.name)
        found.append(Pin(name, Version(pinned.version), requirement.marker, tuple(digests)))
    return found


def wanted(project: Mapping[str, Any], extras: tuple[str, ...], more: str) -> list[Requirement]:
    """Return the requirements of the package with its extras, and those in ``more``."""
    table = project["project"]
    found = [Requirement(text) for text in table["dependencies"] if extras]
    for extra in extras:
        for text in table["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == table["name"]:
                found += wanted(project, tuple(requirement.extras), "")
            else:
                found.append(requirement)
    lines = (line.strip() for line in more.splitlines())
    return found + [Requirement(line) for line in lines if line and line[0] != "#"]


def unmet(requirements: list[Requirement], pinned: list[Pin]) -> Iterator[str]:
    """Yield a sentence for each requirement that the pinned packages do not satisfy."""
    for environment in ENVIRONMENTS:
        here = {pin.name: pin for pin in pinned if pin.is_for(environment)}
        for each in requirements:
            if each.marker is not None and not each.marker.evaluate(dict(environment)):
                continue
            pin = here.get(canonicalize_name(each.name))
            if pin is None:
                yield f"{each} is not pinned for {environment}"
            elif pin.version not in each.specifier:
                yield f"{each} is not {pin.name} {pin.version}"
    for pin in pinned:
        if not pin.digests or not all(re.fullmatch("sha256:[0-9a-f]{64}", d) for d in pin.digests):
            yield f"{pin.name} {pin.version} has no digest"


def _is_affected(version: Version, affected: Mapping[str, Any]) -> bool:
    if str(version) in affected.get("versions", ()):
        return True
    for span in affected.get("ranges", ()):
        if span.get("type") != "ECOSYSTEM":
            continue
        inside = False
        # Events may be listed in any order (OSV schema, "evaluation algorithm")
        events = sorted((each for event in span["events"] for each in event.items()), key=_place)
        for kind, text in events:
            limit = Version("0") if text == "0" else Version(text)
            if kind == "introduced" and version >= limit:
                inside = True
            elif (kind == "fixed" and version >= limit) or (
                kind == "last_affected" and version > limit
            ):
                inside = False
        if inside:
            return True
    return False


def _place(event: tuple[str, str]) -> Version:
    return Version(event[1])


def vulnerable(pinned: list[Pin], archive: Path) -> Iterator[str]:
    """Yield a sentence for each pinned package that an advisory names."""
    by_name: dict[str, list[Pin]] = {}
    for pin in pinned:
        by_name.setdefault(pin.name, []).append(pin)
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            advisory = json.loads(files.read(name))
            if "withdrawn" in advisory:
                continue
            for affected in advisory.get("affected", ()):
                package = affected.get("package", {})
                if package.get("ecosystem") != "PyPI":
                    continue
                for pin in by_name.get(canonicalize_name(package["name"]), ()):
                    try:
                        is_affected = _is_affected(pin.version, affected)
                    except InvalidVersion as error:
                        yield f"{advisory['id']}: {error}: check {pin.name} {pin.version} by hand"
                        continue
                    if is_affected:
                        summary = advisory.get("summary", "no summary")
                        yield f"{pin.name} {pin.version}: {advisory['id']}: {summary}"


def main(arguments: list[str]) -> None:
    """Print what is wrong with the pinned packages; end with 1 if anything is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    check = partial(vulnerable, archive=Path(arguments[0])) if arguments else None
    wrong = []
    for name, (extras, more) in CONTENTS.items():
        pinned = pins((IMAGES / name).read_text("utf-8"))
        text = (IMAGES / more).read_text("utf-8") if more else ""
        found = [*unmet(wanted(project, extras, text), pinned), *(check(pinned) if check else ())]
        wrong += [f"{name}: {each}" for each in dict.fromkeys(found)]
        print(f"{name}: {len(pinned)} packages, {len(found)} findings")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
