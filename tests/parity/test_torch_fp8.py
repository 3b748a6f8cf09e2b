"""Pictures of the shapes model computed in fp8 with PyTorch, from floats and from stored codes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.adapter.adapter import Adapter, DenseChange, LowRank
from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.create import create
from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.library_choice import TorchTuning, parse_backend, parse_compute
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.oci import Reference
from tests.model.model_blobs import import_directory
from tests.parity.compare import made

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.parity.make_flux2 import make_flux2

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "model"
REQUEST = GenerateRequest.of("a red circle", width=32, height=32, steps=2, seed=3)
# With rows that are a multiple of 32, which most seeds do not draw
FLUX2_SEED = 624
NAME = "transformer/layers.1.attention.to_q.weight"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageLayout:
    """Return a store with the shapes model as it is, in fp8 and in int8."""
    layout = ImageLayout(tmp_path_factory.mktemp("store"))
    for quantize in (None, "fp8", "int8", "mxfp8"):
        name = Reference.parse(f"shapes:{quantize or 'plain'}")
        create(layout, name, SHAPES, recipe=Recipe.parse(quantize=quantize, dtype="bf16"))
    return layout


def load(store: ImageLayout, tag: str, compute: str | None = "fp8", **options: Any) -> Any:
    aimage = read_aimage(store, Reference.parse(f"shapes:{tag}")).aimage
    tuning = TorchTuning(compute=compute, device="cpu", **options)
    return load_pipeline(store, aimage, backend="torch", dtype="float32", tuning=tuning)


def latents(pipeline: Any) -> np.ndarray:
    states, _ = made(pipeline, REQUEST, None)
    return states[-1]


def correlate(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def list_matrices(pipeline: Any) -> list[str]:
    from clowder_aimage.model.torch.row_scaled import RowScaledTensor

    parameters = pipeline.networks.transformer.get().module.named_parameters()
    return [name for name, value in parameters if isinstance(value, RowScaledTensor)]


def test_floats_and_stored_codes_make_the_same_picture(store: ImageLayout) -> None:
    plain, coded = load(store, "plain"), load(store, "fp8")
    exact = load(store, "plain", None)
    found = latents(plain)
    assert np.array_equal(found, latents(coded))
    assert 0.99 < correlate(found, latents(exact)) < 1
    aimage = read_aimage(store, Reference.parse("shapes:fp8")).aimage
    stored = {layer.name for layer in aimage.layers if layer.dtype == "mxfp8"}
    for pipeline in (plain, coded):
        sanitize = pipeline.networks.transformer.get().sanitize
        names = {sanitize(name.removeprefix("transformer/")) for name in stored}
        assert {*list_matrices(pipeline)} == names
    assert len(stored) == 21


def test_a_picture_states_that_it_was_computed_so(store: ImageLayout) -> None:
    library = load(store, "plain").library
    assert library.describe().endswith(" cpu, fp8")
    assert parse_compute(library.describe()) == "fp8"
    assert parse_compute("torch 2.13.0 cuda (NVIDIA H100 80GB HBM3)") is None
    assert parse_backend(library.describe()) == "torch"
    assert not library.can_offload({"BF16"})


def test_matrices_take_a_byte_for_a_value(store: ImageLayout) -> None:
    coded, exact = (load(store, "plain", compute) for compute in ("fp8", None))
    sizes = [one.networks.transformer.size for one in (coded, exact)]
    modules = exact.networks.transformer.get().module
    count = sum(modules.get_parameter(name).numel() for name in list_matrices(coded))
    assert sizes[1] - sizes[0] == 3 * count > 0


def test_weights_that_are_read_from_files_are_not_kept_on_the_host(store: ImageLayout) -> None:
    coded, exact = load(store, "plain"), load(store, "plain", None)
    layer = NAME.rpartition("/")[2]
    for pipeline, is_kept in ((coded, False), (exact, True)):
        pipeline.library.host_room = 1 << 30
        pipeline.networks.transformer.keep(lambda: False)
        weights, host = pipeline.networks.weights["transformer"], pipeline.library.host
        (values,) = weights.find(layer).ranges
        assert (host.find(values) is not None) == is_kept and host.size


@pytest.mark.parametrize("tag", ["int8", "mxfp8"])
def test_other_codes_are_refused(store: ImageLayout, tag: str) -> None:
    with pytest.raises(ModelError, match=f"cannot be computed in fp8: it is {tag} with a") as none:
        latents(load(store, tag))
    assert "float or fp8 weights" in str(none.value.hint)
    assert latents(load(store, tag, None)).size


def test_values_that_are_not_finite_are_refused(
    store: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clowder_aimage.model.weights import ModelWeights

    real = ModelWeights.read_torch

    def spoil(self: Any, name: str) -> Any:
        values = real(self, name)
        return values * np.nan if f"transformer/{name}" == NAME else values

    monkeypatch.setattr(ModelWeights, "read_torch", spoil)
    with pytest.raises(ModelError, match="has values that are NaN or infinite"):
        latents(load(store, "plain"))


@pytest.mark.parametrize("kind", ["low rank", "dense"])
def test_adapters_change_them(store: ImageLayout, kind: str) -> None:
    """As they change the dequantized matrices, and without a trace afterwards."""
    coded, exact = load(store, "fp8"), load(store, "fp8", None)
    rows, columns = coded.shapes[NAME]
    values = np.random.default_rng(1)
    down = values.standard_normal((2, columns)).astype(np.float32)
    up = values.standard_normal((rows, 2)).astype(np.float32)
    change = LowRank(down, up, 1.0) if kind == "low rank" else DenseChange(up @ down)
    before = latents(coded)
    for one in (coded, exact):
        one.use_adapters([(LoadedAdapter("a", Adapter("a", {NAME: (change,)})), 1.0)])
    changed = latents(coded)
    assert correlate(changed, latents(exact)) > 0.99
    assert correlate(changed, before) < 0.98
    coded.use_adapters([])
    assert np.array_equal(latents(coded), before)


def test_flux2_has_matrices_of_both_kinds_of_blocks(tmp_path: Path) -> None:
    """Between the first and the last block; the seed draws 64 channels and five blocks."""
    make_flux2(tmp_path / "files", FLUX2_SEED, is_distilled=True)
    stored = import_directory(tmp_path / "files", tmp_path / "blobs")
    coded, exact = (
        load_pipeline(*stored, backend="torch", dtype="float32", tuning=TorchTuning(compute=one))
        for one in ("fp8", None)
    )
    found = latents(coded)
    assert 0.99 < correlate(found, latents(exact)) < 1
    matrices = list_matrices(coded)
    assert {name.split(".attn")[0].split(".ff")[0] for name in matrices} == {
        *("transformer_blocks.1", "single_transformer_blocks.0", "single_transformer_blocks.1")
    }
