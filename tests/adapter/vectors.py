"""Adapter files of every dialect and kind for one base, with the change that each must have.

The effects are computed here from the definitions, in float64, without the package's code. Names:
diffusers' ``loaders/lora_conversion_utils.py``, ComfyUI's ``comfy/lora.py`` and
``comfy/weight_adapter``, kohya-ss, musubi-tuner, OneTrainer, LyCORIS, peft, DiffSynth.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.tensor import encode_header, read_header

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]
Effect = Callable[[Array, float], Array]  # of a weight and a strength: the matrix that is added
TINY = Path(__file__).parents[2] / "examples" / "tiny"
RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
BLOCK, OTHER = "layers.0.attention", "context_refiner.0.attention"
MODULES = (
    *(f"{block}.to_{part}" for block in (BLOCK, OTHER) for part in ("q", "k", "v", "out.0")),
    *(f"layers.1.feed_forward.w{part}" for part in (1, 2, 3)),
    *("layers.0.adaLN_modulation.0", "cap_embedder.1", "t_embedder.mlp.2"),
    *("all_x_embedder.2-1", "all_final_layer.2-1.linear", "all_final_layer.2-1.adaLN_modulation.1"),
)
TEXT = ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")
NORM = "layers.0.attention.norm_q"


@dataclass(frozen=True, slots=True)
class AdapterVector:
    """An adapter file, and its effects by tensor of the base.

    ``diffusers`` is whether diffusers 0.42 reads it, with the same picture.
    """

    name: str
    tensors: Mapping[str, Array]
    effects: Mapping[str, tuple[Effect, ...]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    diffusers: bool = False

    def __str__(self) -> str:
        return self.name

    def changed(
        self, weights: Mapping[str, Array], strength: float = 1.0
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Return the changed tensors of a base; a missing bias is zero."""
        found = {}
        for tensor, effects in self.effects.items():
            weight = np.asarray(weights.get(tensor, 0.0), np.float64)
            total = sum(effect(weight, strength) for effect in effects)
            found[tensor] = np.asarray(weight + total, np.float32)
        return found

    def write(self, directory: Path) -> Path:
        """Write the file, with the configuration of peft beside it, and return its path."""
        directory.mkdir(parents=True, exist_ok=True)
        name = self.name if self.config is None else "adapter_model"
        path = directory / f"{name}.safetensors"
        path.write_bytes(safetensors(self.tensors, self.metadata))
        if self.config is not None:
            (directory / "adapter_config.json").write_text(json.dumps(self.config))
        return path


DTYPES = {"f4": "F32", "f2": "F16", "f8": "F64", "i8": "I64", "u1": "U8"}


def safetensors(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file of arrays."""
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    entries = [(name, DTYPES[one.dtype.str[1:]], one.shape) for name, one in arrays.items()]
    header = encode_header(entries, metadata or {})
    return header + b"".join(one.tobytes() for one in arrays.values())


def tiny_shapes(root: Path = TINY) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a diffusers directory: ``component/name`` to shape."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(root.rglob("*.safetensors")):
        with path.open("rb") as file:
            header = read_header(file, path.stat().st_size)
        found |= {f"{path.parent.name}/{name}": one.shape for name, one in header.tensors.items()}
    return found


def random(*shape: int, seed: int = 0) -> Array:
    """Return values whose products are about as large as a small change of a weight."""
    drawn = np.random.default_rng((seed, *shape)).standard_normal(shape) * 0.15
    return drawn.astype(np.float32)


def wide(array: Array) -> Array:
    return np.asarray(array, np.float64)


class BaseLayers:
    """One set of matrices for a base. Query, key and value of a block share A."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.down: dict[str, Array] = {}
        self.up: dict[str, Array] = {}
        for seed, module in enumerate(MODULES):
            rows, columns = self.shape(module)
            block = module.rpartition(".to_")[0] if "to_out" not in module else ""
            shared = f"{block}.to_q"
            first = self.down.get(shared) if block else None
            self.down[module] = first if first is not None else random(RANK, columns, seed=seed)
            self.up[module] = random(rows, RANK, seed=seed + 100)

    def shape(self, module: str) -> tuple[int, int]:
        rows, columns = self.shapes[f"transformer/{module}.weight"]
        return rows, columns

    def stacked(self, block: str) -> tuple[Array, Array]:
        """Return the pair for the stacked query, key and value of a block."""
        ups = [self.up[f"{block}.to_{part}"] for part in "qkv"]
        return self.down[f"{block}.to_q"], np.concatenate(ups)

    @functools.cached_property
    def effects(self) -> dict[str, tuple[Effect, ...]]:
        return {
            weight(module): (linear(SCALE * wide(self.up[module]) @ wide(self.down[module])),)
            for module in MODULES
        }


def weight(module: str) -> str:
    return f"transformer/{module}.weight"


def linear(delta: Array) -> Effect:
    return lambda _, strength: strength * delta


def replaced(values: Array) -> Effect:
    return lambda base, strength: strength * (values - base)


# -- names


def original(module: str) -> str:
    """Return the name in the original code's dialect."""
    module = module.replace("all_x_embedder.2-1", "x_embedder")
    module = module.replace("all_final_layer.2-1", "final_layer")
    return module.replace("attention.to_out.0", "attention.out")


def without_index(module: str) -> str:
    for name in ("to_out.0", "adaLN_modulation.0", "adaLN_modulation.1"):
        module = module.replace(name, name[:-2])
    return module


def flat(module: str) -> str:
    return module.replace(".", "_")


WORDS = {
    "AB": ("lora_A.weight", "lora_B.weight"),
    "default": ("lora_A.default.weight", "lora_B.default.weight"),
    "style": ("lora_A.my-style.weight", "lora_B.my-style.weight"),
    "down": ("lora_down.weight", "lora_up.weight"),
    "dot": ("lora.down.weight", "lora.up.weight"),
    "layer": ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
    "bare": ("lora_A", "lora_B"),
}
# name, prefix, spelling of the module, words, has alpha, is read by diffusers
ROWS: tuple[tuple[str, str, Callable[[str], str], str, bool, bool], ...] = (
    ("diffusers", "transformer.", str, "AB", False, True),
    ("diffusers-alpha", "transformer.", str, "AB", True, False),
    ("onetrainer", "transformer.", str, "down", True, False),
    ("ai-toolkit", "diffusion_model.", str, "AB", False, True),
    ("ai-toolkit-alpha", "diffusion_model.", str, "AB", True, True),
    ("musubi", "lora_unet_", flat, "down", True, False),
    ("onetrainer-old", "lora_transformer_", flat, "down", True, False),
    ("lycoris", "lycoris_", flat, "down", True, False),
    ("diffsynth", "", str, "default", False, True),
    ("bare", "", str, "AB", False, False),
    ("named", "", str, "style", False, False),
    ("peft", "base_model.model.", str, "AB", False, False),
    ("peft-transformer", "base_model.model.transformer.", str, "default", False, False),
    ("checkpoint", "model.diffusion_model.", str, "down", True, False),
    ("without-index", "diffusion_model.", without_index, "AB", True, False),
    ("without-index-flat", "lora_unet_", lambda m: flat(without_index(m)), "down", True, False),
    ("without-index-original", "", lambda m: without_index(original(m)), "AB", True, False),
    ("old-diffusers", "transformer.", str, "dot", False, False),
    ("older-diffusers", "transformer.", str, "layer", False, False),
    ("no-weight", "diffusion_model.", str, "bare", False, False),
)
FUSED_ROWS = (
    ("comfyui", "diffusion_model.", original, "AB", True),
    ("comfyui-down", "diffusion_model.", original, "down", True),
    ("kohya", "lora_unet_", lambda module: flat(original(module)), "down", True),
    ("checkpoint-fused", "model.diffusion_model.", original, "AB", False),
)
TEXT_ROWS = (
    ("text-kohya", "lora_te_", flat, "down"),
    ("text-kohya-1", "lora_te1_model_", flat, "down"),
    ("text-diffusers", "text_encoder.", str, "AB"),
    ("text-diffusers-model", "text_encoder.model.", str, "AB"),
    ("text-comfyui", "text_encoders.qwen3_4b.transformer.model.", str, "AB"),
    ("text-peft", "base_model.model.model.", str, "AB"),
)


@functools.cache
def vectors() -> tuple[AdapterVector, ...]:
    """Return all vectors for examples/tiny."""
    return vectors_for(tiny_shapes())


def vectors_for(shapes: Shapes) -> tuple[AdapterVector, ...]:
    """Return all vectors for a base."""
    base = BaseLayers(shapes)
    found = (*dialects(base), *texts(base), *kinds(base))
    assert len({one.name for one in found}) == len(found)
    return found


def dialects(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield the same change in every row of names."""
    for name, prefix, spell, words, has_alpha, diffusers in ROWS:
        tensors: dict[str, Array] = {}
        for module in MODULES:
            pair = base.down[module], base.up[module]
            tensors |= pair_of(prefix + spell(module), *pair, words, has_alpha)
        yield AdapterVector(name, tensors, base.effects, diffusers=diffusers)
    for name, prefix, spell, words, has_alpha in FUSED_ROWS:
        tensors = {}
        for block in (BLOCK, OTHER):
            stem = prefix + spell(f"{block}.qkv")
            tensors |= pair_of(stem, *base.stacked(block), words, has_alpha)
        for module in MODULES:
            if not module.endswith(("to_q", "to_k", "to_v")):
                stem = prefix + spell(module)
                tensors |= pair_of(stem, base.down[module], base.up[module], words, has_alpha)
        yield AdapterVector(name, tensors, base.effects)
    down, up = base.down[MODULES[0]], base.up[MODULES[0]] * np.float32(SCALE)
    stem = f"transformer.{BLOCK}.to_q_lora"  # diffusers' attention processors
    processors = {f"{stem}.down.weight": down, f"{stem}.up.weight": up}
    only = {weight(MODULES[0]): base.effects[weight(MODULES[0])]}
    yield AdapterVector("processors", processors, only)


def pair_of(stem: str, down: Array, up: Array, words: str, has_alpha: bool) -> dict[str, Array]:
    """Return a low-rank pair of ``SCALE``: by alpha, or in B."""
    first, second = WORDS[words]
    found = {f"{stem}.{first}": down, f"{stem}.{second}": up if has_alpha else up * SCALE}
    if has_alpha:
        found[f"{stem}.alpha"] = np.array(ALPHA, np.float32)
    return {name: array.astype(np.float32) for name, array in found.items()}


def texts(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield adapters of the text encoder."""
    prefix = "model." if any(n.startswith("text_encoder/model.") for n in base.shapes) else ""
    effects: dict[str, tuple[Effect, ...]] = {}
    pairs = {}
    for seed, module in enumerate(TEXT):
        tensor = f"text_encoder/{prefix}{module}.weight"
        rows, columns = base.shapes[tensor]
        down, up = random(RANK, columns, seed=seed), random(rows, RANK, seed=seed + 50)
        pairs[module] = down, up
        effects[tensor] = (linear(SCALE * wide(up) @ wide(down)),)
    for name, start, spell, words in TEXT_ROWS:
        tensors: dict[str, Array] = {}
        for module, pair in pairs.items():
            tensors |= pair_of(start + spell(module), *pair, words, True)
        yield AdapterVector(name, tensors, effects)


# -- kinds


def kinds(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield the kinds of changes, each on a plain layer and on a stacked one where it can be."""
    yield from scales(base)
    yield from differences(base)
    yield from products(base)
    yield from decomposed(base)
    yield distill_patch(base)


def scales(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield the ways to state alpha and rank."""
    module = MODULES[0]
    pair = {"lora_A.weight": base.down[module], "lora_B.weight": base.up[module]}
    product = wide(base.up[module]) @ wide(base.down[module])

    def of(name: str, prefix: str, scale: float, **more: Any) -> AdapterVector:
        extra = more.pop("extra", {})
        tensors = {f"{prefix}{module}.{key}": value for key, value in pair.items()} | extra
        return AdapterVector(name, tensors, {weight(module): (linear(scale * product),)}, **more)

    root, peft = float(np.sqrt(RANK)), "base_model.model."
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2.0}
    yield of("peft-config", peft, 2 / RANK, config=config)
    yield of("peft-rslora", peft, 2 / root, config=config | {"use_rslora": True})
    patterns = {"rank_pattern": {"to_q": RANK}, "alpha_pattern": {"attention.to_q": 5, "to_q": 9}}
    yield of("peft-pattern", peft, 5 / RANK, config=config | {"r": 8} | patterns)
    anchored = {"alpha_pattern": {"^attention.to_q": 9, r"^layers\.0\.attention\.to_q": 5}}
    yield of("peft-anchored", peft, 5 / RANK, config=config | anchored)
    stated: dict[str, Any] = {
        "transformer.r": RANK,
        "transformer.lora_alpha": 10,
        "transformer.use_rslora": False,
    }
    stated["transformer.target_modules"] = [module]
    metadata = {"lora_adapter_metadata": json.dumps(stated)}
    yield of("diffusers-metadata", "transformer.", 10 / RANK, metadata=metadata, diffusers=True)
    flag = {"use_rslora_flag": np.array(1.0, np.float32)}
    alpha = {f"diffusion_model.{module}.alpha": np.array(ALPHA, np.float32)}
    yield of("rslora-flag", "diffusion_model.", ALPHA / root, extra=alpha | flag)
    own = {f"diffusion_model.{module}.use_rslora_flag": np.array([1], np.uint8)}
    yield of("rslora-flag-of-a-layer", "diffusion_model.", ALPHA / root, extra=alpha | own)
    whole = {f"diffusion_model.{module}.alpha": np.array([6], np.int64)}
    yield of("integer-alpha", "diffusion_model.", ALPHA / RANK, extra=whole)
    both = config | {"lora_alpha": 40}
    yield of(
        "alpha-before-config",
        "",
        ALPHA / RANK,
        config=both,
        extra={f"{module}.alpha": whole[f"diffusion_model.{module}.alpha"]},
    )
    convolved = {f"{module}.lora_down.weight": base.down[module][..., None, None]}
    convolved[f"{module}.lora_up.weight"] = base.up[module][..., None, None]
    yield AdapterVector("as-convolution", convolved, {weight(module): (linear(product),)})


def differences(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield whole differences and values, of weights, norms and biases."""
    module, biased = "layers.1.feed_forward.w1", "cap_embedder.1"
    shape, head = base.shape(module), base.shapes[weight(NORM)]
    diff, norm = random(*shape, seed=1), random(*head, seed=2)
    bias = random(base.shape(biased)[0], seed=3)
    tensors = {
        f"diffusion_model.{module}.diff": diff,
        f"diffusion_model.{biased}.diff_b": bias,
        f"diffusion_model.{BLOCK}.q_norm.diff": norm,
        "diffusion_model.x_pad_token.diff": random(1, shape[1], seed=4),
    }
    yield AdapterVector(
        "diff",
        tensors,
        {
            weight(module): (linear(wide(diff)),),
            f"transformer/{biased}.bias": (linear(wide(bias)),),
            weight(NORM): (linear(wide(norm)),),
            "transformer/x_pad_token": (linear(wide(tensors["diffusion_model.x_pad_token.diff"])),),
        },
    )
    stacked = random(3 * base.shape(MODULES[0])[0], shape[1], seed=5)
    yield AdapterVector(
        "diff-fused",
        {f"lora_unet_{flat(BLOCK)}_qkv.diff": stacked},
        {
            weight(f"{BLOCK}.to_{part}"): (linear(wide(third)),)
            for part, third in zip("qkv", np.split(stacked, 3), strict=True)
        },
    )
    yield AdapterVector(
        "set-weight",
        {
            f"diffusion_model.{module}.set_weight": diff,
            f"diffusion_model.{module}.reshape_weight": np.array(shape, np.int64),
        },
        {weight(module): (replaced(wide(diff)),)},
    )
    yield AdapterVector(
        "norms",
        {
            f"lora_unet_{flat(BLOCK)}_norm_q.w_norm": norm,
            f"lora_unet_{flat(biased)}.b_norm": bias,
        },
        {
            weight(NORM): (linear(wide(norm)),),
            f"transformer/{biased}.bias": (linear(wide(bias)),),
        },
    )
    saved = {f"base_model.model.{module}.weight": diff, f"base_model.model.{biased}.bias": bias}
    yield AdapterVector(
        "modules-to-save",
        saved,
        {
            weight(module): (replaced(wide(diff)),),
            f"transformer/{biased}.bias": (replaced(wide(bias)),),
        },
        config={"modules_to_save": ["feed_forward.w1"], "bias": "all"},
    )
    pair = pair_of(f"transformer.{biased}", base.down[biased], base.up[biased], "AB", False)
    yield AdapterVector(
        "lora-bias",
        pair | {f"transformer.{biased}.lora_B.bias": bias},
        {
            weight(biased): base.effects[weight(biased)],
            f"transformer/{biased}.bias": (linear(wide(bias)),),
        },
        diffusers=True,
    )
    first = MODULES[0]
    pair = pair_of(f"base_model.model.{first}", base.down[first], base.up[first], "AB", True)
    added = random(base.shape(first)[0], seed=6)
    yield AdapterVector(
        "lora-bias-without-bias",  # of a layer without bias: it is scaled as the matrices
        pair | {f"base_model.model.{first}.lora_B.bias": added},
        {
            weight(first): base.effects[weight(first)],
            f"transformer/{first}.bias": (linear(SCALE * wide(added)),),
        },
    )


def products(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield LoHa and LoKr, whole and decomposed, plain and stacked."""
    module = MODULES[0]
    rows, columns = base.shape(module)
    targets = {"": [module], "-fused": [f"{BLOCK}.to_{part}" for part in "qkv"]}
    for label, modules in targets.items():
        height = rows * len(modules)
        stem = f"diffusion_model.{modules[0] if len(modules) == 1 else f'{BLOCK}.qkv'}"
        alpha = {f"{stem}.alpha": np.array(ALPHA, np.float32)}

        def of(
            name: str,
            parts: dict[str, Array],
            delta: Array,
            extra: dict[str, Array],
            stem: str = stem,
            modules: list[str] = modules,
            label: str = label,
        ) -> AdapterVector:
            tensors = {f"{stem}.{part}": array for part, array in parts.items()} | extra
            thirds = np.split(delta, len(modules))
            effects = {
                weight(one): (linear(third),) for one, third in zip(modules, thirds, strict=True)
            }
            return AdapterVector(name + label, tensors, effects)

        hada = {
            "hada_w1_a": random(height, RANK, seed=1) * 3,
            "hada_w1_b": random(RANK, columns, seed=2) * 3,
            "hada_w2_a": random(height, RANK, seed=3) * 3,
            "hada_w2_b": random(RANK, columns, seed=4) * 3,
        }
        first, second, third, fourth = (wide(one) for one in hada.values())
        product = (first @ second) * (third @ fourth)
        yield of("loha", hada, SCALE * product, alpha)
        w1 = random(4, 2, seed=5)
        w2 = random(height // 4, columns // 2, seed=6)
        kron = {"lokr_w1": w1, "lokr_w2": w2}
        yield of("lokr", kron, np.kron(wide(w1), wide(w2)), alpha)  # without a rank: no scale
        w2_a, w2_b = random(height // 4, RANK, seed=7) * 3, random(RANK, columns // 2, seed=8) * 3
        kron = {"lokr_w1": w1, "lokr_w2_a": w2_a, "lokr_w2_b": w2_b}
        delta = SCALE * np.kron(wide(w1), wide(w2_a) @ wide(w2_b))
        yield of("lokr-decomposed", kron, delta, alpha)
        w1_a, w1_b = random(4, 2, seed=9) * 3, random(2, 2, seed=10) * 3
        kron = {"lokr_w1_a": w1_a, "lokr_w1_b": w1_b, "lokr_w2": w2}
        delta = ALPHA / 2 * np.kron(wide(w1_a) @ wide(w1_b), wide(w2))
        yield of("lokr-first-decomposed", kron, delta, alpha)
    config = {"peft_type": "LOKR", "r": 8, "alpha": 4}
    peft = {
        f"base_model.model.{module}.{part}": array
        for part, array in (
            ("lokr_w1", random(4, 2, seed=5)),
            ("lokr_w2", random(rows // 4, columns // 2, seed=6)),
        )
    }
    half = 0.5 * np.kron(*(wide(one) for one in peft.values()))  # alpha / r
    yield AdapterVector("lokr-peft", peft, {weight(module): (linear(half),)}, config=config)


def decomposed(base: BaseLayers) -> Iterator[AdapterVector]:
    """Yield DoRA in the forms of peft and of kohya, plain and stacked."""
    eps = float(np.finfo(np.float32).eps)
    module = MODULES[0]
    rows, columns = base.shape(module)
    down, up = base.down[module], base.up[module]
    delta = SCALE * wide(up) @ wide(down)
    magnitude = 0.8 + np.abs(random(rows, seed=1))
    across = 0.8 + np.abs(random(columns, seed=2))

    def changed(magnitude: Array, delta: Array) -> Effect:
        def effect(base: Array, strength: float) -> Array:
            moved = base + strength * delta
            norms = np.linalg.norm(moved, axis=1, keepdims=True)
            return np.asarray(wide(magnitude)[:, None] * moved / norms - base)

        return effect

    def by_rows(magnitude: Array, delta: Array) -> Effect:
        def effect(base: Array, strength: float) -> Array:
            norms = np.linalg.norm(base, axis=1, keepdims=True) + eps
            return np.asarray(strength * (wide(magnitude)[:, None] * (base + delta) / norms - base))

        return effect

    def by_columns(base: Array, strength: float) -> Array:
        norms = np.linalg.norm(base + delta, axis=0, keepdims=True) + eps
        return np.asarray(strength * (wide(across) * (base + delta) / norms - base))

    plain = pair_of(f"transformer.{module}", down, up, "AB", False)
    key = f"transformer.{module}.lora_magnitude_vector"
    effects = {weight(module): (changed(magnitude, delta),)}
    yield AdapterVector("dora-peft", plain | {key: magnitude}, effects, diffusers=True)
    scaled = pair_of(f"diffusion_model.{module}", down, up, "AB", True)
    key = f"diffusion_model.{module}.lora_magnitude_vector.default.weight"
    yield AdapterVector("dora-peft-named", scaled | {key: magnitude}, effects)
    kohya = pair_of(f"lora_unet_{flat(module)}", down, up, "down", True)
    key = f"lora_unet_{flat(module)}.dora_scale"
    effects = {weight(module): (by_rows(magnitude, delta),)}
    yield AdapterVector("dora-rows", kohya | {key: magnitude[:, None]}, effects)
    effects = {weight(module): (by_columns,)}
    yield AdapterVector("dora-columns", kohya | {key: across[None]}, effects)
    thirds = {
        f"{BLOCK}.to_{part}": (SCALE * wide(base.up[f"{BLOCK}.to_{part}"]) @ wide(down), number)
        for number, part in enumerate("qkv")
    }
    stacked = 0.8 + np.abs(random(3 * rows, seed=3))
    for name, suffix, form, values in (
        ("dora-peft-fused", "lora_magnitude_vector", changed, stacked),
        ("dora-rows-fused", "dora_scale", by_rows, stacked[:, None]),
    ):
        tensors = pair_of(f"diffusion_model.{BLOCK}.qkv", *base.stacked(BLOCK), "AB", True)
        effects = {
            weight(one): (form(stacked[i * rows : (i + 1) * rows], change),)
            for one, (change, i) in thirds.items()
        }
        yield AdapterVector(
            name, tensors | {f"diffusion_model.{BLOCK}.qkv.{suffix}": values}, effects
        )
    w1, w2 = random(4, 2, seed=5), random(rows // 4, columns // 2, seed=6)
    kron = {f"lycoris_{flat(module)}.lokr_w1": w1, f"lycoris_{flat(module)}.lokr_w2": w2}
    kron[f"lycoris_{flat(module)}.dora_scale"] = magnitude[:, None]
    effects = {weight(module): (by_rows(magnitude, np.kron(wide(w1), wide(w2))),)}
    yield AdapterVector("dora-lokr", kron, effects)


def distill_patch(base: BaseLayers) -> AdapterVector:
    """Return the form of Comfy-Org's published file: five kinds of tensors at once."""
    tensors: dict[str, Array] = {}
    effects = dict(base.effects)
    for block in (BLOCK, OTHER):
        stem = f"diffusion_model.{block}.qkv"
        tensors |= pair_of(stem, *base.stacked(block), "down", True)
    for module in MODULES:
        if not module.endswith(("to_q", "to_k", "to_v")):
            stem = f"diffusion_model.{original(module)}"
            tensors |= pair_of(stem, base.down[module], base.up[module], "down", True)
    for seed, module in enumerate((NORM, "layers.0.attention_norm1", "cap_embedder.0")):
        diff = random(*base.shapes[weight(module)], seed=seed + 20)
        stem = module.replace("norm_q", "q_norm")
        tensors[f"diffusion_model.{stem}.diff"] = diff
        effects[weight(module)] = (linear(wide(diff)),)
    for seed, module in enumerate(("layers.0.adaLN_modulation.0", "all_final_layer.2-1.linear")):
        bias = random(base.shape(module)[0], seed=seed + 30)
        tensors[f"diffusion_model.{original(module)}.diff_b"] = bias
        effects[f"transformer/{module}.bias"] = (linear(wide(bias)),)
    return AdapterVector("distill-patch", tensors, effects)
