"""The families of image models, and the recognition of their components by tensor names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.family import flux2_names, zimage_config, zimage_names
from clowder_aimage.family.component_names import ComponentNames, NamedComponent, find_component
from clowder_aimage.family.name_table import TensorChange
from clowder_aimage.family.zimage_names import BARE, MFLUX, MLX, ORIGINAL

# Layouts with quantized weights, in MLX's form.
QUANTIZED = ("mlx", "mflux")
LAYOUTS = ("diffusers", "comfyui", "comfyui-all-in-one", "mlx", "mflux")
TRANSFORMER, TOKENIZER, SCHEDULER = "transformer", "tokenizer", "scheduler"


@dataclass(frozen=True, slots=True)
class LayoutComponent:
    """A component in a file of a layout: the dialect of its names, and their prefix."""

    component: str
    dialect: str
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """A weight file of a layout. With ``shard``, it is divided into files of that many bytes."""

    name: str
    components: tuple[LayoutComponent, ...]
    shard: int = 0


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """A family: its components with tensors, its default configs, and its layouts.

    ``index`` is its ``model_index.json``, ``scheduler`` the config of its scheduler.
    ``unsupported`` has patterns of tensor names, and a description of the variant with such
    tensors. ``layouts`` maps a layout to its weight files, ``configs`` to the name pattern of its
    configs; ``mlx_config`` converts a transformer's config and a precision to MLX's config.
    ``tokens`` are special tokens of its tokenizer. ``agreements`` are two fields of components and
    a factor: the first field equals the second times the factor.
    """

    name: str
    title: str
    index: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    components: tuple[ComponentNames, ...]
    unsupported: tuple[tuple[str, str], ...]
    layouts: Mapping[str, tuple[LayoutFile, ...]]
    agreements: tuple[tuple[tuple[str, str], tuple[str, str], int], ...]
    configs: Mapping[str, str] = field(default_factory=dict)
    mlx_config: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda *_: {}
    # Those of Qwen.
    tokens: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")

    def get_component(self, name: str) -> ComponentNames:
        """Return the component called ``name``."""
        return next(names for names in self.components if names.name == name)


QWEN3 = ComponentNames(
    name="text_encoder",
    marks=(
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ),
    dialects=zimage_names.TEXT_ENCODER,
    prefix=r"(?:text_encoders\.[^.]+\.|text_encoder\.)?(?:transformer\.)?",
    shapes=zimage_names.build_text_encoder_shapes,
    configure=zimage_config.build_text_encoder_config,
    widest=zimage_config.build_widest_text_encoder,
    sizes=(
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads"),
    ),
    extras=r"(?:model\.)?rotary_emb\.inv_freq|lm_head\.weight|logit_scale",
    base="model.",
)
VAE = ComponentNames(
    name="vae",
    marks=(
        "encoder.conv_in.weight",
        "decoder.conv_in.weight",
        "decoder.up_blocks.0.resnets.0.conv1.weight",
        "decoder.mid_block.resnets.0.conv1.weight",
        "decoder.mid_block.attentions.0.to_q.weight",
    ),
    dialects=zimage_names.VAE,
    prefix=r"(?:vae\.|first_stage_model\.)?",
    # The VAE of FLUX.2 has the same marks.
    excluded=r"(?:^|\.)bn\.running_mean$",
    shapes=zimage_names.build_vae_shapes,
    configure=zimage_config.build_vae_config,
    widest=zimage_config.build_widest_vae,
    check=zimage_config.check_vae,
    sizes=(
        *("block_out_channels", "layers_per_block", "latent_channels"),
        *("in_channels", "out_channels"),
    ),
)
_DIT = ComponentNames(
    name=TRANSFORMER,
    marks=(
        "all_x_embedder.2-1.weight",
        "all_final_layer.2-1.adaLN_modulation.1.weight",
        "cap_embedder.1.weight",
        "noise_refiner.0.attention.norm_k.weight",
        "layers.0.adaLN_modulation.0.weight",
        "t_embedder.mlp.0.weight",
    ),
    dialects=zimage_names.TRANSFORMER,
    prefix=r"(?:model\.)?(?:diffusion_model\.)?(?:transformer\.)?",
    shapes=zimage_names.build_transformer_shapes,
    configure=zimage_config.build_transformer_config,
    widest=zimage_config.build_widest_transformer,
    check=zimage_config.check_transformer,
    extras=r"norm_final\.weight",
    omitted=("x_pad_token", "cap_pad_token"),
    sizes=("dim", "n_heads", "n_layers", "n_refiner_layers", "cap_feat_dim", "in_channels"),
)
_TEXT = LayoutComponent("text_encoder", "diffusers")
_ALL_IN_ONE = (
    LayoutComponent(TRANSFORMER, ORIGINAL, "model.diffusion_model."),
    LayoutComponent("text_encoder", "diffusers", "text_encoders.qwen3_4b.transformer."),
    LayoutComponent("vae", ORIGINAL, "vae."),
)
Z_IMAGE = ImageFamily(
    name="z-image",
    title="Z-Image",
    index={
        "_class_name": "ZImagePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3Model"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    scheduler=zimage_config.SCHEDULER,
    components=(_DIT, QWEN3, VAE),
    unsupported=(
        (r"dec_net\.cond_embed", "a variant that computes pixels without a VAE"),
        (
            r"siglip_(embedder|refiner)|siglip_pad_token",
            "Z-Image-Omni, which takes pictures as input",
        ),
        (r"\.(qweight|wscales|smooth_factor)$", "quantized by Nunchaku (SVDQuant)"),
    ),
    layouts={
        "comfyui": (
            LayoutFile(
                "diffusion_models/z_image.safetensors", (LayoutComponent(TRANSFORMER, ORIGINAL),)
            ),
            LayoutFile("text_encoders/qwen_3_4b.safetensors", (_TEXT,)),
            LayoutFile("vae/ae.safetensors", (LayoutComponent("vae", ORIGINAL),)),
        ),
        "comfyui-all-in-one": (LayoutFile("checkpoints/z_image.safetensors", _ALL_IN_ONE),),
        "mlx": (
            LayoutFile("weights.safetensors", (LayoutComponent(TRANSFORMER, MLX),)),
            LayoutFile("text_encoder.safetensors", (_TEXT,)),
            LayoutFile("vae.safetensors", (LayoutComponent("vae", MLX),)),
        ),
        "mflux": (
            LayoutFile("transformer", (LayoutComponent(TRANSFORMER, MFLUX),), 2 << 30),
            LayoutFile("text_encoder", (LayoutComponent("text_encoder", BARE),), 2 << 30),
            LayoutFile("vae", (LayoutComponent("vae", MFLUX),), 2 << 30),
        ),
    },
    agreements=(
        ((TRANSFORMER, "cap_feat_dim"), ("text_encoder", "hidden_size"), 1),
        ((TRANSFORMER, "in_channels"), ("vae", "latent_channels"), 1),
    ),
    configs={"mlx": "{}_config.json", "mflux": "{}/config.json"},
    mlx_config=zimage_config.build_mlx_config,
)
FLUX_2 = ImageFamily(
    name="flux2",
    title="FLUX.2 [klein]",
    index={
        "_class_name": "Flux2KleinPipeline",
        # The other layouts do not state it.
        "is_distilled": True,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    },
    scheduler=flux2_names.SCHEDULER,
    components=(flux2_names.TRANSFORMER, QWEN3, flux2_names.VAE),
    unsupported=(
        (r"(?:^|\.)guidance_(in|embedder)\.", "FLUX.1 or FLUX.2 [dev], with guidance embeddings"),
    ),
    layouts={
        "comfyui": (
            LayoutFile(
                "diffusion_models/flux2.safetensors", (LayoutComponent(TRANSFORMER, ORIGINAL),)
            ),
            LayoutFile("text_encoders/qwen_3_4b.safetensors", (_TEXT,)),
            LayoutFile("vae/flux2-vae.safetensors", (LayoutComponent("vae", ORIGINAL),)),
        ),
        "comfyui-all-in-one": (LayoutFile("checkpoints/flux2.safetensors", _ALL_IN_ONE),),
    },
    agreements=(
        ((TRANSFORMER, "joint_attention_dim"), ("text_encoder", "hidden_size"), 3),
        ((TRANSFORMER, "in_channels"), ("vae", "latent_channels"), 4),
    ),
)
FAMILIES = (Z_IMAGE, FLUX_2)


def recognise(names: Iterable[str]) -> list[NamedComponent]:
    """Return the components of tensors with these names."""
    names = tuple(names)
    components = {component: None for family in FAMILIES for component in family.components}
    matches = (find_component(component, names) for component in components)
    return [match for match in matches if match is not None]


def find_transformer_family(components: Iterable[ComponentNames]) -> ImageFamily | None:
    """Return the family of a transformer among components, or None."""
    component_set = set(components)
    for family in FAMILIES:
        if family.get_component(TRANSFORMER) in component_set:
            return family
    return None


def find_family(name: object) -> ImageFamily | None:
    """Return the family called ``name``, or None."""
    return next((family for family in FAMILIES if family.name == name), None)


def find_unsupported(names: Iterable[str]) -> str | None:
    """Return the description of an unsupported variant with tensors of these names, or None."""
    names = tuple(names)
    for family in FAMILIES:
        for pattern, variant in family.unsupported:
            if any(re.search(pattern, name) for name in names):
                return variant
    return None


@functools.lru_cache(maxsize=4096)
def find_original_module(module: str) -> str:
    """Return the original code's name of a transformer's layer in diffusers.

    A layer that the original code stacks with others keeps its name.
    """
    for family in FAMILIES:
        table = family.get_component(TRANSFORMER).dialects[ORIGINAL]
        if table.locate(module).count > 1:
            return module
        if (name := table.rename_module(module)) != module:
            return name
    return module


@functools.lru_cache(maxsize=4096)
def has_exchanged_halves(module: str) -> bool:
    """Return True if the original code has the halves of a layer's rows exchanged."""
    name = f"{module}.weight"
    tables = (family.get_component(TRANSFORMER).dialects[ORIGINAL] for family in FAMILIES)
    return any(table.locate(name).change is TensorChange.HALVES for table in tables)
