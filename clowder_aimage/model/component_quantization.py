"""What a component's configuration may say of quantized weights, for those who run it."""

from __future__ import annotations

from clowder_aimage.model.config_fields import ConfigFields
from clowder_aimage.tensor.quantization_config import KEYS, unknown_key


def accept_quantization(fields: ConfigFields) -> None:
    """Read the fields about quantization, if a configuration has them.

    They change nothing here: the blobs say how they are quantized, and the strict load refuses
    whatever is not a weight that can be read.

    Raises:
        ModelError: for a way of quantizing whose tensors cannot be read.
    """
    found = {key: fields.raw(key) for key in KEYS}
    if key := unknown_key(found):
        raise fields.refuse(key, "this quantisation is not supported")
