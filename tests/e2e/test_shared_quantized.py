"""A model and a variant with a quantized transformer: common blobs are stored and sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Reference
from tests.abridged import abridge
from tests.process import Aimage
from tests.real_registry import RealRegistry


@pytest.fixture
def here(aimage: Callable[..., Aimage], repository: str, tiny: Path, tmp_path: Path) -> Aimage:
    """Return the command line with both in its store: ``plain`` and ``small``."""
    run, model = aimage(), abridge(tiny, tmp_path / "model")
    run("create", f"{repository}:plain", model)
    run("create", f"{repository}:small", model, "--quantize", "int8")
    return run


def blobs_of(store: Path, name: str) -> dict[Any, Any]:
    """Return the layers' blobs by name."""
    aimage = read_aimage(ImageLayout(store), Reference.parse(name)).aimage
    return {layer.name: str(layer.descriptor.digest) for layer in aimage.layers}


@pytest.mark.integration
def test_shared_tensors_are_stored_and_sent_once(
    here: Aimage, aimage: Callable[..., Aimage], repository: str, registry: RealRegistry
) -> None:
    plain, small = (blobs_of(here.store, f"{repository}:{tag}") for tag in ("plain", "small"))
    changed = {name for name in plain if plain[name] != small[name]}
    assert changed
    assert all(name.startswith("transformer/") for name in changed)
    files = list((here.store / "blobs" / "sha256").iterdir())
    # And configs and manifests, and the statement of the derivation: its config, text and manifest
    assert len(files) == len({*plain.values(), *small.values()}) + 4 + 3
    mark = registry.mark()
    here("push", f"{repository}:plain")
    assert registry.count(mark, repository)["PUT blob"] == len(set(plain.values())) + 1
    mark = registry.mark()
    here("push", f"{repository}:small")
    new = {*small.values()} - {*plain.values()}
    sent = registry.count(mark, repository)
    assert sent["PUT blob"] == len(new) + 1 + 2  # and the config, and the statement
    assert sent["PATCH blob"] == 0
    there = aimage("there")
    there("pull", f"{repository}:plain")
    mark = registry.mark()
    there("pull", f"{repository}:small")
    assert registry.count(mark, repository)["GET blob"] == len(new) + 1
    assert blobs_of(there.store, f"{repository}:small") == small
