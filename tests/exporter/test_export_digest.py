"""The digests of an export without its files are those of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.export import export
from clowder_aimage.exporter.digest import hash_stored_files
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from tests.abridged import abridge
from tests.importer.test_importer_experts import moe
from tests.importer.valued import as_dtype, make_valued
from tests.process import Aimage


@pytest.mark.parametrize("options", [(), ("--whole-files",), ("--quantize", "int8")])
@pytest.mark.parametrize("hash_type", ["sha256", "blake2b"])
def test_digests_are_those_of_the_exported_files(
    aimage: Callable[..., Aimage],
    tiny: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    hash_type: str,
) -> None:
    here, model = aimage(), tmp_path / "model"
    here("create", "x", abridge(tiny, tmp_path / "tiny"), "-q", *options)
    here("export", "x", model, "-q")
    layout, reference = ImageLayout(here.store), Reference.parse("x")
    found = hash_stored_files(layout, reference, layout.resolve(reference), hash_type)
    assert found == {
        str(path.relative_to(model)): hashlib.new(hash_type, path.read_bytes()).hexdigest()
        for path in model.rglob("*")
        if path.is_file()
    }


def test_packed_experts_are_hashed_in_the_order_of_the_file(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model", text_encoder=as_dtype(moe(), "BF16"))
    made, out = model.make(), tmp_path / "out"
    assert any(layer.name.endswith(".mlp.experts") for layer in made.aimage.layers)
    layout, reference = ImageLayout(model.store), Reference.parse("m")
    export(layout, reference, out)
    found = hash_stored_files(layout, reference, layout.resolve(reference))
    for name, digest in found.items():
        assert digest == hashlib.sha256((out / name).read_bytes()).hexdigest()
