"""Write the page's libraries from npm packages, or check that they are unchanged.

``python -m tests.page.vendor`` writes the files of ``clowder_aimage/page/vendor`` that its
``vendor.json`` lists; with ``--check`` it only compares. A package is accepted if its tarball has
the digest there (Subresource Integrity): for a new version, change ``version`` and ``integrity``.
Names of packages in imports become names of files; nothing else is changed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.process import run

VENDOR = Path(__file__).parents[2] / "clowder_aimage" / "page" / "vendor"
PINS = VENDOR / "vendor.json"
IMPORTS = {
    "preact": "./preact.js",
    "preact/hooks": "./hooks.js",
    "@preact/signals-core": "./signals-core.js",
}
_IMPORT = re.compile(r'(from|import)"([^"./][^"]*)"')
_MAP = re.compile(r"\n?//# sourceMappingURL=\S+\s*$")


def tarball(name: str, version: str) -> bytes:
    """Return a package as npm delivers it."""
    with tempfile.TemporaryDirectory() as place:
        done = run(
            ["npm", "pack", "--silent", f"{name}@{version}"], timeout=120, text=True, cwd=place
        )
        if done.returncode:
            sys.exit(f"npm pack {name}@{version} failed: {done.stderr}")
        return next(Path(place).glob("*.tgz")).read_bytes()


def members(data: bytes) -> dict[str, bytes]:
    """Return the files of a package by their paths in it."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = (one for one in archive if one.isfile())
        return {
            one.name.removeprefix("package/"): archive.extractfile(one).read()  # type: ignore[union-attr]
            for one in files
        }


def rewritten(text: str) -> str:
    """Return a module that imports files beside it, without a reference to its source map."""
    named = _IMPORT.sub(lambda found: f'{found[1]}"{IMPORTS[found[2]]}"', text)
    return _MAP.sub("", named) + "\n"


def written() -> Iterator[tuple[str, bytes]]:
    """Yield each file of the directory with its content. Exits if a package is not the pinned."""
    packages = json.loads(PINS.read_text("utf-8"))
    for package in packages:
        name, version = package["name"], package["version"]
        data = tarball(name, version)
        found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        if found != package["integrity"]:
            sys.exit(f"{name} {version} is {found}, not {package['integrity']}")
        content = members(data)
        yield package["licence"], content["LICENSE"]
        package["spdx"] = json.loads(content["package.json"])["license"]
        for file in package["files"]:
            text = rewritten(content[file["path"]].decode()).encode()
            file["sha256"] = hashlib.sha256(text).hexdigest()
            yield file["name"], text
    yield PINS.name, (json.dumps(packages, indent=2) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    wants_check = parser.parse_args().check
    new = dict(written())
    old = {path.name: path.read_bytes() for path in VENDOR.iterdir()}
    if wants_check:
        odd = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
        sys.exit(f"not as in the packages: {', '.join(odd)}" if odd else None)
    for name in old.keys() - new.keys():
        (VENDOR / name).unlink()
    for name, data in new.items():
        (VENDOR / name).write_bytes(data)


if __name__ == "__main__":
    main()
