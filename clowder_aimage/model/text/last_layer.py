"""A check of the last layer of a text encoder. Pictures do not use this layer.

Published text encoders have zeros in place of many of its weights. Pictures do not change, but the
text of such a model is nonsense. So it is checked before the encoder is used as a language model.
"""

from __future__ import annotations

import numpy as np

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, NotFoundError
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.tensor.config_fields import MAX_LAYERS, ConfigFields

_TENSORS = ("mlp.up_proj.weight", "mlp.down_proj.weight")
_MAX_VALUES = 1 << 28  # of one tensor
# Zeros among trained weights; the damaged ones have 16 to 59 per cent
_MOST = 0.01
# Types of 4 bits round a tenth to zero, and half of a damaged tensor more
_MOST_QUANTIZED = 0.3


def has_intact_last_layer(files: BlobFiles, aimage: AImage, component: str = "") -> bool:
    """Return True if the last layer of a language model exists and is not damaged.

    Two tensors are read, about 100 MB for 4 billion parameters. ``component`` is the folder, for
    example "text_encoder", or "" for a language model at the top level.

    Raises:
        ModelError: The model has no configuration, or a tensor is unreasonably large.
        FormatError: A blob is invalid.
        AccessError: A blob is not in the store.
    """
    weights = ModelWeights.open(files, aimage, component)
    fields = ConfigFields(f"{component}/config.json".lstrip("/"), weights.config)
    index = fields.get_integer("num_hidden_layers", maximum=MAX_LAYERS) - 1
    return all(_is_intact(weights, f"layers.{index}.{tensor}") for tensor in _TENSORS)


def _is_intact(weights: ModelWeights, name: str) -> bool:
    # Encoders without a head have no prefix
    paths = (f"model.{name}", name)
    tensor = next((path for path in paths if _has(weights, path)), None)
    if tensor is None:
        return False
    if np.prod(weights.get_shape(tensor), dtype=np.float64) > _MAX_VALUES:
        raise ModelError(f"{name} has more than {_MAX_VALUES} values")
    values = weights.read_numpy(tensor)
    most = _MOST if weights.get_quantization(tensor) is None else _MOST_QUANTIZED
    return bool(np.count_nonzero(values) >= values.size * (1 - most))


def _has(weights: ModelWeights, name: str) -> bool:
    try:
        weights.get_shape(name)
    except NotFoundError:
        return False
    return True
