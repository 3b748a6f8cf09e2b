"""Run the groups of the specification's conformance program on a served store.

Each group has its own repository, and all share one store, as in the program.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distribution import conformance
from tests.distribution.conformance import Client, Data, hash_of
from tests.distribution.served import Server


@pytest.fixture(scope="module")
def server(serve_layout: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Return a server of its own: the groups delete blobs that other tests' manifests refer to."""
    return serve_layout(tmp_path_factory.mktemp("conformance") / "store")


@pytest.fixture
def client(server: Server, request: pytest.FixtureRequest) -> Client:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name).strip("-")
    return Client(server.url, f"conformance/{name.replace('--', '-')}", http=server.http)


@pytest.mark.parametrize("name", conformance.SETS)
def test_data_sets_conform(client: Client, name: str) -> None:
    conformance.check_set(client, conformance.SETS[name]())


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_blob_uploads_conform(client: Client, algorithm: str) -> None:
    conformance.check_blobs(client, algorithm)


def test_bad_manifest_digest_is_refused(client: Client) -> None:
    conformance.check_bad_digest(client)


def test_invalid_digests_are_refused(client: Client) -> None:
    conformance.check_invalid_digest(client)


def test_unknown_repository_conforms(client: Client) -> None:
    conformance.check_nothing_yet(client)


@pytest.mark.integration
def test_three_runs_at_once_conform(server: Server) -> None:
    """They push and delete the same blobs, such as the empty config, in different repositories."""
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(conformance.check_all, server.url, f"run{number}/conformance")
            for number in range(3)
        ]
    for run in runs:
        run.result()


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_put_by_digest_accepts_tag_parameters(client: Client, algorithm: str) -> None:
    """PUT by digest with ``?tag=``, of the specification's next version."""
    data = Data(algorithm)
    digest = data.image()["digest"]
    for each, content in data.blobs.items():
        client.post_put(each, content)
    raw = data.manifests[digest]
    headers = {"Content-Type": conformance.MANIFEST}
    params = {"tag": ["one", "two"]}
    path = f"manifests/{digest}"
    answer = client.ask("PUT", path, 201, params=params, data=raw, headers=headers)
    assert answer.headers["OCI-Tag"] == "one, two"
    for tag in ("one", "two"):
        client.has_manifest(f"manifests/{tag}", digest, raw)
    bad = client.ask("PUT", path, 400, params={"tag": "-x"}, data=raw, headers=headers)
    assert bad.json()["errors"][0]["code"] == "MANIFEST_INVALID"
    assert client.tags() == ["one", "two"]


def test_upload_algorithm_is_checked(client: Client) -> None:
    """An upload may announce its algorithm; an unregistered one is refused at once."""
    params = {"digest-algorithm": "sha512"}
    location = client.ask("POST", "blobs/uploads/", 202, params=params).headers["Location"]
    digest = hash_of(b"x", "sha512")
    done = client.ask("PUT", location, 201, params={"digest": digest}, data=b"x")
    assert done.headers["Docker-Content-Digest"] == digest
    client.ask("POST", "blobs/uploads/", 400, params={"digest-algorithm": "md5"})
