"""Files of other tools for a small Z-Image model, written from lists of names kept here.

The renames are written again, from the tools' sources, so that the package's tables are compared
with something else.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clowder_aimage.tensor import read_header

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
FILES = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
}
Tensors = dict[str, Any]


def read_tensors(path: Path) -> Tensors:
    """Return the tensors of a BF16 file, as 16-bit integers."""
    data = path.read_bytes()
    with path.open("rb") as file:
        header = read_header(file, len(data))
    at = header.data_offset
    return {
        name: np.frombuffer(data[at + i.start : at + i.end], np.uint16).reshape(i.shape)
        for name, i in header.tensors.items()
    }


def write(path: Path, tensors: Mapping[str, Any], **metadata: str) -> Path:
    """Write a BF16 file, in the order of ``tensors``, with a space in its header."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, value in tensors.items():
        shape, size = list(value.shape), value.size * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def component(name: str) -> Tensors:
    return read_tensors(TINY / FILES[name])


def original_transformer() -> Tensors:
    """Return ComfyUI's names and stacked projections (``z_image_to_diffusers``, reversed)."""
    own, made = component("transformer"), {}
    for name, value in own.items():
        if name.endswith("attention.to_q.weight"):
            stem = name.removesuffix("to_q.weight")
            parts = [own[f"{stem}to_{part}.weight"] for part in "qkv"]
            made[f"{stem}qkv.weight"] = np.concatenate(parts)
        elif not name.endswith(("to_k.weight", "to_v.weight")):
            name = name.replace("attention.to_out.0.", "attention.out.")
            name = name.replace(".norm_q.", ".q_norm.").replace(".norm_k.", ".k_norm.")
            name = name.replace("all_x_embedder.2-1.", "x_embedder.")
            made[name.replace("all_final_layer.2-1.", "final_layer.")] = value
    return made


def text_encoder() -> Tensors:
    return {f"model.{name}": value for name, value in component("text_encoder").items()}


def ldm_vae() -> Tensors:
    """Return the names of the latent diffusion code (diffusers, ``convert_ldm_vae_checkpoint``)."""
    made = {}
    for name, value in component("vae").items():
        if re.search(r"attentions\.0\.to_.*weight", name):
            value = value[:, :, None, None]
        for old, new in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
            name = name.replace(f"mid_block.attentions.0.{old}.", f"mid.attn_1.{new}.")
        name = name.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
        name = name.replace("mid_block.resnets.0", "mid.block_1")
        name = name.replace("mid_block.resnets.1", "mid.block_2")
        name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
        name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d)", lambda m: f"up.{3 - int(m[1])}", name)
        name = name.replace(".resnets.", ".block.").replace(".upsamplers.0", ".upsample")
        made[name] = value
    return made


def _last(value: Any) -> Any:
    return value.transpose(0, 2, 3, 1) if value.ndim == 4 else value


def mlx_transformer() -> Tensors:
    """Return the names of Z-Image-Turbo-MLX (``map_transformer_key``)."""
    made = {}
    for name, value in component("transformer").items():
        name = name.replace("all_x_embedder.2-1.", "x_embedder.")
        name = name.replace("all_final_layer.2-1.", "final_layer.")
        name = re.sub(r"^t_embedder\.mlp\.(\d)", r"t_embedder.mlp.layers.\1", name)
        name = re.sub(r"^cap_embedder\.(\d)", r"cap_embedder.layers.\1", name)
        name = re.sub(r"adaLN_modulation\.\d", "adaLN_modulation", name)
        made[name.replace("to_out.0.", "to_out.")] = value
    return made


def mlx_vae() -> Tensors:
    made = {}
    for name, value in component("vae").items():
        name = name.replace("mid_block.resnets.1", "mid_block.layers.2")
        name = name.replace("mid_block.resnets.0", "mid_block.layers.0")
        name = name.replace("mid_block.attentions.0", "mid_block.layers.1")
        name = name.replace(".downsamplers.0.", ".layers.2.").replace(
            ".upsamplers.0.", ".layers.3."
        )
        made[name.replace(".resnets.", ".layers.").replace("to_out.0", "to_out")] = _last(value)
    return made


def mflux_transformer() -> Tensors:
    made = {}
    for name, value in component("transformer").items():
        name = name.replace("t_embedder.mlp.0", "t_embedder.linear1")
        name = name.replace("t_embedder.mlp.2", "t_embedder.linear2")
        if name.startswith("all_final"):
            name = name.replace("adaLN_modulation.1", "adaLN_modulation.0")
        made[name] = value
    return made


def mflux_vae() -> Tensors:
    made = {}
    for name, value in component("vae").items():
        name = name.replace("encoder.conv_in.", "encoder.conv_in.conv2d.")
        name = name.replace("encoder.conv_out.", "encoder.conv_out.conv2d.")
        name = name.replace("decoder.conv_in.", "decoder.conv_in.conv.")
        name = name.replace("decoder.conv_out.", "decoder.conv_out.conv.")
        made[name.replace("conv_norm_out.", "conv_norm_out.norm.")] = _last(value)
    return made


def comfyui(root: Path) -> Path:
    write(root / "diffusion_models/z.safetensors", original_transformer(), format="pt")
    write(root / "text_encoders/qwen.safetensors", text_encoder())
    write(root / "vae/ae.safetensors", ldm_vae())
    return root


def all_in_one(root: Path) -> Path:
    front = {
        "model.diffusion_model.": original_transformer()
        | {"norm_final.weight": np.full(48, 0x7FC0, np.uint16)},
        "text_encoders.qwen3_4b.transformer.": text_encoder(),
        "vae.": ldm_vae(),
    }
    tensors = {prefix + name: value for prefix, own in front.items() for name, value in own.items()}
    return write(root / "z.safetensors", tensors, note="kept")


def mlx(root: Path) -> Path:
    write(root / "weights.safetensors", mlx_transformer())
    write(root / "text_encoder.safetensors", text_encoder())
    write(root / "vae.safetensors", mlx_vae())
    config = {"hidden_size": 48, "num_attention_heads": 2, "axes_dims": [8, 8, 8]}
    (root / "config.json").write_text(json.dumps(config))
    for name in ("vae", "text_encoder"):
        shutil.copy(TINY / name / "config.json", root / f"{name}_config.json")
    for name in ("tokenizer", "scheduler"):
        shutil.copytree(TINY / name, root / name)
    return root


def mflux(root: Path) -> Path:
    parts: dict[str, Callable[[], Tensors]] = {
        "transformer": mflux_transformer,
        "text_encoder": lambda: (
            component("text_encoder") | {"rotary_emb.inv_freq": np.ones(16, np.uint16)}
        ),
        "vae": mflux_vae,
    }
    known = {"quantization_level": "None", "mflux_version": "0.24.0"}
    for name, tensors in parts.items():
        items = list(tensors().items())
        half = len(items) // 2
        shards = {"0.safetensors": dict(items[:half]), "1.safetensors": dict(items[half:])}
        for file, own in shards.items():
            write(root / name / file, own, **known)
        where = {key: file for file, own in shards.items() for key in own}
        index = json.dumps({"metadata": known, "weight_map": where})
        (root / name / "model.safetensors.index.json").write_text(index)
    shutil.copytree(TINY / "tokenizer", root / "tokenizer")
    return root


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "comfyui": comfyui,
    "comfyui-all-in-one": all_in_one,
    "mlx": mlx,
    "mflux": mflux,
}
