"""A registry in memory that a test may let answer as an attacker's does.

It knows nothing of policies, although it runs in the process of the client.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from clowder_aimage.content import build_bytes_body
from clowder_aimage.content.gate import unchecked
from clowder_aimage.content.graph import build_referrer_entry
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype, parse_document
from clowder_aimage.oci.manifest import encode
from tests.scripted import Answer, ScriptedRegistry, Seen

_PATH = re.compile(r"/v2/(.+)/(manifests|blobs|referrers|tags)/(.+)")


@dataclass
class Content:
    """A repository: documents by digest, their names, and blobs."""

    documents: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def add(self, media_type: str, raw: bytes, tag: str = "") -> Descriptor:
        """Add a manifest or an index; return its descriptor."""
        content = Descriptor.of(media_type, raw)
        self.documents[str(content.digest)] = media_type, raw
        if tag:
            self.tags[tag] = str(content.digest)
        return content

    def add_blob(self, media_type: str, data: bytes) -> Descriptor:
        content = Descriptor.of(media_type, data)
        self.blobs[str(content.digest)] = data
        return content

    def add_stored(self, store: ImageLayout, name: str, tag: str) -> Descriptor:
        """Add what a store has under a name; return the descriptor of its manifest."""
        with unchecked():
            root = store.resolve(Reference.parse(name))
            raw = read_all(store.open(root), root)
            for blob in Manifest.parse(raw, root.media_type).children:
                self.blobs[str(blob.digest)] = read_all(store.open(blob), blob)
        return self.add(root.media_type, raw, tag)

    def fill(self, store: ImageLayout, name: str, *, has_referrers: bool = True) -> None:
        """Put all content into a store, as a tool without a policy does.

        Tags get the name of the repository ``name``, and what has none is found by its digest.
        """
        reference = Reference.parse(name)
        with unchecked():
            for digest, data in self.blobs.items():
                content = Descriptor("application/octet-stream", Digest.parse(digest), len(data))
                store.push(content, build_bytes_body(data))
            for digest, (media_type, raw) in self.documents.items():
                content = Descriptor(media_type, Digest.parse(digest), len(raw))
                store.push(content, build_bytes_body(raw))
            for digest, (media_type, raw) in self.documents.items():
                content = Descriptor(media_type, Digest.parse(digest), len(raw))
                tags = [tag for tag, other in self.tags.items() if other == digest]
                names = [Reference(reference.registry, reference.repository, tag) for tag in tags]
                if parse_document(raw, media_type).subject is not None:
                    if not has_referrers and not tags:
                        continue
                    names.append(reference.with_digest(content.digest))
                for each in names:
                    store.tag(content, each)


class MemoryRegistry:
    """The registry at ``host``; a repository is empty until it is used.

    ``page`` is the number of referrers in an answer, ``listed`` replaces the list of them,
    ``broken`` the status of the page with that number, and ``withholds`` their absence. ``slow``
    lets lists of referrers never end, ``stalls`` blobs. ``moves`` has the digests that a tag means
    in turn.
    """

    def __init__(self) -> None:
        self._server = ScriptedRegistry(self._answer)
        self.host = self._server.host
        self._lock = threading.Lock()
        self.running = self._server.running
        self.reset()

    def reset(self) -> None:
        """Forget all content, and answer as registries do."""
        self.repositories: dict[str, Content] = defaultdict(Content)
        self.page, self.listed = 1000, list[Descriptor]()
        self.broken = dict[int, int]()
        self.withholds = self.slow = False
        self.stalls = set[str]()
        self.moves = list[str]()
        self._uploads: dict[str, bytearray] = {}

    def release(self) -> None:
        """Close the connections of lists that never end."""
        self._server.released.set()
        self._server.released = threading.Event()

    @property
    def seen(self) -> list[Seen]:
        return self._server.seen

    def _answer(self, seen: Seen) -> Answer:
        url = urlsplit(seen.path)
        if (match := _PATH.fullmatch(url.path)) is None:
            return Answer(200, {}, b"{}")
        name, kind, target = match.groups()
        content = self.repositories[name]
        with self._lock:
            if kind == "manifests":
                return self._answer_manifest(content, target, seen)
            if kind == "referrers":
                return self._list_referrers(content, name, target, url.query)
            if kind == "blobs":
                return self._answer_blob(content, name, target, url.query, seen)
        return Answer(200, {}, json.dumps({"name": name, "tags": [*content.tags]}).encode())

    def _answer_manifest(self, content: Content, target: str, seen: Seen) -> Answer:
        if seen.method == "PUT":
            media_type = seen.headers["Content-Type"]
            added = content.add(media_type, seen.body, "" if ":" in target else target)
            headers = {"Docker-Content-Digest": str(added.digest), "Location": seen.path}
            if parse_document(seen.body, media_type).subject is not None:
                headers["OCI-Subject"] = "sha256:"
            return Answer(201, headers)
        digest = content.tags.get(target, target)
        if self.moves and ":" not in target and seen.method == "GET":
            digest = self.moves.pop(0) if len(self.moves) > 1 else self.moves[0]
        if self.withholds and target.startswith("sha256-"):
            return Answer(404)
        if digest not in content.documents:
            return Answer(404)
        media_type, raw = content.documents[digest]
        return Answer(200, {"Content-Type": media_type, "Docker-Content-Digest": digest}, raw)

    def _list_referrers(self, content: Content, name: str, subject: str, query: str) -> Answer:
        if self.slow:
            return Answer(200, {"Content-Length": "100"}, b"{", cut=1, hang=True)
        listed = [] if self.withholds else self._find_referrers(content, subject)
        start = int(parse_qs(query).get("from", ["0"])[0])
        if status := self.broken.get(start // self.page):
            return Answer(status)
        entries = [entry.to_json() for entry in listed[start : start + self.page]]
        body = encode({"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": entries})
        headers = {"Content-Type": mediatype.OCI_INDEX}
        if start + self.page < len(listed):
            path = f"/v2/{name}/referrers/{subject}?from={start + self.page}"
            headers["Link"] = f'<{path}>; rel="next"'
        return Answer(200, headers, body)

    def _find_referrers(self, content: Content, subject: str) -> Sequence[Descriptor]:
        found = list[Descriptor]()
        for digest, (media_type, raw) in content.documents.items():
            document = parse_document(raw, media_type)
            if document.subject is not None and str(document.subject.digest) == subject:
                stored = Descriptor(media_type, Digest.parse(digest), len(raw))
                found.append(build_referrer_entry(stored, document))
        return [*self.listed, *found]

    def _answer_blob(
        self, content: Content, name: str, target: str, query: str, seen: Seen
    ) -> Answer:
        if target.startswith("uploads/"):
            upload, given = target.removeprefix("uploads/"), parse_qs(query)
            if seen.method == "POST":
                upload = str(len(self._uploads))
            received = self._uploads.setdefault(upload, bytearray())
            received += seen.body
            headers = {"Location": f"/v2/{name}/blobs/uploads/{upload}"}
            if "digest" in given and "mount" not in given:
                content.blobs[given["digest"][0]] = bytes(received)
                return Answer(201, headers)
            return Answer(202, headers | {"Range": f"0-{max(0, len(received) - 1)}"})
        data = content.blobs.get(target)
        if data is None:
            return Answer(404)
        if target in self.stalls:
            return Answer(200, {"Content-Length": str(len(data))}, data, cut=1, hang=True)
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", seen.headers.get("Range", "")):
            start, end = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            span = {"Content-Range": f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}"}
            return Answer(206, span, data[start:end])
        return Answer(200, {"Content-Type": "application/octet-stream"}, data)
