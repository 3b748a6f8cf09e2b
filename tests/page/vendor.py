"""Write the page's libraries from npm packages, or check that they are unchanged.

``python -m tests.page.vendor`` writes ``clowder_aimage/page/vendor``; with ``--check`` it only
compares. A package is accepted if its tarball has the pinned digest (Subresource Integrity). Names
of packages in imports become names of files; nothing else is changed.
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
# package, version, sha512 of the tarball, files in the package with their names here
PACKAGES: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "preact",
        "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
    ),
    (
        "@preact/signals-core",
        "1.14.5",
        "sha512-vcRv7Ityz5JVmeiVqIluLFzT/PDS/AlhHUpw3/aUWqcVUs6bDGIPXE/6RSC4evBNWYvnniozg5Syfj33al3gkg==",
        {"dist/signals-core.mjs": "signals-core.js"},
    ),
    (
        "@preact/signals",
        "2.11.4",
        "sha512-Rb+5RPo9gWSaHtzJeauhHxiC8KP/IF2DEPkHPEOGOnuy2wnJzRqyeLRankUCYd6ADqtxS6GnWGv6Ie343d8aYw==",
        {"dist/signals.mjs": "signals.js"},
    ),
    (
        "htm",
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.js"},
    ),
)
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
    known = []
    for name, version, integrity, files in PACKAGES:
        data = tarball(name, version)
        found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        if found != integrity:
            sys.exit(f"{name} {version} is {found}, not {integrity}")
        content = members(data)
        licence = f"LICENSE-{name.removeprefix('@').replace('/', '-')}.txt"
        yield licence, content["LICENSE"]
        facts = {"name": name, "version": version, "integrity": integrity, "licence": licence}
        facts["spdx"] = json.loads(content["package.json"])["license"]
        sums = {}
        for path, local in files.items():
            text = rewritten(content[path].decode()).encode()
            sums[local] = hashlib.sha256(text).hexdigest()
            yield local, text
        known.append({**facts, "sha256": sums})
    yield "vendor.json", (json.dumps(known, indent=2) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    wants_check = parser.parse_args().check
    new = dict(written())
    old = {path.name: path.read_bytes() for path in VENDOR.iterdir()} if VENDOR.is_dir() else {}
    if wants_check:
        odd = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
        sys.exit(f"not as in the packages: {', '.join(odd)}" if odd else None)
    VENDOR.mkdir(exist_ok=True)
    for name in old.keys() - new.keys():
        (VENDOR / name).unlink()
    for name, data in new.items():
        (VENDOR / name).write_bytes(data)


if __name__ == "__main__":
    main()
