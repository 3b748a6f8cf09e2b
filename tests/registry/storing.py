"""A small registry that stores what is pushed, for scripts that answer some requests otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from clowder_aimage.oci import Digest
from tests.scripted import Answer, Seen

# Answers a request in place of the registry, or returns None.
Odd = Callable[[Seen, "Storing"], Answer | None]


def answer_correctly(_: Seen, __: Storing) -> Answer | None:
    """Leave each request to the registry."""
    return None


@dataclass
class Storing:
    """A registry without the referrers API, unless ``has_api`` is set."""

    odd: Odd = answer_correctly
    has_api: bool = False
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    received: bytes = b""

    def __call__(self, seen: Seen) -> Answer:
        return self.odd(seen, self) or self.answer(seen)

    def answer(self, seen: Seen) -> Answer:
        """Answer as the specification says."""
        parts = urlsplit(seen.path)
        target = parts.path.rpartition("/")[2]
        if "/manifests/" in parts.path:
            return self.store_manifest(seen, target) if seen.body else self.read(seen, target)
        if "/referrers/" in parts.path:
            return self.list_referrers(target) if self.has_api else Answer(404)
        if seen.method == "POST":
            self.received = b""
            return Answer(202, {"Location": "/upload"})
        if parts.path == "/upload":
            return self.receive(seen, parse_qs(parts.query))
        blob = self.blobs.get(target)
        return Answer(404) if blob is None else _cut(seen, blob)

    def receive(self, seen: Seen, query: dict[str, list[str]]) -> Answer:
        """Add the bytes of a PATCH or a PUT to the upload."""
        if seen.method not in ("PATCH", "PUT"):
            return Answer(204, {"Range": f"0-{max(0, len(self.received) - 1)}"})
        self.received += seen.body
        if seen.method == "PATCH":
            return Answer(202, {"Location": "/upload", "Range": f"0-{len(self.received) - 1}"})
        digest = query["digest"][0]
        if str(Digest.of(self.received)) != digest:
            return Answer(400, {}, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        self.blobs[digest] = self.received
        return Answer(201)

    def store_manifest(self, seen: Seen, target: str) -> Answer:
        """Store a manifest under its digest, and under a tag."""
        self.manifests[target] = self.manifests[str(Digest.of(seen.body))] = seen.body
        subject = json.loads(seen.body).get("subject")
        return Answer(201, {"OCI-Subject": subject["digest"]} if subject and self.has_api else {})

    def read(self, seen: Seen, target: str) -> Answer:
        """Answer with a manifest, or delete it."""
        if target not in self.manifests:
            return Answer(404)
        if seen.method == "DELETE":
            raw = self.manifests[target]
            is_tag = ":" not in target
            gone = [n for n, m in self.manifests.items() if (n == target if is_tag else m == raw)]
            for name in gone:
                del self.manifests[name]
            return Answer(202)
        raw = self.manifests[target]
        headers = {
            "Content-Type": json.loads(raw)["mediaType"],
            "Docker-Content-Digest": str(Digest.of(raw)),
        }
        return Answer(200, headers, raw)

    def list_referrers(self, subject: str) -> Answer:
        """Answer with the index of the referrers of a subject."""
        entries = {
            str(Digest.of(raw)): {
                "mediaType": json.loads(raw)["mediaType"],
                "digest": str(Digest.of(raw)),
                "size": len(raw),
                "artifactType": json.loads(raw).get("artifactType", ""),
            }
            for raw in self.manifests.values()
            if (json.loads(raw).get("subject") or {}).get("digest") == subject
        }
        kind = "application/vnd.oci.image.index.v1+json"
        index = {"schemaVersion": 2, "mediaType": kind, "manifests": [*entries.values()]}
        return Answer(200, {"Content-Type": kind}, json.dumps(index).encode())


def _cut(seen: Seen, blob: bytes) -> Answer:
    """Answer with a blob, or the requested range of it."""
    asked = seen.headers.get("Range")
    if not asked:
        return Answer(200, {}, blob)
    if not blob:
        return Answer(416, {"Content-Range": "bytes */0"})
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last or len(blob) - 1), len(blob) - 1)
    headers = {"Content-Range": f"bytes {start}-{end}/{len(blob)}"}
    return Answer(206, headers, blob[start : end + 1])
