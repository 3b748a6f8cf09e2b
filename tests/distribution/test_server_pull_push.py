"""Blobs and manifests, in and out (distribution-spec, "Pull" and "Push")."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.metadata import build_file_name
from clowder_aimage.oci import Reference, parse_document
from tests.content.artifact import put_artifact
from tests.distribution.served import (
    OCI_INDEX,
    OCI_MANIFEST,
    Server,
    descriptor_of,
    digest_of,
    error_of,
    manifest_of,
)

BLOB = b"0123456789abcdef"


def test_version_endpoint(server: Server) -> None:
    answer = server.ask("GET", "/v2/")
    assert (answer.status_code, answer.json()) == (200, {})
    assert answer.headers["Docker-Distribution-API-Version"] == "registry/2.0"


def test_blob_is_served_with_digest_headers(server: Server) -> None:
    created = server.push_blob(BLOB)
    assert created.headers["Location"] == f"/v2/a/b/blobs/{digest_of(BLOB)}"
    for method, body in (("GET", BLOB), ("HEAD", b"")):
        answer = server.ask(method, created.headers["Location"])
        assert (answer.status_code, answer.content) == (200, body)
        assert answer.headers["Content-Length"] == str(len(BLOB))
        assert answer.headers["Docker-Content-Digest"] == digest_of(BLOB)
        assert answer.headers["ETag"] == f'"{digest_of(BLOB)}"'
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_empty_blob_is_served(server: Server) -> None:
    location = server.push_blob(b"").headers["Location"]
    assert server.ask("GET", location).content == b""
    assert error_of(server.ask("GET", location, headers={"Range": "bytes=0-"})) == (
        416,
        "SIZE_INVALID",
    )


def test_unknown_blob_is_404(server: Server) -> None:
    path = f"/v2/a/b/blobs/{digest_of(b'never pushed')}"
    assert error_of(server.ask("GET", path)) == (404, "BLOB_UNKNOWN")
    assert server.ask("HEAD", path).status_code == 404


@pytest.mark.parametrize(
    ("wanted", "span"),
    [
        ("bytes=2-4", (2, 5)),
        ("bytes=10-", (10, 16)),
        ("bytes=10-999", (10, 16)),
        ("bytes=-3", (13, 16)),
        ("bytes=-999", (0, 16)),
    ],
)
def test_range_requests(server: Server, wanted: str, span: tuple[int, int]) -> None:
    location = server.push_blob(BLOB).headers["Location"]
    answer = server.ask("GET", location, headers={"Range": wanted})
    assert (answer.status_code, answer.content) == (206, BLOB[slice(*span)])
    assert answer.headers["Content-Range"] == f"bytes {span[0]}-{span[1] - 1}/16"
    assert answer.headers["Docker-Content-Digest"] == digest_of(BLOB)


@pytest.mark.parametrize("wanted", ["bytes=0-1,4-5", "bytes=-"])
def test_unsupported_ranges_return_the_whole_blob(server: Server, wanted: str) -> None:
    location = server.push_blob(BLOB).headers["Location"]
    answer = server.ask("GET", location, headers={"Range": wanted})
    assert (answer.status_code, answer.content) == (200, BLOB)


@pytest.mark.parametrize("wanted", ["bytes=16-", "bytes=-0", "bytes=5-2"])
def test_unsatisfiable_range_is_416(server: Server, wanted: str) -> None:
    location = server.push_blob(BLOB).headers["Location"]
    answer = server.ask("GET", location, headers={"Range": wanted})
    assert error_of(answer) == (416, "SIZE_INVALID")
    assert answer.headers["Content-Range"] == "bytes */16"


def test_conditional_requests(server: Server) -> None:
    location = server.push_blob(BLOB).headers["Location"]
    etag = f'"{digest_of(BLOB)}"'
    ranged = {"Range": "bytes=1-2"}
    kept = server.ask("GET", location, headers={"If-None-Match": etag})
    assert (kept.status_code, kept.content) == (304, b"")
    same = server.ask("GET", location, headers=ranged | {"If-Range": etag})
    assert (same.status_code, same.content) == (206, BLOB[1:3])
    other = server.ask("GET", location, headers=ranged | {"If-Range": '"older"'})
    assert (other.status_code, other.content) == (200, BLOB)


def test_manifest_keeps_its_bytes_by_tag_and_by_digest(server: Server) -> None:
    server.push_blob(BLOB, "keep/bytes")
    server.push_blob(b"{}", "keep/bytes")
    raw = b"  " + manifest_of(BLOB, unknown={"kept": [1, 2]}) + b"\n"
    created = server.put_manifest(raw, "kept", "keep/bytes")
    assert (created.status_code, created.headers["Docker-Content-Digest"]) == (201, digest_of(raw))
    assert created.headers["Location"] == f"/v2/keep/bytes/manifests/{digest_of(raw)}"
    for target in ("kept", digest_of(raw)):
        for method, body in (("GET", raw), ("HEAD", b"")):
            answer = server.ask(method, f"/v2/keep/bytes/manifests/{target}")
            assert (answer.status_code, answer.content) == (200, body)
            assert answer.headers["Content-Type"] == OCI_MANIFEST
            assert answer.headers["Content-Length"] == str(len(raw))
            assert answer.headers["Docker-Content-Digest"] == digest_of(raw)


def test_manifest_of_another_repository_is_unknown(server: Server) -> None:
    raw = server.push("mine", BLOB, name="its/own")
    for target in ("mine", digest_of(raw)):
        answer = server.ask("GET", f"/v2/some/other/manifests/{target}")
        assert error_of(answer) == (404, "MANIFEST_UNKNOWN")


def test_manifest_pushed_by_digest_is_kept_when_the_tag_moves(server: Server) -> None:
    old = server.push("moving", b"old", name="digest/stays")
    assert server.put_manifest(old, digest_of(old), "digest/stays").status_code == 201
    server.push("moving", b"new", name="digest/stays")
    assert server.ask("GET", f"/v2/digest/stays/manifests/{digest_of(old)}").content == old
    assert server.ask("GET", "/v2/digest/stays/tags/list").json()["tags"] == ["moving"]


def test_manifest_by_sha512(server: Server) -> None:
    server.push_blob(b"{}", "by/sha512")
    raw = manifest_of(annotations={"by": "sha512"})
    digest = "sha512:" + hashlib.sha512(raw).hexdigest()
    created = server.put_manifest(raw, digest, "by/sha512")
    assert (created.status_code, created.headers["Docker-Content-Digest"]) == (201, digest)
    assert server.ask("GET", f"/v2/by/sha512/manifests/{digest}").content == raw


def test_index_requires_and_serves_its_manifests(server: Server) -> None:
    child = server.push("child", BLOB, name="an/index")
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [descriptor_of(child, OCI_MANIFEST)],
    }
    raw = json.dumps(document).encode()
    assert server.put_manifest(raw, "all", "an/index", OCI_INDEX).status_code == 201
    assert server.ask("DELETE", "/v2/an/index/manifests/child").status_code == 202
    assert server.ask("GET", f"/v2/an/index/manifests/{digest_of(child)}").content == child

    document["manifests"] = [descriptor_of(b"absent", OCI_MANIFEST)]
    answer = server.put_manifest(json.dumps(document).encode(), "bad", "an/index", OCI_INDEX)
    assert error_of(answer) == (400, "MANIFEST_BLOB_UNKNOWN")


def test_manifest_with_missing_blobs_names_each_of_them(server: Server) -> None:
    server.push_blob(b"{}", "gone/blobs")
    answer = server.put_manifest(manifest_of(b"gone 1", b"gone 2", b"gone 1"), "t", "gone/blobs")
    assert error_of(answer) == (400, "MANIFEST_BLOB_UNKNOWN")
    named = [entry["detail"]["digest"] for entry in answer.json()["errors"]]
    assert named == [digest_of(b"gone 1"), digest_of(b"gone 2")]
    found = error_of(server.ask("GET", "/v2/gone/blobs/manifests/t"))
    assert found[0] == 404


def test_manifest_with_a_wrong_size_is_refused(server: Server) -> None:
    server.push_blob(BLOB)
    server.push_blob(b"{}")
    document = json.loads(manifest_of(BLOB))
    document["layers"][0]["size"] += 1
    answer = server.put_manifest(json.dumps(document).encode(), "t")
    assert error_of(answer) == (400, "MANIFEST_BLOB_UNKNOWN")


def test_foreign_layers_may_be_missing(server: Server) -> None:
    server.push_blob(b"{}", "foreign/layer")
    kind = "application/vnd.oci.image.layer.nondistributable.v1.tar"
    raw = manifest_of(layers=[descriptor_of(b"not here", kind)])
    assert server.put_manifest(raw, "t", "foreign/layer").status_code == 201


@pytest.mark.parametrize(
    ("raw", "media_type"),
    [
        (manifest_of(), "application/vnd.clowder.aimage.manifest.v1+json"),
        (manifest_of(mediaType="application/vnd.clowder.aimage.manifest.v1+json"), OCI_MANIFEST),
        (manifest_of(), OCI_INDEX),
        (manifest_of(manifests=[]), OCI_MANIFEST),
        (b"[" * 100_000, OCI_MANIFEST),
        (manifest_of(schemaVersion=1), OCI_MANIFEST),
    ],
)
def test_put_refuses_invalid_manifests(server: Server, raw: bytes, media_type: str) -> None:
    server.push_blob(b"{}", "not/a-manifest")
    answer = server.put_manifest(raw, "t", "not/a-manifest", media_type)
    assert error_of(answer) == (400, "MANIFEST_INVALID")
    listed = server.ask("GET", "/v2/not/a-manifest/tags/list")
    assert error_of(listed) == (404, "NAME_UNKNOWN")


def test_manifest_over_four_mib_is_refused(server: Server) -> None:
    server.push_blob(b"{}", "four/mib")
    raw = manifest_of()
    full = raw + b" " * (4 * 1024 * 1024 - len(raw))
    assert server.put_manifest(full, "full", "four/mib").status_code == 201
    assert error_of(server.put_manifest(full + b" ", "over", "four/mib")) == (
        413,
        "MANIFEST_INVALID",
    )
    chunks = (full + b" " for _ in range(1))  # no Content-Length to check
    answer = server.put_manifest(chunks, "over", "four/mib")
    assert error_of(answer) == (413, "MANIFEST_INVALID")


def test_manifest_under_another_digest_is_refused(server: Server) -> None:
    server.push_blob(b"{}")
    answer = server.put_manifest(manifest_of(), digest_of(b"another"))
    assert error_of(answer) == (400, "DIGEST_INVALID")


def test_delete_a_manifest_and_its_tags(server: Server) -> None:
    raw = server.push("one", BLOB, name="to/delete")
    server.put_manifest(raw, "two", "to/delete")
    server.push("one", BLOB, name="to/keep")
    assert server.ask("DELETE", "/v2/to/delete/manifests/one").status_code == 202
    assert server.ask("GET", "/v2/to/delete/tags/list").json()["tags"] == ["two"]
    again = server.ask("DELETE", "/v2/to/delete/manifests/one")
    assert error_of(again) == (404, "MANIFEST_UNKNOWN")
    path = f"/v2/to/delete/manifests/{digest_of(raw)}"
    assert server.ask("DELETE", path).status_code == 202
    for method in ("GET", "DELETE"):
        assert error_of(server.ask(method, path)) == (404, "MANIFEST_UNKNOWN")
    assert server.ask("GET", "/v2/to/keep/manifests/one").content == raw


def test_a_pinned_name_is_not_deleted(server: Server) -> None:
    """Nothing else changes either, whoever wrote the name, and in whatever spelling."""
    raw = server.push("latest", BLOB, name="pin/ned")
    layout = ImageLayout(server.root)
    layout.pins.put("pin/ned:latest", {}, durable=True)
    for name in ("pin/ned:latest", "pin/ned"):
        index = json.loads((server.root / "index.json").read_bytes())
        for entry in index["manifests"]:
            notes = entry["annotations"]
            if notes["org.opencontainers.image.ref.name"].startswith("pin/ned"):
                notes |= dict.fromkeys(notes, name)
        beside = server.root / "index.foreign"
        beside.write_text(json.dumps(index))
        beside.replace(server.root / "index.json")
        (server.root / ".aimage" / "names" / build_file_name("pin/ned:latest")).unlink(
            missing_ok=True
        )
        before = sorted(layout.list_tags(), key=str)
        for reference in ("latest", digest_of(raw)):
            answer = server.ask("DELETE", f"/v2/pin/ned/manifests/{reference}")
            assert error_of(answer) == (403, "DENIED")
        assert sorted(layout.list_tags(), key=str) == before


def test_a_second_store_is_read(serve_layout: Callable[..., Server], tmp_path: Path) -> None:
    """Names change while it is served, and only tools of that store remove them."""
    first, second = (ImageLayout(tmp_path / name) for name in ("first", "second"))
    put_artifact(first, "mine:v1", b"one")
    made = put_artifact(second, "theirs:v1", b"two")
    server = serve_layout(first.root, f"other={second.root}")
    for layout in (first, second):
        os.utime(layout.root / "index.json", ns=(0, 0))  # older than the resolution of any clock
    assert server.ask("GET", "/v2/_catalog").json() == {"repositories": ["mine", "theirs"]}
    second.tag(made.descriptor, Reference.parse("more:v1"))
    listed = {"repositories": ["mine", "more", "theirs"]}
    assert server.ask("GET", "/v2/_catalog").json() == listed
    assert server.ask("GET", "/v2/more/manifests/v1").content == made.raw
    before = (first.root / "index.json").read_bytes()
    for reference in ("v1", str(made.digest)):
        answer = server.ask("DELETE", f"/v2/more/manifests/{reference}")
        assert error_of(answer) == (405, "UNSUPPORTED")
    assert server.ask("GET", "/v2/_catalog").json() == listed
    assert (first.root / "index.json").read_bytes() == before
    assert server.ask("DELETE", "/v2/mine/manifests/v1").status_code == 202


def test_manifest_of_an_index_is_not_deleted(server: Server) -> None:
    child = server.push("child", BLOB, name="index/holds")
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [descriptor_of(child, OCI_MANIFEST)],
    }
    raw = json.dumps(document).encode()
    server.put_manifest(raw, "all", "index/holds", OCI_INDEX)
    path = f"/v2/index/holds/manifests/{digest_of(child)}"
    assert error_of(server.ask("DELETE", path)) == (405, "UNSUPPORTED")
    assert server.ask("GET", "/v2/index/holds/tags/list").json()["tags"] == ["all", "child"]
    server.ask("DELETE", f"/v2/index/holds/manifests/{digest_of(raw)}")
    assert server.ask("DELETE", path).status_code == 202
    assert error_of(server.ask("GET", path)) == (404, "MANIFEST_UNKNOWN")


def test_deleted_blob_is_gone_until_it_is_pushed_again(server: Server) -> None:
    data = b"to be deleted"
    location = server.push_blob(data).headers["Location"]
    assert server.ask("DELETE", location).status_code == 202
    server.push_blob(b"{}")
    refused = server.put_manifest(manifest_of(data), "t")
    assert error_of(refused) == (400, "MANIFEST_BLOB_UNKNOWN")
    server.push_blob(data)
    assert server.ask("GET", location).content == data


def test_deleted_blob_needed_by_another_process_is_served(server: Server) -> None:
    """A pull into the same store found the blob and references it after the DELETE."""
    data, config = b"wanted by two", b"{}"
    location = server.push_blob(data, "pulled/here").headers["Location"]
    server.push_blob(config, "pulled/here")
    assert server.ask("DELETE", location).status_code == 202
    raw = manifest_of(data)
    layout = ImageLayout(server.root)
    document = parse_document(raw)
    layout.push(document.descriptor, build_bytes_body(raw), Reference.parse("pulled/here:v1"))
    assert server.ask("GET", location).content == data
    assert server.ask("GET", "/v2/pulled/here/manifests/v1").content == raw


def test_referrers_are_listed(server: Server) -> None:
    subject = server.push("subject", BLOB, name="with/referrers")
    path = f"/v2/with/referrers/referrers/{digest_of(subject)}"
    none = server.ask("GET", path)
    assert (none.status_code, none.json()["manifests"]) == (200, [])
    assert none.headers["Content-Type"] == OCI_INDEX

    link = {"subject": descriptor_of(subject, OCI_MANIFEST), "annotations": {"a": "b"}}
    typed = manifest_of(artifactType="x/signature", **link)
    plain = manifest_of(**link)
    for raw in (typed, plain):
        created = server.put_manifest(raw, digest_of(raw), "with/referrers")
        assert (created.status_code, created.headers["OCI-Subject"]) == (201, digest_of(subject))
    server.put_manifest(typed, "also-tagged", "with/referrers")
    found = {each["digest"]: each for each in server.ask("GET", path).json()["manifests"]}
    assert found == {
        digest_of(typed): descriptor_of(typed, OCI_MANIFEST)
        | {"artifactType": "x/signature", "annotations": {"a": "b"}},
        digest_of(plain): descriptor_of(plain, OCI_MANIFEST)
        | {"artifactType": "application/vnd.oci.empty.v1+json", "annotations": {"a": "b"}},
    }
    filtered = server.ask("GET", path, params={"artifactType": "x/signature"})
    assert [each["digest"] for each in filtered.json()["manifests"]] == [digest_of(typed)]
    assert filtered.headers["OCI-Filters-Applied"] == "artifactType"
    other = f"/v2/with/referrers/referrers/{digest_of(typed)}"
    assert server.ask("GET", other).json()["manifests"] == []
    elsewhere = server.ask("GET", path.replace("with/", "without/"))
    assert (elsewhere.status_code, elsewhere.json()["manifests"]) == (200, [])


def test_subject_may_be_missing(server: Server) -> None:
    server.push_blob(b"{}", "early/referrer")
    absent = manifest_of(annotations={"never": "pushed"})
    raw = manifest_of(subject=descriptor_of(absent, OCI_MANIFEST))
    created = server.put_manifest(raw, "early", "early/referrer")
    assert (created.status_code, created.headers["OCI-Subject"]) == (201, digest_of(absent))
    listed = server.ask("GET", f"/v2/early/referrer/referrers/{digest_of(absent)}").json()
    assert [each["digest"] for each in listed["manifests"]] == [digest_of(raw)]


def test_lists_are_paginated(server: Server) -> None:
    tags = ["v1", "v10", "v2", "A", "_b"]
    for tag in tags:
        server.push(tag, b"x", name="many/tags")
    assert server.ask("GET", "/v2/many/tags/tags/list").json() == {
        "name": "many/tags",
        "tags": sorted(tags),
    }
    found: list[str] = []
    path = "/v2/many/tags/tags/list?n=2"
    while path:
        answer = server.ask("GET", path)
        assert len(answer.json()["tags"]) <= 2
        found += answer.json()["tags"]
        path = answer.links["next"]["url"] if "next" in answer.links else ""
    assert found == sorted(tags)
    empty = server.ask("GET", "/v2/many/tags/tags/list?n=0")
    assert (empty.json()["tags"], empty.links) == ([], {})
    wrong = server.ask("GET", "/v2/many/tags/tags/list?n=-1")
    assert error_of(wrong) == (400, "UNSUPPORTED")


def test_catalog_lists_repositories(server: Server) -> None:
    server.push("t", b"x", name="cat/one")
    server.push("t", b"x", name="cat.alog/two")
    names = server.ask("GET", "/v2/_catalog").json()["repositories"]
    assert {"cat/one", "cat.alog/two"} <= set(names)
    assert names == sorted(names)
    assert server.ask("GET", "/v2/cat.alog/two/manifests/t").status_code == 200


@pytest.mark.parametrize("name", ["manifests/x", "a/blobs/uploads", "tags/list"])
def test_names_that_look_like_endpoints(server: Server, name: str) -> None:
    raw = server.push("list", b"x", name=name)
    assert server.ask("GET", f"/v2/{name}/manifests/list").content == raw
    assert server.ask("GET", f"/v2/{name}/blobs/{digest_of(b'x')}").content == b"x"
    assert server.ask("GET", f"/v2/{name}/tags/list").json()["tags"] == ["list"]


def test_unknown_endpoints_and_methods(server: Server) -> None:
    assert error_of(server.ask("GET", "/")) == (404, "UNSUPPORTED")
    assert error_of(server.ask("GET", "/v1/x")) == (404, "UNSUPPORTED")
    answer = server.ask("PUT", "/v2/")
    assert error_of(answer) == (405, "UNSUPPORTED")
    assert answer.headers["Allow"] == "GET, HEAD"
