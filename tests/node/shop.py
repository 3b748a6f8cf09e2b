"""Small models in a registry behind a proxy, with faults on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.node.nodes import noise, push_model
from tests.proxy import Passed, Proxy, Reply


class Shop:
    """A publisher of artifacts with ``size`` bytes per layer, derived from the layers' names.

    ``sizes`` are the bytes of all blobs, by the name of the artifact.
    """

    def __init__(self, home: Path, repository: str, proxy: Proxy, size: int = 100_000) -> None:
        self.home, self.repository, self.proxy, self.size = home, repository, proxy, size

    def publish(self, *layers: str, tag: str = "v1", size: int = 0) -> str:
        """Publish an artifact of these layers with a tag; return its name."""
        data = (noise(size or self.size, layer) for layer in layers)
        pushed = push_model(self.home, self.repository, *data, tag=tag)
        return str(replace(pushed, registry=self.proxy.host))

    def name(self, tag: str) -> str:
        """Return the name for a tag, which need not exist."""
        return f"{self.proxy.host}/{self.repository.partition('/')[2]}:{tag}"

    def digest(self, layer: str, size: int = 0) -> str:
        from clowder_aimage.oci import Digest

        return str(Digest.of(noise(size or self.size, layer)))

    # -- counters

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
        """Replace a blob's bytes from now on."""
        digest = self.digest(layer)

        def change(passed: Passed, reply: Reply) -> None:
            if digest in passed.path and passed.method == "GET" and reply.body:
                reply.body = bytes([reply.body[0] ^ 1]) + reply.body[1:]

        self.proxy.change = change

    def refuse(self, what: Callable[[Passed], bool], status: int = 503, **headers: str) -> None:
        """Make the registry fail on some requests."""
        self.proxy.instead = lambda passed: Reply(status, dict(headers)) if what(passed) else None

    def mend(self) -> None:
        """Remove all faults."""
        self.proxy.instead = self.proxy.change = None
        self.proxy.release()


def events(url: str, kinds: set[str] | None = None, after: str = "") -> list[dict[str, Any]]:
    """Return the events so far, as reported by the server."""
    import urllib.request

    headers = {"Last-Event-ID": after} if after else {}
    found: list[dict[str, Any]] = []
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/events", headers=headers), timeout=1
        ) as answer:
            kind = ""
            for raw in answer:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and (kinds is None or kind in kinds):
                    found.append({"kind": kind} | json.loads(line.removeprefix("data: ")))
    except TimeoutError:
        pass  # all available events were read
    return found
