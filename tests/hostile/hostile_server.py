"""Registries for the hostile tests: one with given contents, and ours in this process."""

from __future__ import annotations

import http.client
from pathlib import Path

from clowder_aimage.layout import ImageLayout
from tests.hostile.hostile_world import digest_of
from tests.registry_app import RegistryThread
from tests.scripted import Answer, Script, Seen
from tests.scripted import serving as serving_blobs


def serving(manifest: bytes, *blobs: bytes) -> Script:
    """Return a script for a registry with one artifact, which accepts all uploads."""
    inner = serving_blobs(manifest, {digest_of(blob): blob for blob in blobs})

    def script(seen: Seen) -> Answer:
        if seen.method in ("POST", "PATCH"):
            return Answer(202, {"Location": "/v2/x/blobs/uploads/1"})
        return Answer(201) if seen.method == "PUT" else inner(seen)

    return script


class Ours(RegistryThread):
    """``registry serve`` on a thread, so that its file accesses are recorded."""

    def __init__(self, store: Path) -> None:
        super().__init__(ImageLayout(store))

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": kind} if kind else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
