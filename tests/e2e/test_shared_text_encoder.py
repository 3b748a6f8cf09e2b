"""Two families that have one text encoder: one copy in the store and on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.distribution.served import start
from tests.model.random_flux2 import write_flux2
from tests.process import Aimage
from tests.proxy import Proxy

pytestmark = pytest.mark.integration  # it starts a registry


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    """Return a proxy before this program's registry, which ends with the test."""
    server = start(tmp_path / "registry")
    with Proxy(server.url.partition("://")[2]).running() as running:
        yield running
    server.process.kill()
    server.process.communicate()
    server.http.close()
    server.log.close()


def blobs(here: Aimage) -> dict[str, int]:
    """Return the sizes of the blobs of a store."""
    files = (here.store / "blobs" / "sha256").iterdir()
    return {path.name: path.stat().st_size for path in files}


def test_a_second_family_brings_only_its_own_networks(
    aimage: Callable[..., Aimage], proxy: Proxy, tmp_path: Path
) -> None:
    write_flux2(tmp_path / "flux", text_encoder=TINY / "text_encoder")
    names = [f"{proxy.host}/models:{family}" for family in ("zimage", "flux")]
    here, there = aimage("here"), aimage("there")
    here("create", names[0], TINY)
    before = blobs(here)
    here("create", names[1], tmp_path / "flux")
    found = [read_aimage(ImageLayout(here.store), Reference.parse(name)) for name in names]
    encoders = [
        {layer.descriptor.digest.encoded for layer in one.aimage.list_layers("text_encoder")}
        for one in found
    ]
    assert len(encoders[0]) > 30 and encoders[0] == encoders[1]
    own = sum(size for digest, size in blobs(here).items() if digest not in before)
    own -= found[1].descriptor.size  # of the manifest, which is sent too

    here("push", names[0])
    since = len(proxy.seen)
    here("push", names[1])
    assert sum(one.received for one in proxy.seen[since:] if one.is_upload) == own
    there("pull", names[0])
    since = len(proxy.seen)
    there("pull", names[1])
    assert proxy.sent(since=since) == own
    assert blobs(there) == blobs(here)
