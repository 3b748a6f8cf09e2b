"""A model that is packed as few blobs."""

from __future__ import annotations

import shutil
from pathlib import Path

from clowder_aimage.tensor import TensorInfo, encode_header, read_header


def abridge(source: Path, target: Path) -> Path:
    """Copy a model to ``target`` with only one large tensor of each file; return that.

    The tiny model is packed as 12 blobs then instead of 293. It cannot be run.
    """
    shutil.copytree(source, target)
    for path in target.rglob("*.safetensors"):
        data = path.read_bytes()
        with path.open("rb") as file:
            header = read_header(file, len(data))
        name, tensor = max(
            header.tensors.items(),
            key=lambda item: (_can_be_quantized(*item), item[1].nbytes, item[0]),
        )
        head = encode_header([(name, tensor.dtype, tensor.shape)], header.metadata)
        start = header.data_offset + tensor.start
        path.write_bytes(head + data[start : start + tensor.nbytes])
    return target


def _can_be_quantized(name: str, tensor: TensorInfo) -> bool:
    return name.startswith("layers.") and len(tensor.shape) == 2 and tensor.shape[1] % 64 == 0
