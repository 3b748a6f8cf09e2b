"""Check what is released: ``python -m tests.deploy.release [--absolute] DIRECTORY``.

The metadata of the wheel and of the sdist in DIRECTORY are checked; with ``--absolute`` the long
description must link to the files of the release. ``--summary DIRECTORY...`` packs the context of
the images into the last directory, and lists all files with their digests.
"""

from __future__ import annotations

import email.message
import email.parser
import hashlib
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\[\]]*\]\(([^()\s]+)\)")
ALL_EXTRAS = {"all", "mlx", "torch", "worker", "fleet"}
NEXT = """\
To release version {version}:
  git tag --sign v{version} -m 'Version {version}'
  git push origin v{version}
The workflow Release then builds these files again, attests and publishes them."""


def read_metadata(path: Path) -> email.message.Message:
    """Return the core metadata of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            return email.parser.BytesParser().parsebytes(archive.read(name))
    with tarfile.open(path) as tar:
        member = tar.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        return email.parser.BytesParser().parsebytes(member.read())


def list_faults(metadata: email.message.Message, *, is_absolute: bool) -> Iterator[str]:
    """Yield what an index, or its reader, would miss (Core metadata specifications)."""
    for name in ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Author"):
        if not metadata.get(name):
            yield f"{name} is missing"
    if "LICENSE" not in (metadata.get_all("License-File") or ()):
        yield "the licence is not among the files"
    classifiers = metadata.get_all("Classifier") or []
    for prefix in ("Development Status", "Operating System", "Programming Language :: Python"):
        if not any(each.startswith(f"{prefix} :: ") for each in classifiers):
            yield f"no classifier {prefix}"
    if any(each.startswith("License ::") for each in classifiers):
        # PEP 639: indexes refuse both.
        yield "a classifier states the licence beside License-Expression"
    urls = [each.partition(", ")[2] for each in metadata.get_all("Project-URL") or ()]
    if not urls or not all(url.startswith("https://") for url in urls):
        yield f"the URLs are not all https: {urls}"
    if missing := ALL_EXTRAS - set(metadata.get_all("Provides-Extra") or ()):
        yield f"extras are missing: {sorted(missing)}"
    yield from list_description_faults(metadata, is_absolute=is_absolute)


def list_description_faults(metadata: email.message.Message, *, is_absolute: bool) -> Iterator[str]:
    """Yield faults of the long description, which indexes show without the files beside it."""
    text = str(metadata.get_payload())
    if metadata.get("Description-Content-Type") != "text/markdown":
        yield "the description is not declared as Markdown"
    if len(text) < 1000:
        yield "the description is missing"
    targets = LINK.findall(text)
    relative = [each for each in targets if not each.startswith(("https://", "#"))]
    if relative:
        yield f"links of the description are relative: {relative}"
    if is_absolute and not any(each.startswith("https://") for each in targets):
        yield "the description has no links: set SOURCE_URL"


def check(directory: Path, *, is_absolute: bool) -> list[str]:
    """Return the faults of the distributions in a directory."""
    wheels, sdists = sorted(directory.glob("*.whl")), sorted(directory.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{directory} has {len(wheels)} wheels and {len(sdists)} sdists, not one of each"]
    found = [*wheels, *sdists]
    metadata = {path: read_metadata(path) for path in found}
    faults = [
        f"{path.name}: {fault}"
        for path in found
        for fault in list_faults(metadata[path], is_absolute=is_absolute)
    ]
    if len({str(each) for each in metadata.values()}) != 1:
        faults.append("the metadata of the wheel and of the sdist differ")
    return faults


def pack_context(target: Path) -> None:
    """Write the files of .dockerignore, of which the images are built, to a tar archive."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()

    def leave_out(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if "__pycache__" in info.name else info

    with tarfile.open(target, "w:gz") as tar:
        for name in (line[1:] for line in lines if line.startswith("!")):
            tar.add(ROOT / name, name, filter=leave_out)


def summarize(directories: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each file, and what to type next."""
    pack_context(directories[-1] / "image-context.tar.gz")
    files = [path for each in directories for path in sorted(each.iterdir()) if path.is_file()]
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield f"{path.name}\n  {path.stat().st_size:,} bytes, sha256:{digest}"
    (wheel,) = directories[0].glob("*.whl")
    yield NEXT.format(version=read_metadata(wheel)["Version"])


def main(arguments: list[str]) -> int:
    """Check, or summarize; return 1 for a fault."""
    options = [each for each in arguments if each.startswith("--")]
    paths = [Path(each) for each in arguments if each not in options]
    if "--summary" in options:
        sys.stdout.writelines(f"{line}\n" for line in summarize(paths))
        return 0
    faults = check(paths[0], is_absolute="--absolute" in options)
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
