"""Lists of models: one that nobody can describe is left out or bare, and the others are shown."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from clowder_aimage.api import model_list
from clowder_aimage.api.model_catalog import ModelCatalog
from clowder_aimage.api.model_description import ModelDescriptions
from clowder_aimage.api.ollama.routes import _describe_entry, _describe_model
from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.adapter_source import AdapterFinder
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype

GOOD = {"schemaVersion": 1, "family": "flux2", "components": {}, "parameters": 6_150_000_000}
NUMBERS = (
    "1" + "0" * 400,
    "1" + "0" * 300,
    str(1 << 60),
    "-5",
    "1e308",
    "null",
    "true",
    '"x"',
    "[]",
)
PLACES = {
    "parameters": '{"schemaVersion":1,"family":"z-image","components":{},"parameters":%s}',
    "created": '{"schemaVersion":1,"family":"z-image","components":{},"created":%s}',
    "components": '{"schemaVersion":1,"components":%s}',
    "defaults": '{"schemaVersion":1,"components":{},"defaults":%s}',
    "guidance": '{"schemaVersion":1,"components":{},"defaults":{"guidance":%s}}',
    "quantization": '{"schemaVersion":1,"components":{"vae":{"quantization":%s}}}',
}
CONFIGS = {
    f"{place}-{i}": form % n for place, form in PLACES.items() for i, n in enumerate(NUMBERS)
}


def keep(layout: ImageLayout, name: str, config: bytes) -> None:
    """Store an AImage without layers, with any bytes as its config."""
    value = json.loads(DIALECTS["clowder"].write(AImage(json.dumps(GOOD).encode(), ()))[0].raw)
    value["config"] = Descriptor.of(mediatype.AIMAGE_CONFIG, config).to_json()
    manifest = Manifest.build(value)
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse(name))


@pytest.fixture
def layout(tmp_path: Path) -> ImageLayout:
    made = ImageLayout(tmp_path / "store")
    with made.begin_batch():
        for name, config in CONFIGS.items():
            keep(made, name, config.encode())
        keep(made, "good", json.dumps(GOOD).encode())
    return made


def build_service(layout: ImageLayout) -> Any:
    return SimpleNamespace(
        store=layout,
        settings=SimpleNamespace(aliases={}),
        adapters=AdapterFinder(layout, lambda _: pytest.fail("a file")),
        descriptions=ModelDescriptions(layout),
        resolve_reference=Reference.parse,
    )


def test_any_number_in_a_config_can_be_listed(
    layout: ImageLayout, caplog: pytest.LogCaptureFixture
) -> None:
    items, service = model_list.list_entries(layout), build_service(layout)
    listed = model_list.describe_all(items, partial(_describe_entry, service))
    assert [one["name"] for one in listed] == sorted(f"{n}:latest" for n in (*CONFIGS, "good"))
    sizes = {one["name"]: one["details"]["parameter_size"] for one in listed}
    assert sizes["good:latest"] == "6.2B"
    assert {size for name, size in sizes.items() if "good" not in name} <= {""}
    assert len(model_list.describe_all(items, partial(_describe_model, service))) == len(items)
    assert caplog.records == []
    json.dumps(listed, allow_nan=False)


def test_the_catalog_leaves_out_what_is_not_valid(layout: ImageLayout) -> None:
    names = [model["id"] for model in ModelCatalog(build_service(layout)).list_all()]
    assert "good:latest" in names
    assert not any(name.startswith("parameters") for name in names)


def test_a_model_that_cannot_be_described_is_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    assert model_list.describe_all([1, 0, 2], lambda n: 10 // n) == [10, 5]
    (record,) = caplog.records
    assert record.getMessage() == "a model was left out of a list"
    assert vars(record)["model"] == "0" and "ZeroDivisionError" in vars(record)["reason"]
