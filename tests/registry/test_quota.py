"""A push and a pull of many small blobs with a registry that limits requests, in real time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quota
from clowder_aimage.content.copy import copy
from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.registry import ClientOptions, Repository
from tests.memory_store import MemoryStore

# Requests per second, and blobs: each of their pushes needs three requests
RATE, BLOBS = 50, 60


def make_store(name: Reference) -> MemoryStore:
    """Return a store with an artifact of small blobs."""
    store, blobs = MemoryStore(), [b"{}", *(b"%d" % number for number in range(BLOBS))]
    contents = [Descriptor.of("application/vnd.example.blob", blob) for blob in blobs]
    for content, blob in zip(contents, blobs, strict=True):
        store.push(content, build_bytes_body(blob))
    config, *layers = [content.to_json() for content in contents]
    document = {"schemaVersion": 2, "mediaType": mediatype.OCI_MANIFEST, "config": config}
    raw = json.dumps(document | {"layers": layers}).encode()
    store.push(Descriptor.of(mediatype.OCI_MANIFEST, raw), build_bytes_body(raw), name)
    return store


@pytest.mark.integration
@pytest.mark.parametrize("kind", quota.QUOTAS)
def test_a_transfer_succeeds_with_a_quota(kind: str, tmp_path: Path) -> None:
    with quota.running() as registry:
        registry.start(quota.QUOTAS[kind](RATE))
        name = Reference.parse(f"{registry.host}/team/x:v1")
        store, received = make_store(name), MemoryStore()
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            root = copy(store, name, repository)
        with Repository(name, ClientOptions(docker_config=tmp_path)) as repository:
            assert copy(repository, name, received) == root
    assert received.resolve(name) == root
    assert 0 < registry.refused < registry.accepted
