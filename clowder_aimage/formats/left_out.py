"""Files of a model directory that are not packed, by their names, and the reasons.

Names of copies: transformers and diffusers (``utils/__init__.py``), optimum (``onnx/``,
``openvino/``), Meta and Mistral (``original/``, ``consolidated``). Names of the state of a
training: transformers, trainer.py and trainer_pt_utils.py; accelerate, utils/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

HIDDEN = "hidden"
CACHE = "made by Python or by a file manager"
COPY = "another copy of the weights"
TRAINING = "the state of a training"
STORE = "a store of AImages"
LINK = "a link to a directory"
NAME = "the name cannot be that of a layer"
UNNAMED = "weights that the model's index does not name"
LINK_OUT = "a link that leads out of the directory"
# Pictures are previews of a model, not its content.
MAX_PICTURES = 32
MAX_PICTURE = 16 * 1024 * 1024
MANY_PICTURES = f"more than {MAX_PICTURES} pictures"
LARGE_PICTURE = "a picture of more than 16 MiB"
NO_PICTURE = "named as a picture, but not a PNG, JPEG, WebP or GIF"
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")
# Endings of weights in any format.
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".keras"),
    *(".msgpack", ".ot", ".gguf", ".onnx", ".tflite", ".ort", ".mlmodel", ".npz"),
)
_CACHES = ("__pycache__", "__MACOSX", "Thumbs.db", "desktop.ini")
_COPIES = ("onnx", "openvino", "coreml", "original", "metal")
_COPY = re.compile(
    r"(pytorch_model|tf_model|flax_model|rust_model|diffusion_pytorch_model|diffusion_flax_model"
    r"|openvino_(\w+_)?model|consolidated)\b.*\.(bin|h5|msgpack|ot|pth|xml|safetensors)"
    r"|model(-\d+-of-\d+)?\.\w+(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
    r"|adapter_model\.bin"
)
# Exports of a Transformers model, as repositories of the hub have them at the top.
_EXPORT = re.compile(r"model(_\w+)?\.onnx|(model|\d+)(-\w+)?\.tflite")
_INDEX = re.compile(r".*\.(safetensors|bin|h5|msgpack)\.index(\.\w+)?\.json")
_TRAINING = re.compile(
    r"training_args\.bin|(optimizer|scheduler|sampler)(_\d+)?\.(pt|bin)|scaler\.pt"
    r"|(rng_state|random_states)(_\d+)?\.(pth|pkl)|(trainer_state|all_results|train_results)\.json"
    r"|events\.out\.tfevents\..*"
)
_TRAINING_DIRECTORY = re.compile(r"(checkpoint-|global_step)\d+|wandb|mlruns|lightning_logs")


@dataclass(frozen=True, slots=True, order=True)
class LeftOut:
    """A file that is not packed, or a directory (``path`` ends with a slash), and the reason."""

    path: str
    reason: str


def _find_reason(name: str) -> str:
    """Return the reason to leave out a file or a directory of any model, empty for none."""
    if name.startswith("."):
        return HIDDEN
    is_cached = name in _CACHES or name.endswith((".pyc", ".pyo"))
    return CACHE if is_cached else ""


def is_copy(name: str) -> bool:
    """Return True if a weight file of this name is a copy, if there are others beside it."""
    return _COPY.fullmatch(name) is not None


def is_export(name: str) -> bool:
    """Return True if a file of this name is a Transformers model in another format."""
    return _EXPORT.fullmatch(name) is not None


def is_picture(start: bytes) -> bool:
    """Return True if a file begins as a PNG, JPEG, GIF or WebP picture."""
    is_webp = start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    return is_webp or start.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8"))


def list_extra_pictures(sizes: Mapping[str, int]) -> list[LeftOut]:
    """Return the pictures that are not packed, of all files and their sizes in bytes."""
    names = sorted(name for name in sizes if name.lower().endswith(PICTURE_ENDINGS))
    large = [name for name in names if sizes[name] > MAX_PICTURE]
    many = [name for name in names if name not in large][MAX_PICTURES:]
    reasons = (
        *((name, LARGE_PICTURE) for name in large),
        *((name, MANY_PICTURES) for name in many),
    )
    return [LeftOut(name, reason) for name, reason in reasons]


def divide(names: Iterable[str], packed: Collection[str]) -> tuple[list[str], list[LeftOut]]:
    """Divide the other files of a directory into those that belong to the model, and the rest.

    ``packed`` are the names that the format of the model takes.
    """
    others = sorted(set(names) - set(packed))
    occupied = {directory for name in packed for directory in _list_directories(name)}
    copies = set(_find_copies(others))
    kept: list[str] = []
    left_out: dict[str, LeftOut] = {}
    for name in others:
        path, reason = _judge(name, occupied, copies)
        if reason:
            left_out[path] = LeftOut(path, reason)
        else:
            kept.append(name)
    return kept, [left_out[path] for path in sorted(left_out)]


def _judge(name: str, occupied: Collection[str], copies: Collection[str]) -> tuple[str, str]:
    """Return the path that is left out and the reason, which is empty for a file that is kept."""
    *directories, base = name.split("/")
    for count, directory in enumerate(directories, 1):
        path = "/".join(directories[:count])
        reason = _find_reason(directory)
        if _TRAINING_DIRECTORY.fullmatch(directory):
            reason = TRAINING
        elif path in copies:
            reason = COPY
        if reason and path not in occupied:
            return f"{path}/", reason
    if reason := _find_reason(base) or (TRAINING if _TRAINING.fullmatch(base) else ""):
        return name, reason
    # The weights of another directory than that of the model may be others.
    is_beside = not directories or "/".join(directories) in occupied
    is_other = is_copy(base) or _INDEX.fullmatch(base) is not None
    return name, COPY if is_beside and is_other else ""


def _find_copies(names: Iterable[str]) -> Iterator[str]:
    """Yield the directories of copies that have weights."""
    for name in names:
        if name.lower().endswith(WEIGHTS):
            for directory in _list_directories(name):
                if directory.rpartition("/")[2] in _COPIES:
                    yield directory


def _list_directories(name: str) -> list[str]:
    """Return the directories of a file, the outermost first."""
    return [path.as_posix() for path in reversed(PurePosixPath(name).parents)][1:]
