"""The kind of a file in a ModelPack: weights, their configuration, documentation, code or data.

The kinds: modelpack/model-spec, specs-go/v1/mediatype.go (158c46c73bd8). The specification names
examples only. The endings of weights are those of the libraries that write them, as in the
reference implementation (modelpack/modctl, pkg/modelfile/constants.go, 0730333eadd6).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from clowder_aimage.dialect.aimage import Layer
from clowder_aimage.dialect.vendor import FORMATS
from clowder_aimage.oci import mediatype

WEIGHT, CONFIG, DOC, CODE, DATASET = "weight", "weight.config", "doc", "code", "dataset"
# Bytes: a larger file of an unknown kind has weights, since configuration is text. modctl takes
# 128 MiB, and names smaller weights of unknown libraries code.
LARGE = 1024 * 1024

_WEIGHT_TYPES = {
    *FORMATS,
    mediatype.AIMAGE_SAFETENSORS,
    mediatype.AIMAGE_TORCHSCRIPT,
    mediatype.AIMAGE_SAVEDMODEL,
}
_TEXTS = (".json", ".txt", ".jinja")
# The first pattern that matches decides, without regard to case.
_PATTERNS = (
    (DOC, ("readme*", "license*", "licence*", "notice*", "copying*", "*.md", "*.pdf", "*.rst")),
    (CODE, ("requirements*.txt", "pyproject.toml", "dockerfile*", "makefile*")),
    (CONFIG, ("*.json", "*.jsonl", "*.txt", "*.jinja", "*.yaml", "*.yml", "*.toml", "*.model")),
    (CODE, ("*.py", "*.sh", "*.ipynb", "*.js", "*.c", "*.h", "*.cc", "*.cpp", "*.cu", "*.so")),
    (DATASET, ("*.csv", "*.tsv", "*.parquet", "*.arrow")),
    (DOC, ("*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg", "*.mp4", "*.html")),
    (WEIGHT, ("*.safetensors", "*.gguf", "*.ggml", "*.ggmf", "*.ggjt", "*.llamafile")),
    (WEIGHT, ("*.q[0-9]_*", "*.f16", "*.f32", "*.rknn", "*.rkllm", "*.task", "*.litertlm")),
    (WEIGHT, ("*.bin", "*.pt", "*.pth", "*.pt2", "*.ptl", "*.pte", "*.ts", "*.torchscript")),
    (WEIGHT, ("*.ckpt", "*.checkpoint", "*.distcp", "*.pkl", "*.pickle", "*.joblib", "*.mar")),
    (WEIGHT, ("*.onnx", "*.onnx_data*", "*.onnx.data*", "*.ort", "*.data", "*.weight")),
    (WEIGHT, ("*.h5", "*.hdf", "*.hdf5", "*.keras", "*.tflite", "*.pb", "*.data-?????-of-?????")),
    (WEIGHT, ("variables.index", "*.ckpt*.index", "*.ckpt*.meta", "*.msgpack", "*.ot")),
    (WEIGHT, ("*.npy", "*.npz", "*.engine", "*.plan", "*.trt", "*.mlmodel", "*.weights")),
    (WEIGHT, ("*.ftz", "*.th", "*.pth.tar", "*.mnn", "*.dlc", "*.wts", "*.dduf", "*.safetensors*")),
    (WEIGHT, ("*.gguf*", "*.params", "*.weights*")),
    (WEIGHT, ("*.pdparams", "*.pdiparams", "*.nemo", "*.caffemodel", "*.tensors", "*.tensor")),
)


def select_kind(layer: Layer) -> str:
    """Return the kind of a layer, by its media type, else by the name and the size of its file."""
    base, _ = mediatype.split_compression(layer.descriptor.media_type)
    file_name = layer.name.rpartition("/")[2].lower()
    if base in _WEIGHT_TYPES:
        # The index of shards has the media type of the shards.
        return CONFIG if file_name.endswith(_TEXTS) else WEIGHT
    if base == mediatype.AIMAGE_HEADER:
        # It may have the name of a weight file, but has no weights.
        return CONFIG
    return _match_name(file_name) or (WEIGHT if layer.descriptor.size >= LARGE else CONFIG)


def _match_name(file_name: str) -> str | None:
    """Return the kind that a name in lower case states."""
    for kind, patterns in _PATTERNS:
        if any(fnmatchcase(file_name, pattern) for pattern in patterns):
            return kind
    return None
