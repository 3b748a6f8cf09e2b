"""A small FLUX.2 [klein] with random weights, written as a diffusers directory without torch.

Its tokenizer is that of examples/tiny. Norms are random too: default values would hide missing
ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clowder_aimage.model.backend import mx, tree_flatten
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.flux2.config import TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.transformer import Transformer
from clowder_aimage.model.flux2.vae import Vae, VaeEncoder
from tests.model.quantized_blobs import bits, blob
from tests.model.random_model import TINY

HIDDEN = 64
CONFIGS: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 312,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 28,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
    "transformer": {
        "_class_name": "Flux2Transformer2DModel",
        "in_channels": 8,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * HIDDEN,
        "axes_dims_rope": [8, 8, 8, 8],
        "guidance_embeds": False,
    },
    "vae": {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": [4, 4, 8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 1,
        "latent_channels": 2,
        "norm_num_groups": 2,
        "sample_size": 64,
    },
}
_INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}
_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
Arrays = dict[str, np.ndarray]


def write_flux2(
    root: Path,
    *,
    is_distilled: bool = True,
    text_encoder: Path | None = None,
    configs: Mapping[str, Mapping[str, Any]] = CONFIGS,
) -> None:
    """Write the model; ``text_encoder`` is the folder of another's, which it gets instead."""
    for name, value in (
        ("model_index.json", _INDEX | {"is_distilled": is_distilled}),
        ("scheduler/scheduler_config.json", _SCHEDULER),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(value))
    folders = [TINY / "tokenizer", *([text_encoder] if text_encoder else [])]
    for path in (one for folder in folders for one in sorted(folder.iterdir())):
        target = root / path.relative_to(path.parents[1])
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    for component in list(configs)[1 if text_encoder else 0 :]:
        (root / component).mkdir()
        (root / component / "config.json").write_text(json.dumps(configs[component]))
        values = tensors(component, configs[component])
        parts = {name: bits(mx.array(array)) for name, array in values.items()}
        stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
        (root / component / f"{stem}.safetensors").write_bytes(blob(parts))


def tensors(component: str, config: Mapping[str, Any]) -> Arrays:
    """Return random tensors in torch's layout with a checkpoint's names."""
    name = f"{component}/config.json"
    networks: dict[str, Any] = {}
    if component == "text_encoder":
        networks["model."] = TextEncoder(TextEncoderConfig.parse(name, config))
    elif component == "transformer":
        networks[""] = Transformer(TransformerConfig.parse(name, config))
    else:
        parsed = VaeConfig.parse(name, config)
        networks = {"": Vae(parsed), "/": VaeEncoder(parsed)}
    random, found = np.random.default_rng(len(component)), Arrays()
    for prefix, network in networks.items():
        parameters: Any = tree_flatten(network.parameters())
        for own, parameter in parameters:
            shape = parameter.shape
            values: np.ndarray = random.standard_normal(shape)
            if own.endswith(("running_mean", "bias")):
                values *= 0.1
            elif len(shape) == 1:
                values = np.abs(1 + values * 0.2)
            else:
                values /= np.sqrt(np.prod(shape[1:]))
            if len(shape) == 4:
                values = values.transpose(0, 3, 1, 2)
            found[prefix.strip("/") + _stored(component, own)] = values.astype(np.float32)
    if component == "text_encoder":  # what pictures do not need
        found["model.norm.weight"] = np.ones(config["hidden_size"], np.float32)
        last = config["num_hidden_layers"] - 1
        for own in [name for name in found if name.startswith("model.layers.0.")]:
            found.setdefault(own.replace(".0.", f".{last}.", 1), found[own])
    return found


def _stored(component: str, own: str) -> str:
    """Return the name in a checkpoint of a parameter."""
    if component == "transformer":
        own = own.replace("time_linear_", "time_guidance_embed.timestep_embedder.linear_")
        for name in ("modulation_img", "modulation_txt", "stream_modulation", "norm_out"):
            own = own.replace(f"{name}.weight", f"{name}.linear.weight")
        return own if own.startswith("single") else own.replace(".to_out.", ".to_out.0.")
    return own.replace(".to_out.", ".to_out.0.") if component == "vae" else own
