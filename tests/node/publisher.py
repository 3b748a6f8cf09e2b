"""A publisher of small models in a registry behind a proxy that can inject faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest, Reference
from tests.node.nodes import noise, push_model
from tests.proxy import Passed, Proxy, Reply


class Publisher:
    """Publish artifacts with ``size`` bytes a layer, generated from the names of the layers.

    Names of artifacts contain the address of the proxy.
    """

    def __init__(self, home: Path, repository: str, proxy: Proxy, size: int = 100_000) -> None:
        self.home, self.repository, self.proxy, self.size = home, repository, proxy, size

    def publish(self, *layers: str, tag: str = "v1", size: int = 0) -> str:
        """Push an artifact of these layers under a tag, and return its name."""
        data = (noise(size or self.size, layer) for layer in layers)
        pushed = push_model(self.home, self.repository, *data, tag=tag)
        return str(replace(pushed, registry=self.proxy.host))

    def name(self, tag: str) -> str:
        """Return the name of a tag, which may not exist yet."""
        return f"{self.proxy.host}/{self.repository.partition('/')[2]}:{tag}"

    def pushed(self, name: str) -> str:
        """Return the digest of the version that was published last under a name."""
        host = self.repository.partition("/")[0]
        reference = replace(Reference.parse(name), registry=host)
        return str(ImageLayout(self.home / "pushed").resolve(reference).digest)

    def digest(self, layer: str, size: int = 0) -> str:
        """Return the digest of a layer."""
        return str(Digest.of(noise(size or self.size, layer)))

    # -- requests

    def blobs(self, since: int = 0) -> int:
        """Return the number of requests for blobs."""
        return sum("/blobs/" in each.path for each in list(self.proxy.seen[since:]))

    def manifests(self, tag: str = "", since: int = 0) -> int:
        """Return the number of requests for manifests."""
        end = f"/manifests/{tag}"
        return sum(
            "/manifests/" in each.path and (not tag or each.path.endswith(end))
            for each in list(self.proxy.seen[since:])
        )

    # -- faults

    def spoil(self, layer: str) -> None:
        """Corrupt a blob in responses from now on."""
        digest = self.digest(layer)

        def change(passed: Passed, reply: Reply) -> None:
            if digest in passed.path and passed.method == "GET" and reply.body:
                reply.body = bytes([reply.body[0] ^ 1]) + reply.body[1:]

        self.proxy.change = change

    def refuse(self, what: Callable[[Passed], bool], status: int = 503, **headers: str) -> None:
        """Make the registry fail for some requests."""
        self.proxy.instead = lambda passed: Reply(status, dict(headers)) if what(passed) else None

    def mend(self) -> None:
        """Remove all faults."""
        self.proxy.instead = self.proxy.change = None
        self.proxy.release()


def events(url: str, kinds: set[str] | None = None, after: str = "") -> list[dict[str, Any]]:
    """Return the events of a server so far."""
    import urllib.request

    headers = {"Last-Event-ID": after} if after else {}
    found: list[dict[str, Any]] = []
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/events", headers=headers), timeout=3
        ) as answer:
            kind = ""
            for raw in answer:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and (kinds is None or kind in kinds):
                    found.append({"kind": kind} | json.loads(line.removeprefix("data: ")))
    except TimeoutError:
        pass  # there are no more events
    return found
