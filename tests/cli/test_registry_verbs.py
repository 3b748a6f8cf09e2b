"""Verbs that read and change a registry: resolve, manifest, blob, repo, delete, tags, show."""

from __future__ import annotations

import json
import os
import pty
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.oci import Digest, mediatype
from tests.process import PROGRAM, Aimage, run
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry, Seen, artifact, serving, skip_waiting

MANIFEST, BLOBS = artifact(b"{}", b"weights")
WEIGHTS = Digest.of(b"weights")
DIGEST = str(Digest.of(MANIFEST))
OTHER = "sha256:" + "0" * 64


@pytest.fixture
def model(aimage: Callable[[], Aimage], tiny: Path, repository: str) -> tuple[Aimage, str]:
    """Return a command line, and the digest of a model that it has pushed as ``repository:v1``.

    The model is one of few layers, as each is pushed.
    """
    here = aimage()
    here("create", "-q", f"{repository}:v1", tiny, "--whole-files")
    here("tag", f"{repository}:v1", "x")
    return here, here("push", "-q", f"{repository}:v1").line


def script(change: Callable[[Any], Answer | None]) -> Callable[[Any], Any]:
    """Return a correct script; ``change(seen)`` may return another answer."""
    right = serving(MANIFEST, BLOBS)
    return lambda seen: change(seen) or right(seen)


def test_resolve_prints_the_digest_by_one_head_request(
    model: tuple[Aimage, str], registry: RealRegistry, repository: str
) -> None:
    here, digest = model
    mark = registry.mark()
    assert here("resolve", f"{repository}:v1").line == digest
    assert registry.count(mark, repository) == {"HEAD manifest": 1}
    assert here("digest", f"{repository}@{digest}").line == digest
    found = here("resolve", f"{repository}:v1", "--json").value
    assert (found["reference"], found["digest"]) == (f"{repository}:v1", digest)
    assert found["mediaType"] == mediatype.OCI_MANIFEST
    assert "not found at" in here("resolve", f"{repository}:v2", code=3).err
    assert "no registry host" in here("resolve", "x", code=2).err


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        {"Docker-Content-Digest": "nonsense", "Content-Length": "10"},
        {"Docker-Content-Digest": OTHER, "Content-Type": "text/html", "Content-Length": "3"},
    ],
)
def test_resolve_falls_back_to_get(
    aimage: Callable[..., Aimage], headers: dict[str, str] | None
) -> None:
    def change(seen: Any) -> Answer | None:
        if seen.method == "HEAD":
            return Answer(405) if headers is None else Answer(200, dict(headers))
        return None

    with ScriptedRegistry(script(change)).running() as registry:
        assert aimage()("resolve", f"{registry.host}/x").line == DIGEST


def test_resolve_verifies_a_digest(aimage: Callable[..., Aimage]) -> None:
    with ScriptedRegistry(serving(MANIFEST, BLOBS)).running() as registry:
        aimage()("resolve", f"{registry.host}/x@{OTHER}", code=5)


def test_manifest_fetch_gives_the_bytes(model: tuple[Aimage, str], repository: str) -> None:
    here, digest = model
    raw = here("manifest", "fetch", f"{repository}:v1").out
    assert str(Digest.of(raw.encode())) == digest
    pretty = here("manifest", "fetch", f"{repository}:v1", "--pretty").out
    assert pretty == json.dumps(json.loads(raw), indent=2) + "\n"
    config = here("manifest", "fetch", f"{repository}:v1", "--config").out
    assert str(Digest.of(config.encode())) == json.loads(raw)["config"]["digest"]
    file = here.home / "manifest.json"
    assert here("manifest", "fetch", f"{repository}:v1", "-o", file).line == str(file)
    assert file.read_text() == raw
    here("manifest", "fetch", f"{repository}:v2", "-o", file, code=3)
    assert file.read_text() == raw
    failed = here("manifest", "fetch", f"{repository}:v1", "-o", "no/such", code=1)
    assert "cannot write no/such: No such file or directory" in failed.err


def test_a_manifest_is_written_to_a_device(model: tuple[Aimage, str], repository: str) -> None:
    here, _ = model
    here("manifest", "fetch", f"{repository}:v1", "-o", os.devnull)
    assert Path(os.devnull).is_char_device()


def test_manifest_push_gives_a_manifest_another_tag(
    model: tuple[Aimage, str], repository: str
) -> None:
    here, digest = model
    here("manifest", "fetch", f"{repository}:v1", "-o", "m.json")
    assert here("manifest", "push", f"{repository}:v2", "m.json").line == digest
    raw = (here.home / "m.json").read_text()
    assert here("manifest", "push", f"{repository}:v3", "-", stdin=raw).line == digest
    assert here("manifest", "push", f"{repository}@{digest}", "m.json").line == digest
    assert here("resolve", f"{repository}:v3").line == digest
    failed = here("manifest", "push", f"{repository}@{OTHER}", "m.json", code=2)
    assert f"m.json has the digest {digest}" in failed.err


def test_manifest_push_lists_a_referrer(model: tuple[Aimage, str], repository: str) -> None:
    here, digest = model
    raw = json.loads(here("manifest", "fetch", f"{repository}:v1").out)
    subject = {"mediaType": mediatype.OCI_MANIFEST, "digest": digest, "size": 1}
    (here.home / "m.json").write_text(json.dumps({**raw, "subject": subject}))
    pushed = here("manifest", "push", f"{repository}:sub", "m.json").line
    (row,) = here("referrers", f"{repository}:v1", "--json").value
    assert row["digest"] == pushed
    leader, follower = pty.openpty()
    try:
        command = [*PROGRAM, "referrers", f"{repository}:v1"]
        run(command, env=here.env() | {"COLUMNS": "60"}, stdout=follower, check=True)
        lines = os.read(leader, 10_000).decode().split("\r\n")
    finally:
        os.close(leader)
        os.close(follower)
    assert lines[1].startswith(f"{pushed[7:19]}  ")
    assert here("referrers", f"{repository}:v1").out.splitlines()[1].startswith(pushed)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (None, 1, "cannot read m.json"),
        ("not JSON", 5, "m.json is not a manifest"),
        ("{}", 5, "m.json is not a manifest"),
        (" " * (4 << 20) + "{}", 1, "m.json is larger than"),
    ],
)
def test_manifest_push_refuses_other_files(
    aimage: Callable[..., Aimage], repository: str, text: str | None, code: int, message: str
) -> None:
    here = aimage()
    if text is not None:
        (here.home / "m.json").write_text(text)
    assert message in here("manifest", "push", f"{repository}:v1", "m.json", code=code).err


def test_manifest_push_fails_without_the_blobs(
    aimage: Callable[..., Aimage], repository: str
) -> None:
    here = aimage()
    (here.home / "m.json").write_bytes(MANIFEST)
    here("manifest", "push", f"{repository}:v1", "m.json", code=1)
    here("resolve", f"{repository}:v1", code=3)


def test_blob_fetch_gives_the_bytes(model: tuple[Aimage, str], repository: str) -> None:
    here, _ = model
    config = json.loads(here("manifest", "fetch", f"{repository}:v1").out)["config"]["digest"]
    expected = here("manifest", "fetch", f"{repository}:v1", "--config").out
    assert here("blob", "fetch", f"{repository}@{config}").out == expected
    assert here("blob", "fetch", repository, config, "-o", "c.json").line == "c.json"
    assert (here.home / "c.json").read_text() == expected
    value = here("blob", "fetch", repository, config, "-o", "c.json", "--json", "-q").value
    assert (value["file"], value["digest"]) == ("c.json", config)
    assert "not found at" in here("blob", "fetch", repository, OTHER, "-o", "none", code=3).err
    assert "has no digest" in here("blob", "fetch", repository, code=2).err
    assert "digest already" in here("blob", "fetch", f"{repository}@{OTHER}", OTHER, code=2).err
    here("blob", "fetch", repository, "sha256:short", code=2)
    assert not (here.home / "none").exists()


def test_a_wrong_blob_leaves_the_old_file(aimage: Callable[..., Aimage]) -> None:
    def change(seen: Any) -> Answer | None:
        return Answer(200, {}, b"W") if "/blobs/" in seen.path else None

    here = aimage()
    (here.home / "old").write_text("old")
    with ScriptedRegistry(script(change)).running() as registry:
        here("blob", "fetch", f"{registry.host}/x@{WEIGHTS}", "-o", "old", code=5)
        here("blob", "fetch", f"{registry.host}/x@{WEIGHTS}", code=5)
    assert (here.home / "old").read_text() == "old"
    assert [path.name for path in here.home.iterdir() if path.is_file()] == ["old"]


def test_repo_ls_lists_the_repositories(
    model: tuple[Aimage, str], registry: RealRegistry, repository: str
) -> None:
    here, _ = model
    here("copy", "-q", f"{repository}:v1", f"{repository}/below:v1")
    assert repository in here("repo", "ls", registry.host).out.splitlines()
    assert here("repo", "ls", repository).out.split() == [repository, f"{repository}/below"]
    value = here("catalog", repository, "--json").value
    assert value == {
        "registry": registry.host,
        "repositories": [repository, f"{repository}/below"],
    }
    assert "has no repositories" in here("repo", "ls", f"{registry.host}/tests-none").err
    for wrong in ("team", f"{repository}:v1", f"{registry.host}/Team", ""):
        here("repo", "ls", wrong, code=2)


def test_repo_ls_follows_pages(aimage: Callable[..., Aimage]) -> None:
    def catalog(seen: Seen) -> Answer:
        last = "last=b" in seen.path
        link = {} if last else {"Link": '</v2/_catalog?last=b&n=2>; rel="next"'}
        names = ["c"] if last else ["a", "b"]
        return Answer(200, link, json.dumps({"repositories": names}).encode())

    with ScriptedRegistry(catalog).running() as registry:
        done = aimage()("repo", "ls", registry.host)
        assert done.out.split() == [f"{registry.host}/{name}" for name in "abc"]


@pytest.mark.parametrize(
    "answer",
    [*map(Answer, (400, 404, 405, 406, 501)), Answer(200, {}, b"<html>"), Answer(200, {}, b"{}")],
)
def test_a_registry_without_a_catalog_is_named(
    aimage: Callable[..., Aimage], answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waiting(monkeypatch)
    with ScriptedRegistry(lambda _: answer).running() as registry:
        failed = aimage()("repo", "ls", registry.host, code=1).err
    assert f"{registry.host} does not list its repositories" in failed


def test_tags_with_digests_and_without_generated_tags(
    model: tuple[Aimage, str], repository: str
) -> None:
    here, digest = model
    generated = f"sha256-{digest.removeprefix('sha256:')}"
    for tag in ("v2", generated, f"{generated}.sig"):
        here("copy", "-q", f"{repository}:v1", f"{repository}:{tag}")
    assert here("tags", repository).out.split() == ["v1", "v2"]
    assert set(here("tags", repository, "-a").out.split()) == {
        *("v1", "v2", generated, f"{generated}.sig")
    }
    lines = [line.split() for line in here("tags", repository, "--long").out.splitlines()]
    assert lines[0] == ["TAG", "DIGEST", "TYPE"]
    assert lines[1:] == [[tag, digest, mediatype.OCI_MANIFEST] for tag in ("v1", "v2")]
    value = here("tags", repository, "-l", "--json").value
    assert [row["tag"] for row in value["manifests"]] == value["tags"] == ["v1", "v2"]
    assert value["manifests"][0]["digest"] == digest


def test_show_reads_from_the_registry(model: tuple[Aimage, str], repository: str) -> None:
    here, digest = model
    shown = here("show", f"{repository}:v1", "--layers").out
    here("rm", f"{repository}:v1")
    assert "not found" in here("show", f"{repository}:v1", code=3).err
    assert here("show", f"{repository}:v1", "--remote", "--layers").out == shown
    assert here("show", f"{repository}:v1", "--remote", "--json").value["digest"] == digest
    here("show", f"{repository}:v2", "--remote", code=3)
    here("show", "x", "--remote", code=2)
    assert "require --remote" in here("show", "x", "--insecure", code=2).err


def test_delete_a_manifest_with_all_its_tags(model: tuple[Aimage, str], repository: str) -> None:
    here, digest = model
    here("copy", "-q", f"{repository}:v1", f"{repository}:v2")
    done = here("delete", f"{repository}@{digest}", "--yes")
    assert done.line == f"{repository}@{digest}"
    assert f"deleted the manifest {repository}@{digest} and all its tags" in done.err
    for tag in ("v1", "v2"):
        here("resolve", f"{repository}:{tag}", code=3)
    here("show", f"{repository}:v1")  # the store is not changed
    here("delete", f"{repository}@{digest}", "-f", code=3)


def test_delete_refuses_without_an_answer(model: tuple[Aimage, str], repository: str) -> None:
    here, digest = model
    failed = here("delete", f"{repository}:v1", code=2).err
    assert f"the tag {repository}:v1 ({digest}) is not deleted" in failed
    assert "--yes deletes without asking" in failed
    assert "neither tag nor digest" in here("delete", repository, "-f", code=2).err
    assert "aimage rm x" in here("delete", "x", "-f", code=2).err
    here("delete", f"{repository}:v2", "-f", code=3)
    assert here("resolve", f"{repository}:v1").line == digest


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_delete_asks_on_a_terminal(
    model: tuple[Aimage, str], repository: str, answer: str, code: int
) -> None:
    here, digest = model
    master, slave = pty.openpty()
    try:
        os.write(master, f"{answer}\n".encode())
        words = [*PROGRAM, "delete", f"{repository}@{digest}"]
        done = run(words, env=here.env(), stdin=slave, text=True)
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == code, done.stderr
    assert f"Delete the manifest {repository}@{digest} and all its tags?" in done.stderr
    assert ("nothing was deleted" in done.stderr) == (answer == "n")
    here("resolve", f"{repository}:v1", code=0 if code else 3)


def test_delete_a_manifest_that_still_has_tags(aimage: Callable[..., Aimage]) -> None:
    """Google Artifact Registry deletes no manifest by digest before its tags."""
    body = b'{"errors":[{"code":"GOOGLE_MANIFEST_DANGLING_TAG","message":"' + (
        b'Manifest is still referenced by one or more tags"}]}'
    )
    answer = Answer(400, {}, body)
    with ScriptedRegistry(
        script(lambda seen: answer if seen.method == "DELETE" else None)
    ).running() as registry:
        failed = aimage()("delete", f"{registry.host}/x@{DIGEST}", "-f", code=1).err
    assert "delete its tags first" in failed


def test_delete_a_tag_where_the_registry_supports_it(aimage: Callable[..., Aimage]) -> None:
    with ScriptedRegistry(
        script(lambda seen: Answer(202) if seen.method == "DELETE" else None)
    ).running() as registry:
        done = aimage()("delete", f"{registry.host}/x:v1", "-f", "--json")
        assert registry.asked("DELETE") == ["/v2/x/manifests/v1"]
    assert done.value["deleted"] == f"{registry.host}/x:v1"
    assert (done.value["kind"], done.value["digest"]) == ("tag", DIGEST)


@pytest.mark.parametrize(
    ("status", "code", "target", "message"),
    [
        (405, 1, ":v1", "does not support the deletion of tags"),
        (400, 1, ":v1", "does not support the deletion of tags"),
        (404, 1, ":v1", "does not support the deletion of tags"),
        (405, 1, f"@{DIGEST}", "does not support the deletion of manifests"),
        (404, 3, f"@{DIGEST}", "not found at"),
        (403, 4, ":v1", "denied access to the deletion of"),
        (401, 4, ":v1", "credentials"),
    ],
)
def test_a_refused_deletion_is_explained(
    aimage: Callable[..., Aimage], status: int, code: int, target: str, message: str
) -> None:
    refused = script(lambda seen: Answer(status) if seen.method == "DELETE" else None)
    with ScriptedRegistry(refused).running() as registry:
        failed = aimage()("delete", f"{registry.host}/x{target}", "-f", code=code).err
    assert message in failed
    if "tags" in message:
        assert f"aimage delete {registry.host}/x@{DIGEST}" in failed


def test_a_registry_that_deletes_no_tags(model: tuple[Aimage, str], repository: str) -> None:
    here, digest = model
    failed = here("delete", f"{repository}:v1", "-f", code=1).err
    assert f"aimage delete {repository}@{digest}" in failed
    assert here("resolve", f"{repository}:v1").line == digest


def test_a_deleted_referrer_is_removed_from_the_list(
    model: tuple[Aimage, str], repository: str
) -> None:
    here, _ = model
    (here.home / "x").write_text("x")
    kind = "application/vnd.example.report"
    first, second = (
        here("attach", "-q", f"{repository}:v1", "x", "--type", kind, "--annotation", f"n={n}").line
        for n in range(2)
    )
    here("delete", f"{repository}@{first}", "-f")
    (row,) = here("referrers", f"{repository}:v1", "--json").value
    assert row["digest"] == second


def test_tag_remote_adds_tags_without_fetching_blobs(
    model: tuple[Aimage, str], registry: RealRegistry, repository: str
) -> None:
    here, digest = model
    mark = registry.mark()
    done = here("tag", "--remote", f"{repository}:v1", "v2", f"{repository}:stable")
    assert done.out.splitlines() == [
        f"{repository}:v2 {digest}",
        f"{repository}:stable {digest}",
    ]
    assert not [kind for kind in registry.count(mark, repository) if "blob" in kind]
    assert here("resolve", f"{repository}:stable").line == digest
    assert here("tag", "--remote", f"{repository}@{digest}", "v3", "--json").value["digest"] == (
        digest
    )


@pytest.mark.parametrize(
    ("names", "code", "message"),
    [
        (["x", "v2"], 2, "no registry host"),
        (["{}:v1", "localhost:1/other:v2"], 2, "aimage copy"),
        (["{}:v1", "-bad"], 2, "-b"),
        (["{}:v1", "a b"], 2, "invalid tag"),
        (["{}:v1", "v2@sha256:" + "0" * 64], 2, "a tag is needed"),
        (["{}:absent", "v2"], 3, "not found at"),
        (["{}:v1"], 2, "DST"),
    ],
)
def test_tag_remote_refuses_other_names(
    model: tuple[Aimage, str], repository: str, names: list[str], code: int, message: str
) -> None:
    here, _ = model
    words = [name.replace("{}", repository) for name in names]
    assert message in here("tag", "--remote", *words, code=code).err
    assert here("tags", repository).out.split() == ["v1"]


def test_tag_takes_several_names_and_no_registry_options(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    assert len(set(here("tag", "x", "y", "z:2").out.split())) == 1
    assert {"x:latest", "y:latest", "z:2"} <= set(here("ls").out.split())
    assert "require --remote" in here("tag", "x", "v", "-u", "a", "-p", "b", code=2).err
