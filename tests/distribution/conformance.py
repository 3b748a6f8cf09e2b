"""Checks of the distribution specification's conformance program, with its 1.1 defaults.

Reimplements its groups: one per data set, and two of blobs. Each pushes, lists, heads, pulls,
lists referrers and deletes, in that order, and raises an ``AssertionError`` that names the
failed step. Deletions must be visible at once.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

import requests

EXAMPLE_1 = "application/vnd.example.oci.conformance.v1"
EXAMPLE_2 = "application/vnd.example.oci.conformance.v2"
OCTETS = "application/octet-stream"
CONFIG = "application/vnd.oci.image.config.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
FOREIGN = "application/vnd.oci.image.layer.nondistributable.v1.tar"
PLATFORMS = ({"os": "linux", "architecture": "amd64"}, {"os": "linux", "architecture": "arm64"})
CHUNK = 1024  # the largest minimum chunk size to accept


def hash_of(data: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


@dataclass
class Data:
    """One data set: documents in push order, and the expected results."""

    algorithm: str = "sha256"
    inline: bool = False  # descriptors embed their content in ``data``
    custom: bool = False  # documents and descriptors have unknown fields
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)  # children first
    tags: dict[str, str] = field(default_factory=dict)
    referrers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        digest = hash_of(content, self.algorithm)
        self.blobs[digest] = content
        return self._descriptor(digest, content, media_type)

    def _descriptor(self, digest: str, content: bytes, media_type: str) -> dict[str, Any]:
        found: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": len(content)}
        if self.inline:
            found["data"] = base64.b64encode(content).decode()
        return found | self._unknown()

    def image(
        self,
        tag: str = "",
        *,
        layers: list[dict[str, Any]] | None = None,
        count: int = 2,
        packed: bool = True,
        platform: dict[str, str] = PLATFORMS[0],
        **fields: Any,
    ) -> dict[str, Any]:
        """Add an image with its config and layers; return its descriptor."""
        if layers is None:
            layers = []
            for _ in range(count):
                content = os.urandom(300)
                kind = LAYER + ("+gzip" if packed else "")
                layers.append(self.blob(gzip.compress(content) if packed else content, kind))
        digests = [layer["digest"] for layer in layers]
        rootfs = {"type": "layers", "diff_ids": digests}
        config = {"author": os.urandom(9).hex(), **platform, "rootfs": rootfs, **self._unknown()}
        described = self.blob(json.dumps(config).encode(), CONFIG)
        return self.document(MANIFEST, tag, config=described, layers=layers, **fields)

    def artifact(
        self, tag: str = "", kind: str = EXAMPLE_1, layer: bytes | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Add an artifact with the empty config and one layer; return its descriptor."""
        content = os.urandom(2048) if layer is None else layer
        layers = [self.blob(content, EMPTY if layer == b"{}" else kind)]
        config = self.blob(b"{}", EMPTY)
        fields["artifactType"] = kind
        return self.document(MANIFEST, tag, config=config, layers=layers, **fields)

    def index(self, *manifests: dict[str, Any], tag: str = "", **fields: Any) -> dict[str, Any]:
        listed = [
            each | ({"platform": PLATFORMS[i]} if i < len(PLATFORMS) else {})
            for i, each in enumerate(manifests)
        ]
        return self.document(INDEX, tag, manifests=listed, **fields)

    def document(self, media_type: str, tag: str, **fields: Any) -> dict[str, Any]:
        value = {"schemaVersion": 2, "mediaType": media_type, **fields, **self._unknown()}
        raw = json.dumps(value).encode()
        digest = hash_of(raw, self.algorithm)
        self.manifests[digest] = raw
        if tag:
            self.tags[tag] = digest
        found = self._descriptor(digest, raw, media_type)
        if "subject" in fields:
            kind = fields.get("artifactType") or fields.get("config", {}).get("mediaType", "")
            entry = {key: found[key] for key in ("mediaType", "digest", "size")}
            entry |= {"artifactType": kind, "annotations": fields.get("annotations", {})}
            self.referrers.setdefault(fields["subject"]["digest"], []).append(entry)
        return found

    def _unknown(self) -> dict[str, str]:
        return {f"org.{os.urandom(6).hex()}": os.urandom(6).hex()} if self.custom else {}


def _image() -> Data:
    data = Data()
    data.image("image")
    return data


def _uncompressed() -> Data:
    data = Data()
    data.image("image-uncompressed", packed=False)
    return data


def _large_manifest() -> Data:
    data = Data()
    annotations = {f"large-annotation-{i}": "A" * 10_000 for i in range(390)}
    data.image("large-manifest", annotations=annotations)
    return data


def _index() -> Data:
    data = Data()
    data.index(*(data.image(platform=one) for one in PLATFORMS), tag="index")
    return data


def _nested_index() -> Data:
    data = Data()
    inner = [data.index(*(data.image(platform=p) for p in PLATFORMS)) for _ in range(2)]
    data.document(INDEX, "index-of-index", manifests=inner)
    return data


def _empty_index() -> Data:
    data = Data()
    data.index(tag="index")
    return data


def _artifact() -> Data:
    data = Data()
    data.artifact("artifact")
    return data


def _artifact_index() -> Data:
    data = Data()
    data.index(data.artifact(), data.artifact(), tag="artifact-index", artifactType=EXAMPLE_1)
    return data


def _artifact_without_layers() -> Data:
    data = Data()
    data.artifact("artifact-without-layers", layer=b"{}")
    return data


def _note() -> dict[str, str]:
    return {"org.opencontainers.conformance": "hello", f"org.example.{os.urandom(5).hex()}": "x"}


def _subject() -> Data:
    data = Data()
    subject = data.image("image")
    data.image(subject=subject)
    data.artifact("tagged-artifact1", subject=subject, annotations=_note())
    data.artifact("tagged-artifact2", EXAMPLE_2, subject=subject, annotations=_note())
    return data


def _index_subject() -> Data:
    data = Data()
    subject = data.index(data.image(), data.image(), tag="index")
    link: dict[str, Any] = {"subject": subject, "annotations": _note()}
    children = (data.artifact(**link), data.artifact(**link))
    data.index(*children, tag="tagged-artifact", artifactType=EXAMPLE_1, **link)
    return data


def _missing_subject() -> Data:
    data = Data()
    absent = {"mediaType": MANIFEST, "digest": hash_of(os.urandom(9)), "size": 123}
    data.artifact("tagged-artifact", subject=absent, annotations=_note())
    return data


def _data_field() -> Data:
    data = Data(inline=True)
    data.image("data-field")
    return data


def _non_distributable() -> Data:
    data = Data()
    layers = []
    for kind, size in ((FOREIGN + "+gzip", 123456), (FOREIGN, 12345)):
        digest = hash_of(os.urandom(9))
        urls = [f"https://store.example.com/blobs/sha256/{digest[7:]}"]
        layers.append({"mediaType": kind, "digest": digest, "size": size, "urls": urls})
    layers.append(data.blob(os.urandom(300), LAYER))
    data.image("non-distributable-image", layers=layers)
    return data


def _custom_fields() -> Data:
    data = Data(custom=True)
    data.index(*(data.image(platform=one) for one in PLATFORMS), tag="custom-fields")
    return data


def _no_layers() -> Data:
    data = Data()
    data.image("no-layers", count=0)
    return data


def _sha512() -> Data:
    data = Data("sha512")
    data.index(*(data.image(platform=one) for one in PLATFORMS))
    return data


SETS = {
    "image": _image,
    "image-uncompressed": _uncompressed,
    "large-manifest": _large_manifest,
    "index": _index,
    "nested-index": _nested_index,
    "empty-index": _empty_index,
    "artifact": _artifact,
    "artifact-index": _artifact_index,
    "artifact-without-layers": _artifact_without_layers,
    "artifacts-with-subject": _subject,
    "index-with-subject": _index_subject,
    "missing-subject": _missing_subject,
    "data-field": _data_field,
    "non-distributable-layers": _non_distributable,
    "custom-fields": _custom_fields,
    "no-layers": _no_layers,
    "sha512": _sha512,
}


@dataclass
class Client:
    """Sends requests to the registry at ``url`` about the repository ``name``."""

    url: str
    name: str
    other: str = "conformance/repo2"
    http: requests.Session = field(default_factory=requests.Session)

    def ask(self, method: str, path: str, *expected: int, **options: Any) -> requests.Response:
        """Send a request to a path below the repository, or to a location."""
        base = f"{self.url}/v2/{self.name}/"
        answer = self.http.request(method, urljoin(base, path), timeout=60, **options)
        if expected:
            assert answer.status_code in expected, (method, path, answer.status_code, answer.text)
        return answer

    def begin(self) -> str:
        return self.ask("POST", "blobs/uploads/", 202).headers["Location"]

    # -- ways to push a blob

    def post(self, digest: str, content: bytes, expected: int = 201) -> None:
        params, headers = {"digest": digest}, {"Content-Type": OCTETS}
        options: dict[str, Any] = {"params": params, "headers": headers, "data": content}
        self._pushed(self.ask("POST", "blobs/uploads/", expected, **options), digest, content)

    def post_put(self, digest: str, content: bytes, expected: int = 201) -> None:
        options: dict[str, Any] = {"params": {"digest": digest}, "data": content}
        self._pushed(self.ask("PUT", self.begin(), expected, **options), digest, content)

    def stream(self, digest: str, content: bytes, expected: int = 201) -> None:
        location = self.ask("PATCH", self.begin(), 202, data=iter([content])).headers["Location"]
        answer = self.ask("PUT", location, expected, params={"digest": digest})
        self._pushed(answer, digest, content)

    def chunked(
        self,
        digest: str,
        content: bytes,
        expected: int = 201,
        *,
        put_last: bool = False,
        disorder: bool = False,
    ) -> None:
        """Upload in three chunks; with ``disorder``, send each after a misplaced one (416)."""
        size = min(len(content), max(CHUNK, len(content) // 3 + 1))
        location, here = self.begin(), 0
        while here < len(content):
            if disorder:
                location = self._out_of_order(location, digest, content, here, size, put_last)
            end = min(here + size, len(content))
            last = put_last and end == len(content)
            options: dict[str, Any] = {
                "headers": {"Content-Range": f"{here}-{end - 1}"},
                "data": content[here:end],
            }
            if last:
                answer = self.ask("PUT", location, expected, params={"digest": digest}, **options)
                self._pushed(answer, digest, content)
                return
            location = self.ask("PATCH", location, 202, **options).headers["Location"]
            here = end
        answer = self.ask("PUT", location, expected, params={"digest": digest})
        self._pushed(answer, digest, content)

    def _out_of_order(
        self, location: str, digest: str, content: bytes, here: int, size: int, put_last: bool
    ) -> str:
        start = here + size if here + size < len(content) else 0
        end = min(start + size, len(content))
        last = put_last and end == len(content)
        options: dict[str, Any] = {"params": {"digest": digest}} if last else {}
        options["headers"] = {"Content-Range": f"{start}-{end - 1}"}
        self.ask("PUT" if last else "PATCH", location, 416, data=content[start:end], **options)
        status = self.ask("GET", location, 204)
        assert status.headers["Range"] == f"0-{max(0, here - 1)}", status.headers
        return status.headers["Location"]

    def _pushed(self, answer: requests.Response, digest: str, content: bytes) -> None:
        if answer.status_code == 201:
            assert answer.headers.get("Docker-Content-Digest", digest) == digest
            assert self.ask("GET", answer.headers["Location"], 200).content == content

    def mount(self, digest: str, source: str | None) -> requests.Response:
        params = {"mount": digest} | ({"from": source} if source else {})
        return self.ask("POST", "blobs/uploads/", 201, 202, params=params)

    # -- checks

    def has_blob(self, digest: str, content: bytes) -> None:
        for method, body in (("HEAD", b""), ("GET", content)):
            answer = self.ask(method, f"blobs/{digest}", 200)
            assert answer.content == body
            assert answer.headers["Content-Length"] == str(len(content))
            assert answer.headers.get("Docker-Content-Digest", digest) == digest

    def delete_blob(self, digest: str) -> None:
        self.ask("DELETE", f"blobs/{digest}", 202, 404)
        self.ask("HEAD", f"blobs/{digest}", 404)

    def put(
        self, target: str, raw: bytes, expected: int = 201, digest: str | None = None
    ) -> requests.Response:
        kind = json.loads(raw)["mediaType"]
        headers = {"Content-Type": kind}
        answer = self.ask("PUT", f"manifests/{target}", expected, data=raw, headers=headers)
        if expected == 201:
            assert digest is not None
            assert answer.headers.get("Docker-Content-Digest", digest) == digest
            subject = json.loads(raw).get("subject")
            if subject is not None:
                assert answer.headers.get("OCI-Subject") == subject["digest"]
            self.has_manifest(answer.headers["Location"], digest, raw)
        return answer

    def has_manifest(self, path: str, digest: str, raw: bytes) -> None:
        kind = json.loads(raw)["mediaType"]
        for method, body in (("HEAD", b""), ("GET", raw)):
            answer = self.ask(method, path, 200, headers={"Accept": f"{INDEX}, {MANIFEST}"})
            assert answer.content == body
            assert answer.headers["Content-Type"] == kind
            assert answer.headers["Content-Length"] == str(len(raw))
            assert answer.headers.get("Docker-Content-Digest", digest) == digest

    def tags(self, **params: str) -> list[str]:
        answer = self.ask("GET", "tags/list", 200, 404, params=params)
        return answer.json()["tags"] or [] if answer.status_code == 200 else []

    def referrers(self, subject: str, kind: str | None = None) -> list[dict[str, Any]]:
        params = {} if kind is None else {"artifactType": kind}
        answer = self.ask("GET", f"referrers/{subject}", 200, params=params)
        assert answer.headers["Content-Type"] == INDEX
        if kind is not None:
            assert answer.headers["OCI-Filters-Applied"] == "artifactType"
        document = answer.json()
        assert (document["schemaVersion"], document["mediaType"]) == (2, INDEX)
        found: list[dict[str, Any]] = document["manifests"]
        return found


def check_set(client: Client, data: Data) -> None:
    """Push, list, head, pull, list referrers, delete."""
    _push(client, data)
    listed = client.tags()
    assert set(data.tags) <= set(listed)
    if len(listed) > 1:
        middle = sorted(listed)[len(listed) // 2 - 1]
        assert set(client.tags(last=middle)) == {tag for tag in listed if tag > middle}
    for target, digest in [*data.tags.items(), *((each, each) for each in data.manifests)]:
        client.has_manifest(f"manifests/{target}", digest, data.manifests[digest])
    for digest, content in data.blobs.items():
        client.has_blob(digest, content)
    _check_referrers(client, data)
    _delete(client, data)


def _push(client: Client, data: Data) -> None:
    ways = (client.post_put, client.post, client.stream, client.chunked)
    for i, (digest, content) in enumerate(data.blobs.items()):
        ways[i % len(ways)](digest, content)
    for digest, raw in data.manifests.items():
        client.put(digest, raw, digest=digest)
    for tag, digest in data.tags.items():
        client.put(tag, data.manifests[digest], digest=digest)


def _check_referrers(client: Client, data: Data) -> None:
    for subject, wanted in data.referrers.items():
        kinds = {each["artifactType"] for each in wanted}
        for kind in (None, *kinds):
            found = {each["digest"]: each for each in client.referrers(subject, kind)}
            expected = [each for each in wanted if kind in (None, each["artifactType"])]
            assert set(found) == {each["digest"] for each in expected}
            for each in expected:
                for key in ("mediaType", "size", "artifactType"):
                    assert found[each["digest"]].get(key, "") == each[key]
                listed = found[each["digest"]].get("annotations", {})
                assert each["annotations"].items() <= listed.items()


def _delete(client: Client, data: Data) -> None:
    for tag in data.tags:
        client.ask("DELETE", f"manifests/{tag}", 202)
        client.ask("HEAD", f"manifests/{tag}", 404)
    for digest in reversed(data.manifests):
        client.ask("DELETE", f"manifests/{digest}", 202, 404)
        client.ask("HEAD", f"manifests/{digest}", 404)
    for digest in data.blobs:
        client.delete_blob(digest)


def check_blobs(client: Client, algorithm: str) -> None:
    """Push blobs in every way, with right and wrong digests; test ranges and edge sizes."""

    def new(size: int = 512) -> tuple[str, bytes]:
        content = os.urandom(size)
        return hash_of(content, algorithm), content

    client.ask("GET", f"blobs/{new()[0]}", 404)
    three = 3 * CHUNK - 5
    for push, size, options in (
        (client.post, 512, {}),
        (client.post_put, 512, {}),
        (client.chunked, 512, {}),
        (client.stream, 512, {}),
        (client.chunked, three, {}),
        (client.chunked, three, {"put_last": True}),
        (client.chunked, three, {"disorder": True}),
        (client.chunked, three, {"disorder": True, "put_last": True}),
        (client.post_put, 0, {}),
    ):
        digest, content = new(size)
        push(digest, content, **options)
        client.has_blob(digest, content)
        client.delete_blob(digest)
    empty = hash_of(b"{}", algorithm)
    client.post(empty, b"{}")
    client.has_blob(empty, b"{}")
    client.delete_blob(empty)
    _check_mounts(client, *new(), new()[0])
    client.ask("DELETE", client.begin(), 204)
    _check_ranges(client, *new(2048))
    for push, options in (
        (client.post, {}),
        (client.post_put, {}),
        (client.chunked, {}),
        (client.chunked, {"put_last": True}),
        (client.stream, {}),
    ):
        digest, content = new(three)
        push(digest, content + b"oh no", 400, **options)
        client.ask("HEAD", f"blobs/{digest}", 404)


def _check_mounts(client: Client, digest: str, content: bytes, absent: str) -> None:
    source = Client(client.url, client.other, http=client.http)
    for named in (client.other, None):
        source.post_put(digest, content)
        assert client.mount(digest, named).status_code == 201
        client.has_blob(digest, content)
        client.delete_blob(digest)
        source.delete_blob(digest)
    fallback = client.mount(absent, client.other)
    assert fallback.status_code == 202
    client.ask("PUT", fallback.headers["Location"], 400, params={"digest": absent}, data=b"x")


def _check_ranges(client: Client, digest: str, content: bytes) -> None:
    client.post_put(digest, content)
    size = len(content)
    for wanted, start, end in (
        ("500-1499", 500, 1500),
        ("500-", 500, size),
        ("-500", size - 500, size),
        ("2000-5000", 2000, size),
    ):
        headers = {"Range": f"bytes={wanted}"}
        answer = client.ask("GET", f"blobs/{digest}", 206, headers=headers)
        assert answer.content == content[start:end]
        assert answer.headers["Content-Length"] == str(end - start)
        assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
    for wanted in ("500-0", "5000-10000"):
        client.ask("GET", f"blobs/{digest}", 416, headers={"Range": f"bytes={wanted}"})
    client.delete_blob(digest)


def check_bad_digest(client: Client) -> None:
    """Push a manifest that does not match its digest."""
    data = Data()
    digest = data.image()["digest"]
    for each, content in data.blobs.items():
        client.post_put(each, content)
    client.put(digest, data.manifests[digest] + b"  ", 400)
    client.ask("HEAD", f"manifests/{digest}", 404)
    _delete(client, data)


def check_invalid_digest(client: Client) -> None:
    """Send malformed digests, and digests of missing content."""
    data = Data()
    digest = data.image()["digest"]
    for each, content in data.blobs.items():
        client.post_put(each, content)
    client.put("sha256:baddigeststring", data.manifests[digest], 400)
    client.ask("GET", "manifests/sha256:baddigeststring", 400, 404)
    client.ask("GET", f"manifests/{hash_of(os.urandom(9))}", 404)
    client.ask("GET", f"manifests/missing-{os.urandom(5).hex()}", 404)
    _delete(client, data)


def check_nothing_yet(client: Client) -> None:
    """Query a repository that was never pushed to."""
    assert client.tags() == []
    assert client.referrers(hash_of(os.urandom(9))) == []
    client.http.get(f"{client.url}/v2/", timeout=60).raise_for_status()


def check_all(url: str, prefix: str) -> None:
    """Run all groups, each in repositories of its own below ``prefix``."""
    with requests.Session() as http:

        def build_client(group: str) -> Client:
            return Client(url, f"{prefix}/{group}", other=f"{prefix}/repo2", http=http)

        for name, build in SETS.items():
            check_set(build_client(name), build())
        for algorithm in ("sha256", "sha512"):
            check_blobs(build_client(f"blobs-{algorithm}"), algorithm)
        check_bad_digest(build_client("bad-digest"))
        check_invalid_digest(build_client("invalid-digest"))
        check_nothing_yet(build_client("nothing-yet"))
