"""copy, tags, attach and referrers between real registries, as child processes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.errors import ManifestRefusedError
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from clowder_aimage.push import transfer
from clowder_aimage.registry import ClientOptions, Repository
from tests.process import Aimage
from tests.real_registry import PASSWORD, USER, RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving

BLOBS = 6  # the model's blobs: three tensors, two files, the config
SBOM, REPORT = "application/spdx+json", "application/vnd.example.report"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the host of an ``aimage registry serve``, which has the referrers API."""
    home = tmp_path_factory.mktemp("served")
    command = ("registry", "serve", "--addr", "127.0.0.1:0", "--log-level", "error")
    process = Aimage(home, home / "store").start(*command, is_shared=True)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate()[1]
    yield line.removeprefix("http://")
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture
def served(server: str, repository: str) -> str:
    """Return a repository of this test in the served registry."""
    return f"{server}/{repository.partition('/')[2]}"


@pytest.fixture
def pushed(aimage: Callable[..., Aimage], llm: Path, repository: str) -> str:
    """Return the digest of a model in the real registry as ``repository:v1``."""
    here = aimage("first")
    here("create", f"{repository}:v1", llm)
    return here("push", f"{repository}:v1").line


def raw_manifest(reference: str) -> Any:
    name = Reference.parse(reference)
    url = f"http://{name.registry}/v2/{name.repository}/manifests/{name.target}"
    request = urllib.request.Request(url, headers={"Accept": mediatype.OCI_MANIFEST})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read()


def blobs(store: Path) -> int:
    return sum(path.is_file() for path in (store / "blobs").rglob("*"))


def test_a_copy_within_one_registry_transfers_no_bytes(
    aimage: Callable[..., Aimage], registry: RealRegistry, repository: str, pushed: str
) -> None:
    there = aimage("there")
    mark = registry.mark()
    done = there("copy", f"{repository}:v1", f"{repository}-copy:v2")
    assert done.line == pushed
    assert f"copied 0 blobs, {BLOBS} already there" in done.err
    target = registry.count(mark, f"{repository}-copy")
    assert target["POST blob"] == BLOBS
    assert target["PUT blob"] == target["PATCH blob"] == 0
    assert target["PUT manifest"] == 1
    assert registry.count(mark, repository)["GET blob"] == 0
    assert raw_manifest(f"{repository}-copy:v2") == raw_manifest(f"{repository}:v1")
    assert not blobs(there.store)
    assert there("pull", f"{repository}-copy:v2").line == pushed


def test_a_copy_to_another_registry_and_back(
    aimage: Callable[..., Aimage], registry: RealRegistry, repository: str, pushed: str, served: str
) -> None:
    there = aimage("there")
    done = there("copy", f"{repository}:v1", f"{served}/team/x:v1", "--json")
    assert done.value["digest"] == pushed
    assert done.value["source"] == f"{repository}:v1"
    assert done.value["reference"] == f"{served}/team/x:v1"
    assert f"copied {BLOBS} blobs" in done.err
    again = there("copy", f"{repository}:v1", f"{served}/team/x:v1")
    assert f"copied 0 blobs, {BLOBS} already there" in again.err
    by_digest = there("copy", "-q", f"{served}/team/x@{pushed}", f"{repository}:back")
    assert (by_digest.line, by_digest.err) == (pushed, "")
    other = "sha256:" + "0" * 64
    wrong = there("copy", f"{repository}:v1", f"{repository}-copy@{other}", code=2)
    assert f"the source has the digest {pushed}" in wrong.err
    assert not blobs(there.store)
    assert there("pull", f"{served}/team/x:v1").line == pushed
    assert sorted(there("tags", repository).out.splitlines()) == ["back", "v1"]


def test_a_copy_of_an_index(
    registry: RealRegistry, repository: str, served: str, tmp_path: Path
) -> None:
    raw, parts = artifact(b"{}", b"one layer")
    index = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_INDEX,
        "manifests": [Descriptor.of(mediatype.OCI_MANIFEST, raw).to_json()],
    }
    source = Reference.parse(f"{repository}:all")
    connection = ClientOptions(docker_config=tmp_path)
    with Repository(source, connection) as place:
        for data in parts.values():
            place.push(Descriptor.of("application/octet-stream", data), build_bytes_body(data))
        place.push(Descriptor.of(mediatype.OCI_MANIFEST, raw), build_bytes_body(raw))
        whole = encode(index)
        place.push(Descriptor.of(mediatype.OCI_INDEX, whole), build_bytes_body(whole), source)
    target = Reference.parse(f"{served}/all:v1")
    copied = transfer(source, target, connection)
    with Repository(target, connection) as place:
        assert place.resolve(target) == copied
        assert place.resolve(target.with_digest(Descriptor.of("", raw).digest)).size == len(raw)


def test_a_refused_manifest_is_not_rewritten_by_a_copy(tmp_path: Path) -> None:
    raw, parts = artifact(b"{}", b"one layer")
    right = serving(raw, parts)

    def script(seen: Seen) -> Answer:
        if seen.method == "PUT":
            return Answer(415, {}, b'{"errors": [{"code": "MANIFEST_INVALID"}]}')
        if seen.path.startswith("/v2/b/manifests/"):
            return Answer(404)
        return Answer(201) if seen.method == "POST" else right(seen)

    with ScriptedRegistry(script).running() as host:
        source, target = (Reference.parse(f"{host.host}/{name}:v1") for name in "ab")
        with pytest.raises(ManifestRefusedError) as raised:
            transfer(source, target, ClientOptions(docker_config=tmp_path))
    assert "a copy does not rewrite manifests" in (raised.value.hint or "")
    assert len(host.asked("PUT")) == 1


def test_copy_refuses_invalid_names(aimage: Callable[..., Aimage], repository: str) -> None:
    there = aimage()
    done = there("copy", "tiny", f"{repository}:v1", code=2)
    assert f"aimage push {repository}:v1" in done.err
    done = there("copy", f"{repository}:v1", "tiny", code=2)
    assert f"aimage pull {repository}:v1" in done.err
    there("copy", f"{repository}:nothing", f"{repository}:v1", code=3)


@pytest.mark.integration
def test_a_copy_to_a_registry_with_credentials(
    aimage: Callable[..., Aimage], llm: Path, private_registry: RealRegistry
) -> None:
    if private_registry.log is None:
        pytest.skip("no access log")
    here = aimage()
    host = private_registry.host
    here("copy", f"{host}/mine/a:v1", f"{host}/mine/b:v1", code=4)
    here("login", host, "-u", USER, "--password-stdin", stdin=PASSWORD)
    here("create", f"{host}/mine/a:v1", llm)
    digest = here("push", f"{host}/mine/a:v1").line
    mark = private_registry.mark()
    assert here("copy", f"{host}/mine/a:v1", f"{host}/mine/b:v1").line == digest
    assert private_registry.count(mark, f"{host}/mine/b")["PUT blob"] == 0


@pytest.mark.integration
def test_a_push_under_another_name_mounts_blobs(
    aimage: Callable[..., Aimage], llm: Path, registry: RealRegistry, repository: str
) -> None:
    here = aimage()
    here("create", f"{repository}:v1", llm)
    digest = here("push", f"{repository}:v1").line
    here("tag", f"{repository}:v1", f"{repository}-two:v1")
    mark = registry.mark()
    done = here("push", f"{repository}-two:v1")
    assert done.line == digest
    assert f"pushed 0 blobs, {BLOBS} already there" in done.err
    counts = registry.count(mark, f"{repository}-two")
    assert counts["POST blob"] == BLOBS
    assert counts["PUT blob"] == 0
    assert aimage("there")("pull", f"{repository}-two:v1").line == digest


def test_a_push_whose_sibling_was_never_pushed_sends_all_blobs(
    aimage: Callable[..., Aimage], llm: Path, registry: RealRegistry, repository: str
) -> None:
    here = aimage()
    here("create", f"{repository}-never:v1", llm)
    here("tag", f"{repository}-never:v1", f"{repository}:v1")
    mark = registry.mark()
    here("push", f"{repository}:v1")
    counts = registry.count(mark, repository)
    assert counts["POST blob"] == counts["PUT blob"] == BLOBS  # no additional request


def test_attach_and_referrers_without_the_api(
    aimage: Callable[..., Aimage], registry: RealRegistry, repository: str, pushed: str
) -> None:
    check_attached(aimage(), f"{repository}:v1", pushed)
    here = aimage()
    tag = f"sha256-{pushed.removeprefix('sha256:')}"
    assert here("tags", repository).line == "v1"
    assert sorted(here("tags", repository, "--all", "--json").value["tags"]) == sorted(["v1", tag])


def test_attach_and_referrers_with_the_api(
    aimage: Callable[..., Aimage], repository: str, pushed: str, served: str
) -> None:
    here = aimage()
    here("copy", f"{repository}:v1", f"{served}/team/x:v1")
    check_attached(here, f"{served}/team/x:v1", pushed)
    assert here("tags", f"{served}/team/x").line == "v1"  # the API keeps the list, no tag does


def check_attached(here: Aimage, reference: str, subject: str) -> None:
    """Attach two artifacts to ``reference``, and list them."""
    name = reference.rpartition(":")[0]
    assert here("referrers", reference, "--json").value == []
    nothing = here("referrers", reference)
    assert (nothing.out, nothing.err) == ("", f"nothing is attached to {reference}\n")
    (here.home / "sbom.json").write_text('{"spdxVersion": "SPDX-2.3"}')
    (here.home / "report.txt").write_text("all is well\n")
    (here.home / "empty").write_text("")
    sbom = here("attach", reference, "sbom.json", "--type", SBOM).line
    report = here(
        *("attach", f"{name}@{subject}", "report.txt", "empty", "--type", REPORT),
        *("--annotation", "org.example.by=hand=made", "--json", "-q"),
    )
    assert report.err == ""
    assert report.value["subject"] == subject
    assert report.value["reference"] == f"{name}@{report.value['digest']}"
    assert here("attach", reference, "sbom.json", "--type", SBOM).line == sbom  # the same digest
    found = here("referrers", reference, "--json").value
    assert {row["digest"] for row in found} == {sbom, report.value["digest"]}
    (row,) = here("referrers", reference, "--type", REPORT, "--json").value
    assert row == {
        "reference": report.value["reference"],
        "mediaType": mediatype.OCI_MANIFEST,
        "digest": report.value["digest"],
        "size": report.value["size"],
        "artifactType": REPORT,
        "annotations": {"org.example.by": "hand=made"},
    }
    assert here("referrers", f"{name}@{subject}", "--type", SBOM).out.split()[4:6] == [sbom, SBOM]
    assert "org.example.by=hand=made" in here("referrers", reference).out
    document = json.loads(raw_manifest(f"{name}@{sbom}"))
    assert document["subject"]["digest"] == subject
    assert document["layers"][0]["annotations"] == {"org.opencontainers.image.title": "sbom.json"}
    assert here("pull", f"{name}@{sbom}").line == sbom  # an artifact of another kind keeps its type
    assert raw_manifest(reference) == raw_manifest(f"{name}@{subject}")  # REF is unchanged


def test_a_copied_artifact_is_listed_as_a_referrer(
    aimage: Callable[..., Aimage], repository: str, pushed: str, served: str
) -> None:
    """A manifest with a subject is listed as a referrer, whichever verb transferred it."""
    here = aimage()
    (here.home / "x").write_text("x")
    here("copy", f"{repository}:v1", f"{served}/y:v1")
    digest = here("attach", f"{served}/y:v1", "x", "--type", REPORT).line
    here("copy", f"{served}/y@{digest}", f"{repository}@{digest}")
    (row,) = here("referrers", f"{repository}:v1", "--json").value
    assert row["digest"] == digest


def test_invalid_arguments_of_copy_and_attach(
    aimage: Callable[..., Aimage], repository: str
) -> None:
    here = aimage()
    (here.home / "x").write_text("x")
    assert "aimage tags" in here("tags", f"{repository}:v1", code=2).err
    assert "aimage ls" in here("tags", "tiny", code=2).err
    here("tags", repository, code=3)
    here("referrers", f"{repository}:v1", code=3)
    here("referrers", "tiny", code=2)
    here("attach", f"{repository}:v1", "x", "--type", SBOM, code=3)
    here("attach", f"{repository}:v1", "x", code=2)
    here("attach", f"{repository}:v1", "--type", SBOM, code=2)
    here("attach", f"{repository}:v1", "nothing", "--type", SBOM, code=3)
    assert "media type" in here("attach", repository, "x", "--type", "sbom", code=2).err
    done = here("attach", repository, "x", "--type", SBOM, "--annotation", "k", code=2)
    assert "KEY=VALUE" in done.err


@pytest.fixture
def signed(
    aimage: Callable[..., Aimage], repository: str, pushed: str
) -> tuple[Aimage, str, str, str]:
    """Return a command line, and the digests of an artifact of ``v1`` and of its signature."""
    here = aimage()
    (here.home / "sbom.json").write_text("the contents")
    (here.home / "signature").write_text("signed")
    sbom = here("attach", "-q", f"{repository}:v1", "sbom.json", "--type", SBOM).line
    report = here("attach", "-q", f"{repository}@{sbom}", "signature", "--type", REPORT).line
    return here, pushed, sbom, report


def test_referrers_of_referrers(signed: tuple[Aimage, str, str, str], repository: str) -> None:
    here, digest, sbom, report = signed
    lines = here("referrers", f"{repository}:v1", "--recursive").out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [sbom, report]
    assert lines[1].startswith("  sha256:")
    found = here("referrers", f"{repository}:v1", "-r", "--json").value
    assert [(row["digest"], row["subject"]) for row in found] == [(sbom, digest), (report, sbom)]
    (row,) = here("referrers", f"{repository}:v1", "-r", "--type", REPORT, "--json").value
    assert row["digest"] == report


def test_a_recursive_copy_has_what_is_attached(
    signed: tuple[Aimage, str, str, str], repository: str, served: str
) -> None:
    here, digest, sbom, report = signed
    for target in (f"{repository}-copy", f"{served}/copied"):  # without and with the API
        assert here("copy", "-q", f"{repository}:v1", f"{target}:v1").line == digest
        assert here("referrers", f"{target}:v1", "--json").value == []
        done = here("copy", "--recursive", f"{repository}:v1", f"{target}:v1")
        assert done.line == digest
        assert " already there" in done.err
        found = here("referrers", f"{target}:v1", "-r", "--json").value
        assert [row["digest"] for row in found] == [sbom, report]
        again = here("copy", "-r", f"{repository}:v1", f"{target}:v1")
        assert "copied 0 blobs" in again.err


def test_a_recursive_copy_has_what_is_attached_to_the_parts_of_an_index(
    signed: tuple[Aimage, str, str, str], repository: str, served: str, tmp_path: Path
) -> None:
    here, digest, sbom, report = signed
    source = Reference.parse(f"{repository}:all")
    with Repository(source, ClientOptions(docker_config=tmp_path)) as place:
        child = place.resolve(Reference.parse(f"{repository}:v1"))
        index = {
            "schemaVersion": 2,
            "mediaType": mediatype.OCI_INDEX,
            "manifests": [child.to_json()],
        }
        raw = encode(index)
        place.push(Descriptor.of(mediatype.OCI_INDEX, raw), build_bytes_body(raw), source)
    here("copy", "-q", "-r", f"{repository}:all", f"{served}/index:v1")
    found = here("referrers", f"{served}/index@{digest}", "-r", "--json").value
    assert [row["digest"] for row in found] == [sbom, report]


def test_a_copy_of_all_tags(
    signed: tuple[Aimage, str, str, str], repository: str, served: str
) -> None:
    here, digest, sbom, _ = signed
    here("copy", "-q", f"{repository}:v1", f"{repository}:v2")
    done = here("copy", "--all-tags", repository, f"{served}/all")
    assert done.out.splitlines() == [f"{served}/all:{tag} {digest}" for tag in ("v1", "v2")]
    assert here("tags", f"{served}/all").out.split() == ["v1", "v2"]
    assert here("referrers", f"{served}/all:v1", "--json").value == []
    value = here("copy", "-a", "-r", "--json", "-q", repository, f"{served}/all").value
    assert [(one["tag"], one["digest"]) for one in value["tags"]] == [
        ("v1", digest),
        ("v2", digest),
    ]
    assert here("referrers", f"{served}/all:v1", "--json").value[0]["digest"] == sbom
    for source, target in ((f"{repository}:v1", served), (repository, f"{served}/all:v1")):
        assert "without a tag" in here("copy", "-a", source, target, code=2).err
    here("copy", "-a", f"{repository}-nothing", f"{served}/all", code=3)


def test_attached_files_are_fetched(signed: tuple[Aimage, str, str, str], repository: str) -> None:
    here, _, sbom, _ = signed
    done = here("attach", f"{repository}@{sbom}", "--get", "-o", "deep/files")
    assert done.line == "deep/files/sbom.json"
    assert "fetched 1 blob" in done.err
    assert (here.home / "deep/files/sbom.json").read_text() == "the contents"
    (here.home / "sbom.json").write_text("mine")
    failed = here("attach", f"{repository}@{sbom}", "--get", code=2)
    assert "sbom.json exists" in failed.err
    assert (here.home / "sbom.json").read_text() == "mine"
    value = here("attach", f"{repository}@{sbom}", "--get", "-o", "b", "--json", "-q").value
    assert value == {"reference": f"{repository}@{sbom}", "files": ["b/sbom.json"]}
    assert "no files with names" in here("attach", f"{repository}:v1", "--get", code=2).err
    here("attach", f"{repository}:v9", "--get", code=3)
    for wrong in (("sbom.json", "--get"), ("--get", "--type", SBOM)):
        assert "cannot be combined" in here("attach", f"{repository}@{sbom}", *wrong, code=2).err
    needs = here("attach", f"{repository}:v1", "sbom.json", "--type", SBOM, "-o", "x", code=2)
    assert "--output requires --get" in needs.err


@pytest.mark.parametrize(
    ("titles", "second", "message"),
    [
        (("../out", "b"), b"two", "is not the name of a file"),
        (("/out", "b"), b"two", "is not the name of a file"),
        (("..", "b"), b"two", "is not the name of a file"),
        (("a", "a"), b"two", "the same name"),
        (("a", "b"), b"owt", "digest mismatch"),
    ],
)
def test_hostile_attached_files_are_refused_and_leave_nothing(
    aimage: Callable[..., Aimage], titles: tuple[str, str], second: bytes, message: str
) -> None:
    raw, parts = artifact(b"{}", b"one", b"two")
    document = json.loads(raw)
    for layer, title in zip(document["layers"], titles, strict=True):
        layer["annotations"] = {"org.opencontainers.image.title": title}
    parts = {digest: second if data == b"two" else data for digest, data in parts.items()}
    here = aimage()
    with ScriptedRegistry(serving(json.dumps(document).encode(), parts)).running() as host:
        failed = here("attach", f"{host.host}/x:v1", "--get", "-o", "files", code=5)
    assert message in failed.err
    assert not [path for path in here.home.rglob("*") if path.is_file()]


def test_several_names_are_pushed_and_pulled(
    aimage: Callable[..., Aimage], llm: Path, repository: str
) -> None:
    here, there = aimage("first"), aimage("there")
    names = [f"{repository}:{tag}" for tag in ("v1", "v2")]
    for name in names:
        here("create", "-q", name, llm)
    digest, again = here("push", *names).out.split()
    assert digest == again
    assert there("pull", *names).out.split() == [digest, digest]
    rows = [json.loads(line) for line in there("pull", "--json", "-q", *names).out.splitlines()]
    assert [row["reference"] for row in rows] == names
    failed = there("pull", names[0], f"{repository}:v9", names[1], code=3)
    assert failed.out.split() == [digest]
    here("push", names[0], f"{repository}:v9", code=3)
    here("push", code=2)
