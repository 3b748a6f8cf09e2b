"""Lists of tags, repositories and referrers, in pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import pytest

from clowder_aimage.distribution.catalog import MAX_ANNOTATION
from clowder_aimage.oci import Digest, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from tests.distribution.served import OCI_MANIFEST, Server, descriptor_of, digest_of, manifest_of
from tests.importer.valued import make_valued
from tests.process import Aimage

COUNT, LONG = 12, "t" * 120


@pytest.fixture(scope="module")
def paged(
    serve_layout: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Server, bytes]:
    """Return a server with pages of 1,200 bytes, and a manifest with 12 referrers."""
    server = serve_layout(tmp_path_factory.mktemp("paged") / "store", "page=1200")
    server.push_blob(b"{}")
    subject = manifest_of()
    server.put_manifest(subject, "subject")
    for number in range(COUNT):
        annotations = {"number": str(number), "ü": "é" * 300, "large": "x" * (MAX_ANNOTATION + 1)}
        subject_of = descriptor_of(subject, OCI_MANIFEST)
        raw = manifest_of(subject=subject_of, annotations=annotations, artifactType="a/b")
        assert server.put_manifest(raw, f"{LONG}{number:02}").status_code == 201
    return server, subject


def pages(server: Server, path: str) -> list[bytes]:
    found, url = [], server.url + path
    while url:
        answer = server.http.get(url, timeout=60)
        assert answer.status_code == 200
        found.append(answer.content)
        link = answer.headers.get("Link", "")
        url = urljoin(url, link.partition("<")[2].partition(">")[0]) if link else ""
    return found


def test_lists_have_pages_of_limited_size(paged: tuple[Server, bytes]) -> None:
    server, subject = paged
    for path in ("/v2/a/b/tags/list", f"/v2/a/b/referrers/{digest_of(subject)}"):
        found = pages(server, path)
        assert len(found) >= 2 and max(map(len, found)) < 1_500


def test_a_client_reads_all_pages(paged: tuple[Server, bytes], tmp_path: Path) -> None:
    server, subject = paged
    reference = Reference.parse(f"{server.url.removeprefix('http://')}/a/b")
    with Repository(reference, ClientOptions(docker_config=tmp_path)) as repository:
        found = repository.list_referrers(Digest.of(subject), "a/b")
        tags = repository.list_tag_names()
    assert sorted(int(each.annotations["number"]) for each in found) == list(range(COUNT))
    assert len(tags) == COUNT + 1
    assert {each.annotations["ü"] for each in found} == {"é" * 300}


def test_large_annotations_are_left_out_of_the_list(paged: tuple[Server, bytes]) -> None:
    server, subject = paged
    raw = b"".join(pages(server, f"/v2/a/b/referrers/{digest_of(subject)}"))
    assert b"xxxx" not in raw and "é".encode() * 300 in raw and b"\\u" not in raw
    manifest = server.http.get(f"{server.url}/v2/a/b/manifests/{LONG}00").content
    assert b"x" * MAX_ANNOTATION in manifest


def test_statements_of_derivations_are_listed_and_served(
    serve_layout: Callable[..., Server], tmp_path: Path
) -> None:
    here = Aimage(tmp_path, tmp_path / "store")
    here("create", "team/m", make_valued(tmp_path / "model").directory, "-q")
    here("convert", "team/m", "team/m:int8", "--quantize", "int8", "-q")
    server = serve_layout(here.store)
    name = f"{server.url.removeprefix('http://')}/team/m:int8"
    (entry,) = here("referrers", name, "--json").value
    assert entry["artifactType"] == mediatype.AIMAGE_DERIVATION
    other = Aimage(tmp_path, tmp_path / "other")
    other("pull", name, "-q")
    (report,) = other("verify", name, "--rederive", "--json", "-q").value
    assert report["isDerived"] and report["statements"][0]["parentFrom"] == "registry"
    assert server.http.get(f"{server.url}/v2/team/m/tags/list").json()["tags"] == ["int8", "latest"]
