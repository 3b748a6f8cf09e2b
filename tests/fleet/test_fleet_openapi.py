"""The OpenAPI document of a gateway, compared with its responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.fleet_run import Nats
from tests.process import Aimage
from tests.store import copy_store
from tests.worker.conftest import begin
from tests.worker.test_openapi import explore, tokens

pytestmark = pytest.mark.integration


def test_a_gateway_is_as_its_document_says(nats: Nats, tiny_store: Path, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    copy_store(tiny_store, tmp_path / "store")
    here, fleet = Aimage(tmp_path, tmp_path / "store"), ("--fleet", "described")
    here("fleet", "init", "--nats", nats.url, *fleet)
    worker = begin(here, "--join", nats.url, *fleet, "--default-model", "tiny")
    known = ("--token-file", tokens(tmp_path))
    gateway = begin(here, "--nats", nats.url, *fleet, *known, verb="gateway")
    try:
        explore(gateway.url, tmp_path, first=10, every=40, examples=1)
    finally:
        gateway.end()
        worker.end()
    assert " internal error " not in "".join((*gateway.lines, *worker.lines))
