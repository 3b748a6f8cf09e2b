"""Adapters beside the weights: the same latents as with changed weights, in any combination."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import (
    Adapter,
    Change,
    Decomposed,
    DenseChange,
    Hadamard,
    Kronecker,
    LowRank,
    Norm,
    Replacement,
)
from clowder_aimage.adapter.loaded_adapter import AdapterCache, LoadedAdapter
from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model import adaptation
from clowder_aimage.model.adapted_linear import AdaptedLinear
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.loader import load_pipeline
from tests.model.denoise import denoise
from tests.model.model_blobs import FolderStore
from tests.model.random_model import pack, weights

REQUEST = GenerateRequest.of("a red fox", width=64, height=64, steps=3, seed=42)
# correlations of latents with those of the changed float32 weights, at least
BOUNDS = {"int8": 0.999, "int4": 0.97, "bfloat16": 0.999}
Make = Callable[[np.random.Generator, tuple[int, ...]], Change]
Changes = Mapping[str, tuple[Change, ...]]


def low_rank(random: np.random.Generator, shape: tuple[int, ...], rank: int = 4) -> LowRank:
    down = random.standard_normal((rank, shape[1])) / np.sqrt(shape[1])
    up = random.standard_normal((shape[0], rank)) * 0.4
    return LowRank(down.astype(np.float32), up.astype(np.float32), 0.5)


def unscaled(random: np.random.Generator, shape: tuple[int, ...], rank: int = 3) -> LowRank:
    pair = low_rank(random, shape, rank)
    return LowRank(pair.down, pair.up)


def matrix(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (random.standard_normal(shape) * 0.3 / np.sqrt(shape[-1])).astype(np.float32)


def kronecker(random: np.random.Generator, shape: tuple[int, ...]) -> Kronecker:
    first, second = (4, 2), (shape[0] // 4, shape[1] // 2)
    return Kronecker(matrix(random, first), unscaled(random, second), 0.7)


def rows_of_qkv(random: np.random.Generator, shape: tuple[int, ...]) -> Kronecker:
    """Return the second third of a product that changes q, k and v together."""
    whole = Kronecker(matrix(random, (4, 2)), matrix(random, (3 * shape[0] // 4, shape[1] // 2)))
    return whole.slice_rows(shape[0], 2 * shape[0])


def decomposed(norm: Norm) -> Make:
    def make(random: np.random.Generator, shape: tuple[int, ...]) -> Change:
        size = shape[1] if norm is Norm.COLUMNS else shape[0]
        magnitude = 0.5 + random.random(size)
        parts = (low_rank(random, shape), DenseChange(matrix(random, shape)))
        return Decomposed(parts, magnitude.astype(np.float32), norm)

    return make


KINDS: dict[str, Make] = {
    "lora": low_rank,
    "loha": lambda random, shape: Hadamard(unscaled(random, shape), unscaled(random, shape), 0.5),
    "loha of a high rank": lambda random, shape: Hadamard(
        unscaled(random, shape, 9), unscaled(random, shape, 9), 0.5
    ),
    "lokr": kronecker,
    "rows of lokr": rows_of_qkv,
    "difference": lambda random, shape: DenseChange(matrix(random, shape)),
    "replacement": lambda random, shape: Replacement(matrix(random, shape) * 3),
    "dora of peft": decomposed(Norm.CHANGED),
    "dora of kohya, rows": decomposed(Norm.ROWS),
    "dora of kohya, columns": decomposed(Norm.COLUMNS),
}
MATRICES = (
    "transformer/layers.0.attention.to_q.weight",
    "transformer/layers.0.attention.to_out.0.weight",
    "transformer/layers.0.adaLN_modulation.0.weight",
    "transformer/noise_refiner.0.attention.to_v.weight",
    "transformer/context_refiner.0.attention.to_v.weight",
    "transformer/all_x_embedder.2-1.weight",
    "transformer/all_final_layer.2-1.linear.weight",
    "transformer/cap_embedder.1.weight",
    "transformer/t_embedder.mlp.0.weight",
    "text_encoder/layers.0.self_attn.q_proj.weight",
    "text_encoder/layers.0.mlp.down_proj.weight",
)
VECTORS = (
    "transformer/layers.0.attention_norm1.weight",
    "transformer/layers.0.attention.norm_q.weight",
    "transformer/layers.0.adaLN_modulation.0.bias",
    "transformer/cap_embedder.0.weight",
    "transformer/x_pad_token",
    "text_encoder/layers.0.input_layernorm.weight",
)


def shapes() -> dict[str, tuple[int, ...]]:
    parts = ("transformer", "text_encoder")
    return {f"{part}/{name}": a.shape for part in parts for name, a in weights(part).items()}


def make(kind: str, seed: int = 7) -> Adapter:
    random, known = np.random.default_rng(seed), shapes()
    return Adapter(kind, {name: (KINDS[kind](random, known[name]),) for name in MATRICES})


def vectors() -> Adapter:
    random, known = np.random.default_rng(5), shapes()
    changes: dict[str, tuple[Change, ...]] = {}
    for index, name in enumerate(VECTORS):
        values = random.standard_normal(known[name]).astype(np.float32) * np.float32(0.3)
        changes[name] = (Replacement(values) if index % 2 else DenseChange(values),)
    new = "transformer/layers.0.attention.to_q.bias"  # which the base does not have
    changes[new] = (DenseChange(matrix(random, (128,))),)
    return Adapter("vectors", changes)


class Models:
    """The random model and its pipelines; one store."""

    def __init__(self, store: FolderStore) -> None:
        self.store = store
        self.base = self.load()
        self.plain = latents(self.base)

    def load(
        self,
        uses: list[tuple[Adapter, float]] | None = None,
        kind: str = "",
        dtype: str = "float32",
    ) -> FlowPipeline:
        """Load it with ``uses`` added to the weights."""

        def change(name: str, values: np.ndarray) -> np.ndarray:
            found = [(one, t) for adapter, t in uses or () for one in adapter.changes.get(name, ())]
            return dense.apply_changes(values, found) if found else values

        quantized = dict.fromkeys(("transformer", "text_encoder"), kind) if kind else {}
        aimage = pack(self.store, quantized, change=change)
        return load_pipeline(self.store, aimage, dtype=dtype, keep_quantized=bool(kind))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(FolderStore(tmp_path_factory.mktemp("blobs")))


def latents(pipeline: FlowPipeline, *uses: tuple[Adapter, float]) -> np.ndarray:
    pipeline.use_adapters([(LoadedAdapter(one.label, one), strength) for one, strength in uses])
    noise = pipeline.denoiser.draw_noise(REQUEST, REQUEST.sampling.seed)
    guide = pipeline.build_conditioning(REQUEST)
    *_, final = denoise(pipeline, noise, pipeline.schedule(REQUEST), guide)
    pipeline.state.captions.clear()
    return np.array(final)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= 1e-5 * max(1, scale)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_equals_changed_weights(models: Models, kind: str, strength: float = -0.6) -> None:
    adapter, plain = make(kind), models.plain
    found = latents(models.base, (adapter, strength))
    assert_same(found, latents(models.load([(adapter, strength)])))
    assert np.abs(found - plain).max() > 0.01
    assert (latents(models.base) == plain).all()  # undone


def test_norms_biases_and_new_biases(models: Models) -> None:
    adapter, plain = vectors(), models.plain
    known = {name: changes for name, changes in adapter.changes.items() if name in shapes()}
    smaller = Adapter("known", known)
    for strength in (1.0, 0.4):
        found = latents(models.base, (smaller, strength))
        assert_same(found, latents(models.load([(smaller, strength)])))
    with_new = latents(models.base, (adapter, 1.0))
    assert np.abs(with_new - latents(models.base, (smaller, 1.0))).max() > 1e-4
    assert (latents(models.base) == plain).all()


@pytest.mark.parametrize(
    "kinds", [("lora", "lokr"), ("lora", "dora of peft", "loha"), ("lora",) * 3]
)
def test_several_adapters_are_added(models: Models, kinds: tuple[str, ...]) -> None:
    strengths = (0.8, -0.5, 1.7)
    uses = [(make(kind, seed), strengths[seed]) for seed, kind in enumerate(kinds)]
    uses.append((vectors(), 0.5))
    del uses[-1][0].changes["transformer/layers.0.attention.to_q.bias"]  # type: ignore[attr-defined]
    expected = latents(models.load(uses))
    assert_same(latents(models.base, *uses), expected)
    assert_same(latents(models.base, *reversed(uses)), expected)


@pytest.mark.parametrize(
    ("base", "kinds"),
    [
        ("int8", ("lora", "lokr")),
        ("int4", ("dora of peft", "dora of kohya, columns")),
        ("bfloat16", ("lora", "dora of peft")),
    ],
)
def test_bases_of_other_types(models: Models, base: str, kinds: tuple[str, ...]) -> None:
    uses = [(make(kind, seed), (0.7, -0.4)[seed]) for seed, kind in enumerate(kinds)]
    expected = latents(models.load(uses))
    kind, dtype = ("", base) if base == "bfloat16" else (base, "float32")
    pipeline = models.load(kind=kind, dtype=dtype)
    plain = latents(pipeline)
    found = latents(pipeline, *uses)
    assert correlation(found, expected) >= BOUNDS[base]
    assert correlation(plain, expected) < BOUNDS[base]  # without the adapters it is another one
    assert (latents(pipeline) == plain).all()


def test_a_network_that_is_loaded_again_has_its_adapters(models: Models) -> None:
    pipeline, adapter = models.load(), make("lora")
    expected = latents(pipeline, (adapter, 1.0))
    uses = [(LoadedAdapter("a", adapter), 1.0)]
    pipeline.use_adapters(uses)
    pipeline.networks.transformer.release()
    pipeline.networks.text_encoder.release()
    noise = pipeline.denoiser.draw_noise(REQUEST, REQUEST.sampling.seed)
    guide = pipeline.build_conditioning(REQUEST)
    *_, final = denoise(pipeline, noise, pipeline.schedule(REQUEST), guide)
    assert (np.array(final) == expected).all()


def test_a_released_network_is_not_kept_by_its_adapters(models: Models) -> None:
    pipeline = models.load()
    latents(pipeline, (make("lora"), 1.0))
    gc.collect()
    before = mx.get_active_memory()
    pipeline.networks.transformer.release()
    gc.collect()
    assert before - mx.get_active_memory() > 0.9 * pipeline.networks.transformer.size


def test_captions_are_cached_for_the_adapters_that_change_them(models: Models) -> None:
    pipeline, known = models.load(), shapes()
    random = np.random.default_rng(3)
    outside, inside = MATRICES[0], MATRICES[4]
    other = LoadedAdapter("o", Adapter("o", {outside: (low_rank(random, known[outside]),)}))
    caption = LoadedAdapter("c", Adapter("c", {inside: (low_rank(random, known[inside]),)}))
    plain = pipeline.build_conditioning(REQUEST).positive
    pipeline.use_adapters([(other, 1.0)])
    assert pipeline.build_conditioning(REQUEST).positive is plain
    pipeline.use_adapters([(other, 1.0), (caption, 0.5)])
    changed = pipeline.build_conditioning(REQUEST).positive
    assert changed is not plain
    pipeline.use_adapters([(caption, 0.5)])
    assert pipeline.build_conditioning(REQUEST).positive is changed
    pipeline.use_adapters([(caption, 0.6)])
    assert pipeline.build_conditioning(REQUEST).positive is not changed
    pipeline.use_adapters([(caption, 0.0)])
    assert pipeline.build_conditioning(REQUEST).positive is plain


def test_another_strength_prepares_nothing_again(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, adapter = models.load(), LoadedAdapter("a", make("dora of peft"))
    pipeline.use_adapters([(adapter, 1.0)])
    module = pipeline.networks.transformer.get()
    layer = module.layers[0].attention.to_q
    assert isinstance(layer, AdaptedLinear)
    prepared = list[object]()
    monkeypatch.setattr(adaptation, "prepare", prepared.append)
    pipeline.use_adapters([(adapter, 0.5)])
    again = pipeline.networks.transformer.get().layers[0].attention.to_q
    assert isinstance(again, AdaptedLinear)
    assert again.base is layer.base
    assert [effect for effect, _ in again.others] == [effect for effect, _ in layer.others]
    assert not prepared
    pipeline.use_adapters([])
    assert pipeline.networks.transformer.get() is module
    assert module.layers[0].attention.to_q is layer.base


def test_an_embedding_is_changed_too(models: Models) -> None:
    name = "text_encoder/embed_tokens.weight"
    adapter = Adapter("words", {name: (low_rank(np.random.default_rng(3), shapes()[name]),)})
    plain = models.plain
    assert_same(latents(models.base, (adapter, 0.7)), latents(models.load([(adapter, 0.7)])))
    assert (latents(models.base) == plain).all()


def test_a_refused_adapter_leaves_nothing_behind(models: Models) -> None:
    pipeline, known = models.load(), shapes()
    random, plain = np.random.default_rng(3), latents(pipeline)
    changes: dict[str, tuple[Change, ...]] = {
        name: (low_rank(random, known[name]),) for name in MATRICES
    }
    changes["transformer/layers.1.attention.norm_q.bias"] = (DenseChange(matrix(random, (64,))),)
    pipeline.use_adapters([(LoadedAdapter("bad", Adapter("bad", changes)), 1.0)])
    with pytest.raises(ModelError, match=r"bad: transformer/layers\.1\.attention\.norm_q\.bias"):
        pipeline.build_conditioning(REQUEST)
    assert (latents(pipeline) == plain).all()


def test_a_pair_of_a_higher_rank_than_its_layer_is_a_matrix(models: Models) -> None:
    name = MATRICES[0]
    pair = low_rank(np.random.default_rng(3), shapes()[name], 500)
    adapter = Adapter("wide", {name: (pair,)})
    loaded = LoadedAdapter("w", adapter)
    before = loaded.nbytes
    models.base.use_adapters([(loaded, 1.0)])
    models.base.build_conditioning(REQUEST)
    models.base.use_adapters([])
    models.base.build_conditioning(REQUEST)
    assert loaded.nbytes < before / 3
    assert_same(latents(models.base, (adapter, 0.3)), latents(models.load([(adapter, 0.3)])))


def test_the_cache_keeps_what_was_used_last() -> None:
    known = shapes()[MATRICES[0]]
    random = np.random.default_rng(3)
    made = {key: Adapter(key, {MATRICES[0]: (low_rank(random, known),)}) for key in "abc"}
    read: list[str] = []

    def get(key: str) -> LoadedAdapter:
        def load() -> Adapter:
            read.append(key)
            return made[key]

        return cache.get(key, load)

    cache = AdapterCache(2 * made["a"].nbytes)
    assert get("a") is get("a")
    for key in "bacab":
        get(key)
    assert read == ["a", "b", "c", "b"]
    tiny = AdapterCache(0)
    assert tiny.get("a", lambda: made["a"]) is tiny.get("a", lambda: made["b"])  # the one in use
