"""Names, shapes and configs of FLUX.2 [klein], of diffusers and of the original code.

Sources of the names: diffusers' ``transformer_flux2.py``, ``autoencoder_kl_flux2.py`` and, of the
transformer, ``single_file_utils.py``; of the autoencoder Black Forest Labs'
``flux2/autoencoder.py``, whose names ComfyUI's ``comfy/sd.py`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.family import zimage_config, zimage_names
from clowder_aimage.family.component_names import ComponentNames, Shapes
from clowder_aimage.family.name_table import NameTable, TensorChange
from clowder_aimage.family.zimage_config import count_blocks, get_length
from clowder_aimage.family.zimage_names import ORIGINAL

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
# Axes of positions, which share the channels of a head.
_AXES = 4
# Hidden channels of the feed-forward networks, in channels of a token.
_RATIO = 3.0
# Channels of a time.
_TIMES = 256
_END = r"(?=\.|$)"
_DOUBLE, _SINGLE = r"^(double_blocks\.[0-9]+)", r"^single_transformer_blocks\.([0-9]+)\.attn"

_TRANSFORMER = NameTable(
    renames=(
        (rf"^x_embedder{_END}", "img_in"),
        (rf"^context_embedder{_END}", "txt_in"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^((?:double|single)_stream_modulation(?:_img|_txt)?)\.linear", r"\1.lin"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (rf"^proj_out{_END}", "final_layer.linear"),
        (r"^transformer_blocks\.([0-9]+)\.", r"double_blocks.\1."),
        (rf"{_DOUBLE}\.attn\.qkv{_END}", r"\1.img_attn.qkv"),
        (rf"{_DOUBLE}\.attn\.to_added_qkv{_END}", r"\1.txt_attn.qkv"),
        (rf"{_DOUBLE}\.attn\.to_out\.0{_END}", r"\1.img_attn.proj"),
        (rf"{_DOUBLE}\.attn\.to_add_out{_END}", r"\1.txt_attn.proj"),
        (rf"{_DOUBLE}\.attn\.norm_([qk]){_END}", r"\1.img_attn.norm.\2"),
        (rf"{_DOUBLE}\.attn\.norm_added_([qk]){_END}", r"\1.txt_attn.norm.\2"),
        (rf"{_DOUBLE}\.ff\.linear_in{_END}", r"\1.img_mlp.0"),
        (rf"{_DOUBLE}\.ff\.linear_out{_END}", r"\1.img_mlp.2"),
        (rf"{_DOUBLE}\.ff_context\.linear_in{_END}", r"\1.txt_mlp.0"),
        (rf"{_DOUBLE}\.ff_context\.linear_out{_END}", r"\1.txt_mlp.2"),
        (rf"{_SINGLE}\.to_qkv_mlp_proj{_END}", r"single_blocks.\1.linear1"),
        (rf"{_SINGLE}\.to_out{_END}", r"single_blocks.\1.linear2"),
        (rf"{_SINGLE}\.norm_([qk]){_END}", r"single_blocks.\1.norm.\2"),
        (rf"^((?:double|single)_blocks\..*norm)\.q{_END}", r"\1.query_norm"),
        (rf"^((?:double|single)_blocks\..*norm)\.k{_END}", r"\1.key_norm"),
        (r"(query_norm|key_norm)\.weight$", r"\1.scale"),
    ),
    stacked=(
        ("attn.qkv", tuple(f"attn.to_{projection}" for projection in "qkv")),
        ("attn.to_added_qkv", tuple(f"attn.add_{projection}_proj" for projection in "qkv")),
    ),
    changes=((r"^norm_out\.linear\.weight$", TensorChange.HALVES),),
)
_VAE_FLAGS = ("use_post_quant_conv", "use_quant_conv")
_VAE_DEFAULTS = {"in_channels": 3, "out_channels": 3, **dict.fromkeys(_VAE_FLAGS, True)}
_LDM = zimage_names.VAE[ORIGINAL]
_VAE = NameTable(
    renames=(
        *_LDM.renames,
        (r"^quant_conv\.", "encoder.quant_conv."),
        (r"^post_quant_conv\.", "decoder.post_quant_conv."),
    ),
    changes=_LDM.changes,
)


def _build_transformer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    head = config["attention_head_dim"]
    dim, channels = head * config["num_attention_heads"], config["in_channels"]
    inner = int(dim * config.get("mlp_ratio", _RATIO))
    norms: dict[str, tuple[int, ...]] = {f"attn.norm_{projection}": (head,) for projection in "qk"}
    attention = [f"attn.to_{projection}" for projection in ("q", "k", "v", "out.0", "add_out")]
    attention += [f"attn.add_{projection}_proj" for projection in "qkv"]
    double = norms | dict.fromkeys(attention, (dim, dim))
    double |= {f"attn.norm_added_{projection}": (head,) for projection in "qk"}
    for name in ("ff", "ff_context"):
        double |= {f"{name}.linear_in": (2 * inner, dim), f"{name}.linear_out": (dim, inner)}
    single = norms | {
        "attn.to_qkv_mlp_proj": (3 * dim + 2 * inner, dim),
        "attn.to_out": (dim, dim + inner),
    }
    shapes = {
        "x_embedder": (dim, channels),
        "context_embedder": (dim, config["joint_attention_dim"]),
        "time_guidance_embed.timestep_embedder.linear_1": (dim, _TIMES),
        "time_guidance_embed.timestep_embedder.linear_2": (dim, dim),
        "double_stream_modulation_img.linear": (6 * dim, dim),
        "double_stream_modulation_txt.linear": (6 * dim, dim),
        "single_stream_modulation.linear": (3 * dim, dim),
        "norm_out.linear": (2 * dim, dim),
        "proj_out": (channels, dim),
    }
    for kind, count, block in (
        ("transformer_blocks", config["num_layers"], double),
        ("single_transformer_blocks", config["num_single_layers"], single),
    ):
        for number in range(count):
            shapes |= {f"{kind}.{number}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _build_transformer_config(shapes: Shapes) -> dict[str, Any]:
    dim = get_length(shapes, "x_embedder.weight")
    head = get_length(shapes, "transformer_blocks.0.attn.norm_q.weight")
    return {
        "_class_name": "Flux2Transformer2DModel",
        "attention_head_dim": head,
        "axes_dims_rope": [head // _AXES] * _AXES,
        "eps": 1e-06,
        "guidance_embeds": False,
        "in_channels": get_length(shapes, "x_embedder.weight", 1),
        "joint_attention_dim": get_length(shapes, "context_embedder.weight", 1),
        "mlp_ratio": get_length(shapes, "transformer_blocks.0.ff.linear_out.weight", 1) / dim,
        "num_attention_heads": max(1, dim // head),
        "num_layers": count_blocks(shapes, r"transformer_blocks\.([0-9]+)\."),
        "num_single_layers": count_blocks(shapes, r"single_transformer_blocks\.([0-9]+)\."),
        "out_channels": None,
        "patch_size": 1,
        "rope_theta": 2000,
        "timestep_guidance_channels": _TIMES,
    }


def _check_transformer(config: Mapping[str, Any]) -> str | None:
    head = config["attention_head_dim"]
    if head % (2 * _AXES) == 0:
        return None
    return f"the heads have {head} channels, which are not pairs for {_AXES} axes"


def _build_widest_transformer(count: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("attention_head_dim", "num_attention_heads", "in_channels"), 1)
    return {**sizes, "joint_attention_dim": 1, "num_layers": count, "num_single_layers": count}


def _build_vae_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = zimage_names.build_vae_shapes(_VAE_DEFAULTS | dict(config))
    shapes |= {
        f"bn.running_{statistic}": (4 * config["latent_channels"],) for statistic in ("mean", "var")
    }
    return shapes | {"bn.num_batches_tracked": ()}


def _build_vae_config(shapes: Shapes) -> dict[str, Any]:
    config = zimage_config.build_vae_config(shapes)
    del config["scaling_factor"], config["shift_factor"]
    return config | {
        "_class_name": "AutoencoderKLFlux2",
        "batch_norm_eps": 0.0001,
        "batch_norm_momentum": 0.1,
        "patch_size": [2, 2],
        **dict.fromkeys(_VAE_FLAGS, True),
    }


TRANSFORMER = ComponentNames(
    name="transformer",
    # Shared modulation: FLUX.1 has it in each block.
    marks=(
        "double_stream_modulation_img.linear.weight",
        "double_stream_modulation_txt.linear.weight",
        "single_stream_modulation.linear.weight",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        "x_embedder.weight",
    ),
    dialects={"diffusers": NameTable(), ORIGINAL: _TRANSFORMER},
    prefix=r"(?:model\.)?(?:diffusion_model\.)?(?:transformer\.)?",
    shapes=_build_transformer_shapes,
    configure=_build_transformer_config,
    widest=_build_widest_transformer,
    check=_check_transformer,
    sizes=(
        *("attention_head_dim", "num_attention_heads", "num_layers", "num_single_layers"),
        *("in_channels", "joint_attention_dim"),
    ),
)
VAE = ComponentNames(
    name="vae",
    marks=(
        *("bn.running_mean", "bn.running_var", "quant_conv.weight", "post_quant_conv.weight"),
        *("encoder.conv_in.weight", "decoder.mid_block.attentions.0.to_q.weight"),
    ),
    dialects={"diffusers": NameTable(), ORIGINAL: _VAE},
    prefix=r"(?:vae\.|first_stage_model\.)?",
    shapes=_build_vae_shapes,
    configure=_build_vae_config,
    widest=zimage_config.build_widest_vae,
    check=zimage_config.check_vae,
    optional=("bn.num_batches_tracked",),
    sizes=("block_out_channels", "layers_per_block", "latent_channels"),
    flags=_VAE_FLAGS,
)
