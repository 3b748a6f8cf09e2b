"""A small Z-Image with random weights, wide enough for groups of 64; created without torch.

The tokenizer and the schedule are those of examples/tiny. Norms, biases and pad tokens are random
too: default values would hide missing ones.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.model.backend import mx, tree_flatten
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.text_encoder import TextEncoder
from clowder_aimage.model.zimage.config import TransformerConfig, VaeConfig
from clowder_aimage.model.zimage.transformer import Transformer
from clowder_aimage.model.zimage.vae import Vae
from clowder_aimage.oci import mediatype
from clowder_aimage.tensor import Quantization, read_header
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import bits, blob, quantize

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CHANGES: dict[str, dict[str, Any]] = {
    "transformer": {"dim": 128, "n_heads": 2, "axes_dims": [16, 24, 24], "cap_feat_dim": 64},
    "text_encoder": {"hidden_size": 64, "intermediate_size": 128},
    "vae": {},
}
MAKERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "transformer": lambda name, config: Transformer(TransformerConfig.parse(name, config)),
    "text_encoder": lambda name, config: TextEncoder(TextEncoderConfig.parse(name, config)),
    "vae": lambda name, config: Vae(VaeConfig.parse(name, config)),
}
Arrays = dict[str, np.ndarray]


def configuration(component: str) -> dict[str, Any]:
    """Return the component's config.json."""
    value = json.loads((TINY / component / "config.json").read_text()) | CHANGES[component]
    assert isinstance(value, dict)
    return value


def checkpoint_names(component: str) -> dict[str, str]:
    """Map the names of parameters to those of tensors in a checkpoint."""
    (path,) = (TINY / component).glob("*.safetensors")
    with path.open("rb") as file:
        names = read_header(file, path.stat().st_size).tensors
    module = MAKERS[component](component, configuration(component))
    return {module.sanitize(name): name for name in names}


@functools.cache
def weights(component: str) -> Arrays:
    """Return random tensors in torch's layout with a checkpoint's names.

    They are BF16 values as float32, and cannot be changed.
    """
    random = np.random.default_rng(len(component))
    module = MAKERS[component](component, configuration(component))
    names, found = checkpoint_names(component), {}
    parameters: Any = tree_flatten(module.parameters())
    for name, parameter in parameters:
        values: np.ndarray = random.standard_normal(parameter.shape)
        if name.endswith("bias"):
            values *= 0.1
        elif parameter.ndim == 1:
            values = 1 + values * 0.2
        elif name.endswith("_token"):
            values *= 0.5
        else:
            values /= np.sqrt(np.prod(parameter.shape[1:]))
        if values.ndim == 4:
            values = values.transpose(0, 3, 1, 2)
        rounded = np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF0000
        found[names[name]] = rounded.view(np.float32)
        found[names[name]].flags.writeable = False
    return found


def pack(
    store: FolderStore,
    quantized: Mapping[str, str],
    configs: Mapping[str, Any] | None = None,
    change: Callable[[str, np.ndarray], np.ndarray] = lambda _, values: values,
) -> AImage:
    """Return the model as an AImage; ``quantized`` maps components to the type of their matrices.

    Embeddings of the text encoder are not quantized, and neither is the vae. ``change`` returns
    other values of the tensor ``component/name``.
    """
    layers = []
    for path in sorted(TINY.rglob("*")):
        if path.is_file() and path.suffix in (".json", ".jinja") and path.name != "config.json":
            name = path.relative_to(TINY).as_posix()
            layers.append(Layer(store.add(mediatype.AIMAGE_FILE, path.read_bytes()), name))
    for component in MAKERS:
        config = configuration(component) | dict((configs or {}).get(component, {}))
        data = store.add(mediatype.AIMAGE_FILE, json.dumps(config).encode())
        layers.append(Layer(data, f"{component}/config.json"))
        for name, random in weights(component).items():
            kind, values = quantized.get(component), change(f"{component}/{name}", random)
            layers.append(_layer(store, component, name, values, kind))
    return AImage(b"{}", tuple(layers))


def _layer(
    store: FolderStore, component: str, name: str, values: np.ndarray, kind: str | None
) -> Layer:
    metadata = None
    if kind and takes_codes(name, values):
        how = Quantization.parse(kind)
        parts = {name + part: bits(array) for part, array in quantize(values, kind).items()}
        metadata, dtype = how.metadata, how.type.name
    else:
        parts, dtype = {name: bits(mx.array(values))}, "F32"
    data = store.add(mediatype.AIMAGE_SAFETENSORS, blob(parts, metadata))
    return Layer(data, f"{component}/{name}", dtype, values.shape)


def write_directory(root: Path) -> None:
    """Write the model as a diffusers directory."""
    for path in sorted(TINY.rglob("*")):
        index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in (".json", ".jinja") and not index:
            target = root / path.relative_to(TINY)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for component in MAKERS:
        (root / component / "config.json").write_text(json.dumps(configuration(component)))
        parts = {name: bits(mx.array(values)) for name, values in weights(component).items()}
        stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
        (root / component / f"{stem}.safetensors").write_bytes(blob(parts))


def takes_codes(name: str, values: np.ndarray) -> bool:
    """Return whether it is a linear layer's matrix of whole groups of every type."""
    plain = "embed_tokens" in name or name.endswith("_token")
    return values.ndim == 2 and values.shape[1] % 64 == 0 and not plain
