"""Models in the settings of a worker that are not in its store."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.api.missing_model import MissingModel, find_missing
from clowder_aimage.api.service import Service, make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.engine.settings import Settings
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions

REMOTE = "registry.example.com/team/shapes:v1"


def build_service(path: Path, **settings: Any) -> Service:
    layout, raw = ImageLayout(path / "store"), b'{"schemaVersion": 2, "manifests": []}'
    manifest = Descriptor.of("application/vnd.oci.image.index.v1+json", raw)
    layout.push(manifest, build_bytes_body(raw))
    layout.tag(manifest, Reference.parse("shapes"))
    return make_service(Settings(**settings), layout, ClientOptions())


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, []),
        ({"default_model": "shapes", "enhancer": "shapes:latest"}, []),
        ({"default_model": "shape"}, [("default model", "shape:latest", "shapes:latest")]),
        ({"default_model": "zebra"}, [("default model", "zebra:latest", None)]),
        ({"enhancer": "shaped"}, [("enhancer", "shaped:latest", "shapes:latest")]),
        ({"aliases": {"gpt": "zebra"}}, [("alias gpt", "zebra:latest", None)]),
        ({"aliases": {"gpt": "shapes"}, "default_model": "gpt"}, []),
        ({"default_model": REMOTE}, []),
        ({"default_model": REMOTE, "pull": "never"}, [("default model", REMOTE, None)]),
    ],
)
def test_models_that_no_request_finds_are_listed(
    tmp_path: Path, settings: dict[str, Any], missing: list[tuple[str, str, str | None]]
) -> None:
    found = find_missing(build_service(tmp_path, **settings))
    assert found == [MissingModel(*facts) for facts in missing]


def test_a_worker_warns_of_them_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aimage.worker")
    service = build_service(tmp_path, default_model="shape")

    async def start() -> None:
        async with WorkerRole(service).running():
            pass

    asyncio.run(start())
    text = "the default model shape:latest is not in the store; did you mean shapes:latest?"
    assert [record.getMessage() for record in caplog.records] == [text]
