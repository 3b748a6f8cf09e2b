"""The single files of a small FLUX.2 [klein], with names written again from the tools' sources."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

Arrays = dict[str, np.ndarray]
_OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
_DOUBLE = {
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.to_out.0.weight": "img_attn.proj.weight",
    "ff.linear_in.weight": "img_mlp.0.weight",
    "ff.linear_out.weight": "img_mlp.2.weight",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "attn.to_add_out.weight": "txt_attn.proj.weight",
    "ff_context.linear_in.weight": "txt_mlp.0.weight",
    "ff_context.linear_out.weight": "txt_mlp.2.weight",
}
_SINGLE = {
    "attn.to_qkv_mlp_proj.weight": "linear1.weight",
    "attn.to_out.weight": "linear2.weight",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}


def transformer(own: Arrays) -> Arrays:
    """Return the original names of a transformer's tensors."""
    made = Arrays()
    for name, value in own.items():
        if match := re.match(r"(single_)?transformer_blocks\.(\d+)\.(.*)", name):
            kind, number, inner = match[1] or "", match[2], match[3]
            if kind:
                made[f"single_blocks.{number}.{_SINGLE[inner]}"] = value
            elif inner in _DOUBLE:
                made[f"double_blocks.{number}.{_DOUBLE[inner]}"] = value
        else:
            stem = name.removesuffix(".weight")
            if stem == "norm_out.linear":  # scale, shift become shift, scale
                value = np.concatenate(np.split(value, 2)[::-1])
            made[f"{_OUTSIDE[stem]}.weight"] = value
    for number in range(sum("attn.to_q." in name for name in own)):
        for side, stem in (("img", "to_{}"), ("txt", "add_{}_proj")):
            parts = [
                own[f"transformer_blocks.{number}.attn.{stem.format(one)}.weight"] for one in "qkv"
            ]
            made[f"double_blocks.{number}.{side}_attn.qkv.weight"] = np.concatenate(parts)
    return made


def vae(own: Arrays) -> Arrays:
    """Return the original names of a VAE's tensors."""
    made = Arrays()
    for name, value in own.items():
        if re.search(r"attentions\.0\.to_.*weight", name):
            value = value[:, :, None, None]
        for old, new in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
            name = name.replace(f"mid_block.attentions.0.{old}.", f"mid.attn_1.{new}.")
        for old, new in (
            ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"),
            ("mid_block.resnets.0", "mid.block_1"),
            ("mid_block.resnets.1", "mid.block_2"),
            ("conv_norm_out", "norm_out"),
            ("conv_shortcut", "nin_shortcut"),
            (".resnets.", ".block."),
            (".downsamplers.0", ".downsample"),
            (".upsamplers.0", ".upsample"),
            ("down_blocks", "down"),
        ):
            name = name.replace(old, new)
        name = re.sub(r"up_blocks\.(\d)", lambda m: f"up.{3 - int(m[1])}", name)
        name = re.sub(r"^quant_conv", "encoder.quant_conv", name)
        made[re.sub(r"^post_quant_conv", "decoder.post_quant_conv", name)] = value
    return made


def write(source: Path, root: Path, *, is_whole: bool) -> Path:
    """Write the diffusers directory ``source`` as split files, or as one file."""
    own = {
        "diffusion_models": transformer(
            load_file(source / "transformer/diffusion_pytorch_model.safetensors")
        ),
        "text_encoders": load_file(source / "text_encoder/model.safetensors"),
        "vae": vae(load_file(source / "vae/diffusion_pytorch_model.safetensors")),
    }
    prefixes = ("model.diffusion_model.", "text_encoders.qwen3_4b.transformer.", "vae.")
    if is_whole:
        root.mkdir(parents=True, exist_ok=True)
        fronts = zip(prefixes, own.values(), strict=True)
        every = {front + name: value for front, one in fronts for name, value in one.items()}
        save_file(every, root / "flux.safetensors")
        return root / "flux.safetensors"
    for folder, tensors in own.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        save_file(tensors, root / folder / "x.safetensors")
    return root
