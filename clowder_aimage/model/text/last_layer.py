"""The last layer of a text encoder, which pictures do not use: it may be damaged.

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

_PARTS = ("mlp.up_proj.weight", "mlp.down_proj.weight")
_MAX_VALUES = 1 << 28  # of one tensor
_MOST = 0.01  # zeros among trained weights; the damaged ones have 16 to 59 per cent
_MOST_QUANTIZED = 0.3  # types of 4 bits round a tenth to zero, and half of a damaged tensor more


def has_whole_last_layer(files: BlobFiles, aimage: AImage, component: str = "") -> bool:
    """Return whether the last layer of a language model is there and has its weights.

    Two tensors are read, about 100 MB for 4 billion parameters. ``component`` is such as
    "text_encoder", or "" for a model of its own.

    Raises:
        ModelError: It has no configuration, or a tensor is unreasonably large.
        FormatError: A blob is invalid.
        AccessError: A blob is not in the store.
    """
    weights = ModelWeights.open(files, aimage, component)
    fields = ConfigFields(f"{component}/config.json".lstrip("/"), weights.config)
    last = fields.integer("num_hidden_layers", maximum=MAX_LAYERS) - 1
    return all(_is_whole(weights, f"layers.{last}.{part}") for part in _PARTS)


def _is_whole(weights: ModelWeights, name: str) -> bool:
    found = next((one for one in (f"model.{name}", name) if _has(weights, one)), None)
    if found is None:
        return False
    if np.prod(weights.shape(found), dtype=np.float64) > _MAX_VALUES:
        raise ModelError(f"{name} has more than {_MAX_VALUES} values")
    values = weights.numpy(found)
    most = _MOST if weights.quantization(found) is None else _MOST_QUANTIZED
    return bool(np.count_nonzero(values) >= values.size * (1 - most))


def _has(weights: ModelWeights, name: str) -> bool:
    try:
        weights.shape(name)
    except NotFoundError:
        return False
    return True
