"""Names of one component at Docker Hub and ollama's registry, as docker and ollama read them.

Sources: distribution/reference, "Familiar names"; a report of ocm (#1947).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.mount import list_sibling_repositories
from clowder_aimage.registry.session import Session
from tests.process import Aimage
from tests.scripted import ScriptedRegistry, artifact, serving

# name: host and repository that are requested
REQUESTED = {
    "docker.io/alpine": "registry-1.docker.io/v2/library/alpine",
    "index.docker.io/alpine": "registry-1.docker.io/v2/library/alpine",
    "registry-1.docker.io/alpine": "registry-1.docker.io/v2/library/alpine",
    "docker.io/library/alpine": "registry-1.docker.io/v2/library/alpine",
    "docker.io/team/model": "registry-1.docker.io/v2/team/model",
    "registry.ollama.ai/llama3.2": "registry.ollama.ai/v2/library/llama3.2",
    "registry.ollama.ai/team/llama3.2": "registry.ollama.ai/v2/team/llama3.2",
    "quay.io/alpine": "quay.io/v2/alpine",
    "localhost:5000/alpine": "localhost:5000/v2/alpine",
}


@pytest.mark.parametrize("name", REQUESTED)
def test_a_short_name_is_below_the_library(name: str, tmp_path: Path) -> None:
    with Session(Reference.parse(name), ClientOptions(docker_config=tmp_path)) as session:
        url = session.build_url("tags/list")
    assert url.partition("://")[2] == f"{REQUESTED[name]}/tags/list"


def test_blobs_are_mounted_from_the_library() -> None:
    target = Reference.parse("docker.io/team/model")
    manifest = Descriptor.of(mediatype.OCI_MANIFEST, b"{}")
    assert list_sibling_repositories([("docker.io/base:v1", manifest)], target) == [
        ("library/base", manifest)
    ]


def test_the_name_in_the_store_is_as_typed(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    with ScriptedRegistry(serving(*artifact(b"{}", b"weights"))).running() as hub:
        here.environment |= {"http_proxy": f"http://{hub.host}", "no_proxy": "", "NO_PROXY": ""}
        here("pull", "-q", "docker.io/alpine", "--plain-http")
        assert "docker.io/alpine:latest" in here("ls").out
        paths = {seen.path.partition("/v2/")[2].rpartition("/")[0] for seen in hub.seen}
    assert paths == {"library/alpine/manifests", "library/alpine/blobs"}
