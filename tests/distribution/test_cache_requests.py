"""Requests of a cache to its upstream: as many threads as are allowed, and no more."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.distribution import cache
from clowder_aimage.distribution.cache import PullThroughCache
from clowder_aimage.distribution.catalog import Catalog
from clowder_aimage.distribution.error import DistributionError
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest, Reference


class SlowUpstream:
    """An upstream that answers only once ``released`` is set."""

    host = "slow.example.com"

    def __init__(self) -> None:
        self.released = threading.Event()

    def fetch_manifest(self, _: Reference) -> Any:
        self.released.wait()
        raise NotFoundError("not found")

    def call(self, *_: Any) -> Any:
        return self.fetch_manifest(Reference.parse("x"))


def test_requests_beyond_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of clients that left are counted too, while their threads last."""
    monkeypatch.setattr(cache, "MAX_REQUESTS", 3)
    layout, upstream = ImageLayout(tmp_path), SlowUpstream()
    catalog = Catalog(layout, upstream.host)
    cached = PullThroughCache(layout, catalog, cast("Any", None), cast("Any", upstream))
    references = [Reference.parse(f"{upstream.host}/x:v{n}") for n in range(4)]

    async def main() -> tuple[list[str], list[str]]:
        asked = [asyncio.create_task(cached.fetch_manifest(each)) for each in references[:3]]
        while cached._upstream_requests < 3:
            await asyncio.sleep(0)
        for each in asked:
            each.cancel()
        refused = []
        for request in (
            cached.fetch_manifest(references[3]),
            cached.list_tags("x"),
            cached._fetch_size("x", Digest.of(b"x")),
        ):
            with pytest.raises(DistributionError) as raised:
                await request
            refused.append(str(raised.value.code))
        running = list(cached._resolving.values())
        upstream.released.set()
        ended = await asyncio.gather(*running, return_exceptions=True)
        with pytest.raises(DistributionError) as raised:
            await cached.fetch_manifest(references[3])
        return refused, [*(str(cast("Any", each).code) for each in ended), str(raised.value.code)]

    refused, ended = asyncio.run(main())
    assert refused == ["TOOMANYREQUESTS"] * 3
    assert ended == ["MANIFEST_UNKNOWN"] * 4
