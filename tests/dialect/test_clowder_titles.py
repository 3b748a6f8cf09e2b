"""Titles of layers: the files that other clients write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from clowder_aimage.oci import mediatype
from tests.process import Aimage


def titles(here: Aimage, digest: str) -> dict[str, str | None]:
    """Return the title of each layer by its name."""
    raw = (here.store / "blobs" / "sha256" / digest.partition(":")[2]).read_bytes()
    layers = json.loads(raw)["layers"]
    return {
        layer["annotations"][mediatype.NAME]: layer["annotations"].get(mediatype.TITLE)
        for layer in layers
    }


def test_layers_have_titles_in_an_aimage_of_files_only(
    aimage: Callable[[], Aimage], tiny: Path
) -> None:
    here = aimage()
    files = titles(here, here("create", "-q", "files", tiny, "--whole-files").line)
    assert "transformer/config.json" in files and "model_index.json" in files
    assert all(title == name for name, title in files.items())
    tensors = titles(here, here("create", "-q", "tensors", tiny).line)
    assert "model_index.json" in tensors and not any(tensors.values())


def test_a_compressed_file_has_no_title(aimage: Callable[[], Aimage], tmp_path: Path) -> None:
    here, model = aimage(), tmp_path / "model"
    model.mkdir()
    (model / "a.bin").write_bytes(bytes(100_000))
    packed = here("create", "-q", "x", model, "--whole-files", "--compress", "gzip").line
    assert titles(here, packed) == {"a.bin": None}
