"""A store with the small model, and files of other tools for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.importer import PackedModel
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.family import foreign_layout

TINY = Reference.parse("tiny")


@dataclass
class FamilyStore:
    """A store with the small model as ``tiny``, and directories of each layout."""

    root: Path
    tiny: PackedModel

    @property
    def store(self) -> ImageLayout:
        return ImageLayout(self.root / "store")

    def path(self, layout: str) -> Path:
        """Return the small model in a layout, written once."""
        place = self.root / layout
        if not place.exists():
            place.mkdir()
            foreign_layout.LAYOUTS[layout](place)
        return place

    def create(self, name: str, path: Path, like: Reference | None = TINY) -> PackedModel:
        return create(self.store, Reference.parse(name), path, like=like)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyStore:
    root = tmp_path_factory.mktemp("family")
    store = ImageLayout(root / "store")
    return FamilyStore(root, create(store, TINY, foreign_layout.TINY))


def digests(model: PackedModel) -> dict[str, Any]:
    """Return the digests of the layers by name, without the model card."""
    layers = {layer.name: layer.descriptor.digest for layer in model.aimage.layers}
    return {name: digest for name, digest in layers.items() if name != "README.md"}
