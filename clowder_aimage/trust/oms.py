"""OpenSSF Model Signing 1.0: a statement about the files of a model.

Source: ossf/model-signing-spec, spec/v1.0.md. The method ``shards``, which hashes ranges of files,
is refused, as the specification requires of a reader without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Digest
from clowder_aimage.trust.dsse import read_object
from clowder_aimage.trust.statement import Statement, build_statement

PREDICATE = "https://model_signing/signature/v1.0"
# At the top of the model only, and always.
IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
# The hex digits of a digest, by hash
HASHES = {"sha256": 64, "blake2b": 128}
# A field of our own beside those of the specification, which readers ignore: the manifest whose
# files these are. It lets a registry's client decide before it has the files.
MANIFEST = "vnd.clowder.aimage.manifest"


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """The files of a signed model: hex digests by path, and the paths that are left out.

    ``manifest`` is the manifest that the signer states for them, if any.
    """

    digests: Mapping[str, str]
    hash_type: str
    ignored: tuple[str, ...]
    allows_links: bool
    manifest: Digest | None = None

    @classmethod
    def parse(cls, statement: Statement) -> SignedFiles:
        """Return the files of a statement.

        Raises FormatError: it is not of this kind, malformed, uses shards or an unsupported hash,
        or its root digest is not that of the files.
        """
        if statement.predicate_type != PREDICATE:
            raise FormatError(f"not a signature of files: {statement.predicate_type[:100]!r}")
        predicate = statement.predicate
        serialization = read_object(predicate.get("serialization"), "serialization")
        if (method := serialization.get("method")) != "files":
            raise FormatError(
                f"the signature has the method {method!r:.40}: only whole files are supported",
                hint="sign it without shards",
            )
        hash_type = serialization.get("hash_type")
        if hash_type not in HASHES:
            raise FormatError(f"the signature has the hash {hash_type!r:.40}, not one of SHA-256")
        ignored = serialization.get("ignore_paths", [])
        if not isinstance(ignored, list) or not all(isinstance(path, str) for path in ignored):
            raise FormatError("ignore_paths must be a list of paths")
        digests = _parse_resources(predicate.get("resources"), hash_type)
        _check_root(statement, digests)
        manifest = predicate.get(MANIFEST)
        return cls(
            digests,
            hash_type,
            tuple(ignored),
            serialization.get("allow_symlinks") is True,
            None if manifest is None else Digest.parse(manifest),
        )

    def is_ignored(self, path: str) -> bool:
        """Return True if a file is left out, by its path or that of a directory above it."""
        if path.split("/", 1)[0] in IGNORED:
            return True
        return any(path == name or path.startswith(f"{name}/") for name in self.ignored if name)

    def compare(self, actual: Mapping[str, str]) -> None:
        """Raise FormatError unless these are the files, by their digests; none is missing."""
        present = {path: digest for path, digest in actual.items() if not self.is_ignored(path)}
        for problem, paths in (
            ("is not signed", present.keys() - self.digests.keys()),
            ("is missing", self.digests.keys() - present.keys()),
            (
                "has other bytes than the signed ones",
                {
                    path
                    for path, digest in present.items()
                    if self.digests.get(path, digest) != digest
                },
            ),
        ):
            if paths:
                first, *others = sorted(paths)
                more = f", nor are {len(others)} others" if problem == "is not signed" else ""
                more = more if others else ""
                raise FormatError(f"the file {first[:200]!r} {problem}{more}")


def _parse_resources(value: object, hash_type: str) -> dict[str, str]:
    if not isinstance(value, list) or not value:
        raise FormatError("the signature has no files")
    digests: dict[str, str] = {}
    for item in value:
        resource = read_object(item, "a file of the signature")
        name, digest = resource.get("name"), resource.get("digest")
        if not isinstance(name, str) or not isinstance(digest, str):
            raise FormatError("a file of the signature is malformed")
        if resource.get("algorithm") != hash_type:
            raise FormatError(f"the digest of {name[:200]!r} is of another hash")
        if len(digest) != HASHES[hash_type] or set(digest) - set("0123456789abcdef"):
            raise FormatError(f"the digest of {name[:200]!r} is malformed")
        if name in digests:
            raise FormatError(f"the signature has {name[:200]!r} twice")
        digests[name] = digest
    return digests


def _check_root(statement: Statement, digests: Mapping[str, str]) -> None:
    if len(statement.subjects) != 1:
        raise FormatError("a signature of files must have one subject")
    root = statement.subjects[0][1].get("sha256")
    if root != compute_root(digests):
        raise FormatError("the subject of the signature is not the digest of its files")


def compute_root(digests: Mapping[str, str]) -> str:
    """Return the digest of a model: that of the digests of its files, by their sorted names."""
    root = hashlib.sha256()
    for name in sorted(digests):
        root.update(bytes.fromhex(digests[name]))
    return root.hexdigest()


def build_files_statement(name: str, digests: Mapping[str, str], manifest: Digest) -> bytes:
    """Return the statement about files with SHA-256 digests, of a model with that name."""
    predicate: dict[str, Any] = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": list(IGNORED),
        },
        "resources": [
            {"algorithm": "sha256", "digest": digests[path], "name": path}
            for path in sorted(digests)
        ],
        MANIFEST: str(manifest),
    }
    subject = {"name": name, "digest": {"sha256": compute_root(digests)}}
    return build_statement(PREDICATE, subject, predicate)
