"""The content of each repository, beside others in the same store, as in other registries."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import Collector
from clowder_aimage.oci import Descriptor, Reference
from tests.distribution.served import (
    OCI_INDEX,
    OCI_MANIFEST,
    RegistryClient,
    Server,
    descriptor_of,
    digest_of,
    manifest_of,
)
from tests.registry_app import RegistryThread

OLD, NEW, EMPTY = b"old layer", b"new layer", b"{}"
FIRST, SECOND = manifest_of(OLD), manifest_of(NEW)
LIST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [descriptor_of(FIRST, OCI_MANIFEST)],
    }
).encode()
NAMED = {"OLD": OLD, "NEW": NEW, "EMPTY": EMPTY, "FIRST": FIRST, "SECOND": SECOND, "LIST": LIST}
# Pushes of whole artifacts, in words
PUSHES = {"FIRST": (OLD, EMPTY, FIRST), "SECOND": (NEW, EMPTY, SECOND)}

# The steps of each situation. A request is "METHOD repository blobs|manifests content status",
# where the content is a tag or one of the names above. "push" pushes an artifact to a tag, "upload"
# a blob; "mount OLD a b" mounts one of a ("*": of any) to b; "tags" and "catalog" compare lists;
# "restart" ends the server and its leases.
BLOBS = {
    "a blob is in the repository that it was pushed to": """
        upload a OLD; HEAD a blobs OLD 200; GET a blobs OLD 200
        HEAD b blobs OLD 404; GET b blobs OLD 404; DELETE b blobs OLD 404; HEAD a blobs OLD 200
    """,
    "each repository deletes its own": """
        upload a OLD; upload b OLD; DELETE a blobs OLD 202; HEAD a blobs OLD 404
        DELETE a blobs OLD 404; HEAD b blobs OLD 200; DELETE b blobs OLD 202; HEAD b blobs OLD 404
    """,
    "a deletion survives a restart": """
        upload a OLD; upload b OLD; DELETE a blobs OLD 202; restart
        HEAD a blobs OLD 404; HEAD b blobs OLD 200
    """,
    "a pushed blob survives a restart": """
        upload a OLD; restart; HEAD a blobs OLD 200; HEAD b blobs OLD 404
    """,
    "a deleted blob comes back by a push": """
        upload a OLD; DELETE a blobs OLD 202; upload a OLD; GET a blobs OLD 200
        restart; GET a blobs OLD 200
    """,
    "a mount adds to one repository": """
        upload a OLD; mount OLD a b 201; HEAD b blobs OLD 200; HEAD c blobs OLD 404
        DELETE a blobs OLD 202; GET b blobs OLD 200; restart; GET b blobs OLD 200
    """,
    "a mount needs a repository that has it": """
        upload a OLD; mount OLD c b 202; HEAD b blobs OLD 404
        mount NEW a b 202; mount OLD * b 201; HEAD b blobs OLD 200
    """,
    "a deleted blob is not mounted": """
        upload a OLD; DELETE a blobs OLD 202; mount OLD a b 202; mount OLD * b 202
    """,
    "a mount of a manifest's blob": """
        push a FIRST v1; mount OLD a b 201; GET b blobs OLD 200
    """,
    "a manifest needs the blobs of its repository": """
        upload a OLD; upload a EMPTY; PUT b manifests FIRST 400; mount OLD a b 201
        PUT b manifests FIRST 400; mount EMPTY a b 201; PUT b manifests FIRST 201
    """,
    "an index needs the manifests of its repository": """
        push a FIRST v1; PUT b manifests LIST 400; PUT a manifests LIST 201
    """,
    "a blob that a manifest needs is not deleted": """
        push a FIRST v1; upload b OLD; DELETE a blobs OLD 405; GET a blobs OLD 200
        DELETE b blobs OLD 202; HEAD b blobs OLD 404; GET a blobs OLD 200
        DELETE a manifests FIRST 202; DELETE a blobs OLD 202; HEAD a blobs OLD 404
    """,
    "a blob that an untagged manifest needs is not deleted": """
        push a FIRST v1; push a SECOND v1; DELETE a blobs OLD 405; GET a blobs OLD 200
        DELETE a manifests FIRST 202; DELETE a blobs OLD 202; GET a blobs NEW 200
    """,
    "the deletion in another repository leaves an upload protected": """
        upload a OLD; upload a EMPTY; upload b OLD; DELETE b blobs OLD 202; DELETE c blobs OLD 404
        collect-beside; PUT a manifests FIRST 201; GET a blobs OLD 200
    """,
    "the deletion of its source leaves a mount protected": """
        upload a OLD; mount OLD a b 201; DELETE a blobs OLD 202; collect-beside; GET b blobs OLD 200
    """,
    "a collection removes an upload whose lease has ended": """
        upload a OLD; mount OLD a b 201; collect-all; HEAD a blobs OLD 404; upload b OLD
        HEAD a blobs OLD 404; GET b blobs OLD 200
    """,
    "blobs of a deleted manifest stay until they are deleted": """
        push a FIRST v1; DELETE a manifests FIRST 202; HEAD a blobs OLD 200; HEAD b blobs OLD 404
    """,
}
MANIFESTS = {
    "a moved tag leaves the manifest": """
        push a FIRST v1; push a SECOND v1; GET a manifests v1 200; GET a manifests FIRST 200
        GET a blobs OLD 200; tags a v1; restart; GET a manifests FIRST 200; HEAD a blobs OLD 200
        collect; GET a manifests FIRST 200; GET a blobs OLD 200
        collect-all; GET a manifests FIRST 404; GET a blobs OLD 404; GET a manifests SECOND 200
    """,
    "a deleted tag leaves the manifest": """
        push a FIRST v1; DELETE a manifests v1 202; GET a manifests v1 404
        GET a manifests FIRST 200; tags a; restart; collect; GET a manifests FIRST 200
        GET a blobs OLD 200; collect-all; GET a manifests FIRST 404; GET a blobs OLD 404; tags a
    """,
    "an untagged manifest is of one repository": """
        push a FIRST v1; push a SECOND v1; GET b manifests FIRST 404; DELETE b manifests FIRST 404
        push b FIRST v1; DELETE a manifests FIRST 202; GET b manifests FIRST 200
    """,
    "an untagged manifest is deleted by digest": """
        push a FIRST v1; push a SECOND v1; DELETE a manifests FIRST 202; GET a manifests FIRST 404
        DELETE a manifests FIRST 404; restart; GET a manifests FIRST 404; GET a manifests v1 200
    """,
    "a tagged manifest is deleted by digest for good": """
        push a FIRST v1; push a SECOND v1; push a FIRST v1; DELETE a manifests FIRST 202
        GET a manifests FIRST 404; restart; GET a manifests FIRST 404; GET a manifests SECOND 200
    """,
    "a tag comes back": """
        push a FIRST v1; DELETE a manifests v1 202; push a FIRST v1; GET a manifests v1 200
        collect-all; GET a manifests v1 200; GET a manifests FIRST 200; GET a blobs OLD 200
    """,
    "a manifest pushed by digest is kept by collections": """
        push a FIRST v1; PUT a manifests FIRST 201; DELETE a manifests v1 202; collect-all
        GET a manifests FIRST 200; GET a blobs OLD 200
    """,
    "an untagged index keeps its manifests": """
        push a FIRST v1; PUT a manifests LIST 201 all; push a SECOND all
        DELETE a manifests v1 202; GET a manifests LIST 200; GET a manifests FIRST 200
        DELETE a manifests FIRST 405; DELETE a manifests LIST 202; DELETE a manifests FIRST 202
    """,
    "an untagged manifest is a child of an index": """
        push a FIRST v1; push a SECOND v1; PUT a manifests LIST 201 all; GET a manifests LIST 200
    """,
}
# Commands in the same store: "tag" and "rm"
COMMANDS = {
    "a command moves a tag": """
        push a FIRST v1; push a SECOND v2; tag v2 a v1; GET a manifests v1 200
        GET a manifests FIRST 200; GET a blobs OLD 200; restart; GET a manifests FIRST 200
    """,
    "a command removes a name": """
        push a FIRST v1; rm a v1; tags a; GET a manifests FIRST 200; GET a blobs OLD 200
        DELETE a manifests FIRST 202; GET a manifests FIRST 404
    """,
    "a command removes the last name of its own": """
        push a FIRST v1; tag v1 a own:v1; restart; rm own v1; tags own; catalog a own
        GET own manifests FIRST 200; rm a v1; collect; GET own manifests FIRST 404; catalog a own
    """,
    "content that a command removed has no grace": """
        push a FIRST v1; push a SECOND v2; DELETE a manifests v2 202; rm a v1; collect
        GET a manifests FIRST 404; GET a manifests SECOND 200; GET a blobs NEW 200
    """,
}
LISTS = {
    "a repository that never was": "tags a 404; catalog",
    "a repository with a blob only": "upload a OLD; tags a 404; catalog",
    "a refused manifest": "PUT a manifests FIRST 400; tags a 404; catalog",
    "a repository with a tag": "push a FIRST v1; tags a v1; catalog a",
    "a manifest by digest": """
        upload a OLD; upload a EMPTY; PUT a manifests FIRST 201; tags a; catalog a
    """,
    "the last tag is deleted": "push a FIRST v1; DELETE a manifests v1 202; tags a; catalog a",
    "the last manifest is deleted": """
        push a FIRST v1; DELETE a manifests FIRST 202; tags a; catalog a; tags b 404
        restart; tags a; catalog a; collect-all; tags a; catalog a; push a FIRST v2; tags a v2
    """,
    "one of two repositories is emptied": """
        push a FIRST v1; push b FIRST v1; DELETE a manifests FIRST 202; tags a; tags b v1
        catalog a b
    """,
}
SITUATIONS = BLOBS | MANIFESTS | COMMANDS | LISTS


class Session:
    """Does the steps of a situation, and checks the statuses."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._registry = RegistryThread(ImageLayout(self._root))
        url = f"http://{self._registry.host}"
        self._server = RegistryClient(self._root, url, requests.Session())

    def do(self, step: str) -> None:
        verb, *words = step.split()
        steps: dict[str, Callable[..., None]] = {
            "push": self._push,
            "upload": self._upload,
            "mount": self._mount,
            "tags": self._tags,
            "catalog": self._catalog,
            "restart": self._restart,
            "tag": self._tag,
            "rm": self._remove,
            "collect": self._collect,
            "collect-all": self._collect_all,
            "collect-beside": self._collect_beside,
        }
        if verb in steps:
            steps[verb](*words)
        else:
            self._ask(verb, *words)

    def close(self) -> None:
        self._server.http.close()
        self._registry.close()

    def _ask(self, method: str, repository: str, kind: str, what: str, *rest: str) -> None:
        data, (status, *tags) = NAMED.get(what), rest
        target = (tags or [what if data is None else digest_of(data)])[0]
        if method == "PUT":
            assert data is not None
            media_type = OCI_INDEX if what == "LIST" else OCI_MANIFEST
            answer = self._server.put_manifest(data, target, repository, media_type)
        else:
            answer = self._server.ask(method, f"/v2/{repository}/{kind}/{target}")
        assert answer.status_code == int(status), answer.text
        if (method, status) == ("GET", "200") and data is not None:
            assert answer.content == data

    def _push(self, repository: str, what: str, tag: str) -> None:
        *blobs, raw = PUSHES[what]
        for blob in blobs:
            self._server.push_blob(blob, repository)
        assert self._server.put_manifest(raw, tag, repository).status_code == 201

    def _upload(self, repository: str, what: str) -> None:
        self._server.push_blob(NAMED[what], repository)

    def _mount(self, what: str, source: str, repository: str, status: str) -> None:
        query = f"mount={digest_of(NAMED[what])}" + ("" if source == "*" else f"&from={source}")
        answer = self._server.ask("POST", f"/v2/{repository}/blobs/uploads/?{query}")
        assert answer.status_code == int(status), answer.text

    def _tags(self, repository: str, *expected: str) -> None:
        answer = self._server.ask("GET", f"/v2/{repository}/tags/list")
        if expected == ("404",):
            assert (answer.status_code, answer.json()["errors"][0]["code"]) == (404, "NAME_UNKNOWN")
        else:
            assert (answer.status_code, answer.json()) == (
                200,
                {"name": repository, "tags": list(expected)},
            )

    def _catalog(self, *expected: str) -> None:
        answer = self._server.ask("GET", "/v2/_catalog")
        assert answer.json() == {"repositories": list(expected)}

    def _restart(self) -> None:
        self.close()
        self._begin()

    def _tag(self, tag: str, repository: str, into: str) -> None:
        layout = ImageLayout(self._root)
        content = layout.resolve(Reference(None, repository, tag))
        layout.tag(content, Reference.parse(into if ":" in into else f"{repository}:{into}"))

    def _remove(self, repository: str, tag: str) -> None:
        ImageLayout(self._root).untag(Reference(None, repository, tag))

    def _collect(self) -> None:
        """Collect after the leases of the server have ended."""
        self._restart()
        Collector(ImageLayout(self._root)).run()

    def _collect_all(self) -> None:
        self._restart()
        self._collect_beside()

    def _collect_beside(self) -> None:
        """Collect without a grace, while the server holds its leases."""
        Collector(ImageLayout(self._root), grace=0.0).run()


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(tmp_path: Path, situation: str) -> None:
    with contextlib.closing(Session(tmp_path / "store")) as session:
        for step in SITUATIONS[situation].replace("\n", ";").split(";"):
            if step.strip():
                session.do(step)


def test_deletions_survive_a_kill(serve_layout: Callable[..., Server], tmp_path: Path) -> None:
    server = serve_layout(tmp_path)
    raw = server.push("v1", OLD)
    paths = [
        f"/v2/a/b/{path}" for path in (f"manifests/{digest_of(raw)}", f"blobs/{digest_of(OLD)}")
    ]
    for path in paths:
        assert server.ask("DELETE", path).status_code == 202
    server.stop(signal.SIGKILL)
    again = serve_layout(tmp_path)
    assert [again.ask("GET", path).status_code for path in paths] == [404, 404]
    assert again.ask("GET", "/v2/a/b/tags/list").json()["tags"] == []
    assert again.ask("HEAD", f"/v2/a/b/blobs/{digest_of(EMPTY)}").status_code == 200


def test_two_servers_of_a_store_agree(tmp_path: Path) -> None:
    with (
        contextlib.closing(Session(tmp_path)) as first,
        contextlib.closing(Session(tmp_path)) as second,
    ):
        first.do("upload a OLD")
        second.do("GET a blobs OLD 200")
        second.do("push b FIRST v1")
        first.do("mount OLD b c 201")
        second.do("DELETE a blobs OLD 202")
        first.do("HEAD a blobs OLD 404")
        second.do("GET c blobs OLD 200")
        first.do("push b SECOND v1")
        second.do("GET b manifests FIRST 200")
        second.do("DELETE b manifests FIRST 202")
        first.do("GET b manifests FIRST 404")
        first.do("catalog b")


@pytest.mark.parametrize("raw", [None, b"", b"damaged"], ids=["missing", "empty", "damaged"])
@pytest.mark.parametrize("what", ["LIST", "SECOND"])
def test_a_damaged_manifest_hides_nothing_of_others(
    tmp_path: Path, what: str, raw: bytes | None
) -> None:
    """The blobs of the other one are known by its manifest only, as after a pull."""
    with contextlib.closing(Session(tmp_path)) as session:
        for step in ("push a FIRST v1", "push a SECOND v2", "PUT a manifests LIST 201 all"):
            session.do(step)
        shutil.rmtree(tmp_path / ".aimage/repositories")
        path = ImageLayout(tmp_path).find_path(Descriptor.of(OCI_MANIFEST, NAMED[what]))
        path.unlink()
        if raw is not None:
            path.write_bytes(raw)
        session.do("restart")
        for step in ("GET a blobs OLD 200", "GET a manifests FIRST 200", "DELETE a blobs OLD 405"):
            session.do(step)
        session.do("push a FIRST v3")
