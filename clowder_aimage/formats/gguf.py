"""GGUF: a single file, the parts of a split model, or a directory with a model and its projector.

Format: ggml-org/ggml, docs/gguf.md; of split models ggml-org/llama.cpp, tools/gguf-split and
src/llama-model-loader.cpp (``split.no``, ``split.count``, ``split.tensors.count``); of adapters
src/llama-adapter.cpp; of file types gguf-py/gguf/constants.py (LlamaFileType).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.gguf_header import GgufHeader, GgufTensor, read_header
from clowder_aimage.formats.inventory import Inventory, clean_text
from clowder_aimage.oci import mediatype

FORMAT = "gguf"
ENDING = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.DOTALL)
_ONE = "pass the file of one model"
# Names in a message.
_SHOWN = 5

# enum llama_ftype, general.file_type: the type of most tensors, without ALL_ and MOSTLY_
_FILES = (
    "F32 F16 Q4_0 Q4_1 Q4_1_SOME_F16 Q4_2 Q4_3 Q8_0 Q5_0 Q5_1 "
    "Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K "
    "IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M "
    "BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0"
)
FILES = dict(enumerate(_FILES.split()))
# A flag of general.file_type: the writer guessed the type. It has no meaning without a type.
GUESSED = 1024


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A whole model: its files and their headers, in order."""

    files: tuple[model_tree.SourceFile, ...]
    headers: tuple[GgufHeader, ...]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.headers[0].metadata

    @property
    def tensors(self) -> Iterable[GgufTensor]:
        return (tensor for header in self.headers for tensor in header.tensors)

    @property
    def is_adapter(self) -> bool:
        return self.metadata.get("general.type") == "adapter"

    @property
    def is_projector(self) -> bool:
        """Return True for a projector, the image or audio encoder of another model."""
        is_clip = self.metadata.get("general.architecture") == "clip"
        return is_clip or self.metadata.get("general.type") == "mmproj"


def take(path: Path) -> Inventory:
    """Return the model in a file, in all parts of a split model, or in a directory.

    Raises:
        FormatError: A file is not valid GGUF, or the parts do not belong together.
        ModelError: A part is missing, or there is no model.
        UsageError: The directory holds several models.
    """
    with model_tree.reading(path):
        if path.is_dir():
            return _take_directory(path)
        return _build_inventory(read_model(path), (), None)


def _take_directory(root: Path) -> Inventory:
    files = model_tree.list_directory(model_tree.find_boundary(root), root)
    paths = [path for path in files if path.suffix.lower() == ENDING]
    if not paths:
        raise ModelError(f"no GGUF file found in {root}")
    # One file of each model: read_model adds the other parts.
    first_files: dict[str, Path] = {}
    for path in paths:
        match = PART.fullmatch(path.name)
        first_files.setdefault(f"{match['stem']}-{match['total']}" if match else path.name, path)
    models = [read_model(path) for path in first_files.values()]
    projectors = [model for model in models if model.is_projector]
    candidates = [model for model in models if not model.is_projector] or projectors
    if len(candidates) > 1:
        names = ", ".join(model.files[0].name for model in candidates[:_SHOWN])
        raise UsageError(
            f"{root} contains {len(candidates)} GGUF models: {names}",
            hint=_ONE,
            remedy="whole_files",
            other=_ONE,
        )
    companions = [model for model in projectors if model is not candidates[0]]
    return _build_inventory(candidates[0], companions, model_tree.read_license(root))


def _build_inventory(
    model: GgufModel, projectors: Sequence[GgufModel], licence: str | None
) -> Inventory:
    metadata = model.metadata
    tensors = [tensor for member in (model, *projectors) for tensor in member.tensors]
    architecture = clean_text(metadata.get("general.architecture"))
    context = metadata.get(f"{architecture}.context_length")
    facts = {
        "architecture": architecture,
        "name": clean_text(metadata.get("general.name")),
        "parameters": sum(tensor.elements for tensor in tensors) or None,
        "quantization": resolve_quantization(metadata, model.tensors),
        "context": context if type(context) is int and context > 0 else None,
        "adapter": _build_adapter_facts(model) if model.is_adapter else None,
    }
    files = [file for member in (model, *projectors) for file in member.files]
    stated, name = (clean_text(metadata.get(f"general.license{key}")) for key in ("", ".name"))
    licence = model_tree.name_license(stated, name) or licence
    return Inventory.of_files(FORMAT, files, facts, licence)


def resolve_quantization(metadata: Mapping[str, Any], tensors: Iterable[GgufTensor]) -> str | None:
    """Return the stated type of most tensors, else the type of most elements."""
    # bool is a subclass of int, hence the exact comparison of types.
    stated = metadata.get("general.file_type")
    if type(stated) is int and stated != GUESSED and (name := FILES.get(stated & ~GUESSED)):
        return name
    count = Counter[str]()
    for tensor in tensors:
        count[tensor.type] += tensor.elements
    return max(sorted(count), key=lambda kind: count[kind], default=None)


def _build_adapter_facts(model: GgufModel) -> dict[str, Any]:
    metadata = model.metadata
    path, kind = model.files[0].path, metadata.get("adapter.type")
    if kind != "lora":
        raise ModelError(f"{path}: unsupported adapter type {kind!r:.60}")
    alpha = metadata.get("adapter.lora.alpha")
    if alpha is not None and (type(alpha) not in (int, float) or not math.isfinite(alpha)):
        raise FormatError(f"{path}: adapter.lora.alpha is not a number: {alpha!r:.60}")
    ups = [tensor for tensor in model.tensors if _is_up(tensor)]
    ranks = {tensor.shape[0] for tensor in ups}
    targets = {tensor.name.split(".")[-3] for tensor in ups}
    facts = {
        "type": "lora",
        "rank": max(ranks) or None if len(ranks) == 1 else None,
        "alpha": int(alpha) if alpha is not None and alpha == int(alpha) else alpha,
        "targets": sorted(targets) or None,
        "base": clean_text(metadata.get("general.base_model.0.name")),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _is_up(tensor: GgufTensor) -> bool:
    # ``blk.0.attn_q.weight.lora_b``: the length of its rows is the rank.
    return tensor.name.count(".") >= 2 and tensor.name.endswith(".lora_b") and bool(tensor.shape)


def read_model(path: Path) -> GgufModel:
    """Return the headers of a file, or of all parts of a split model.

    Raises:
        FormatError: A file is not valid GGUF, a part is missing, or the parts do not fit.
        ModelError: The number of a part is invalid.
    """
    match = PART.fullmatch(path.name)
    paths = _list_parts(path, match) if match else [path]
    files, headers = [], []
    for part_path in paths:
        # The user's path may be a link to anywhere; the other parts must be in its directory.
        root = None if part_path == path else path.parent
        file = model_tree.build_source_file(root, part_path, part_path.name, mediatype.AIMAGE_GGUF)
        with model_tree.naming(part_path), part_path.open("rb", buffering=1 << 16) as opened:
            headers.append(read_header(opened, file.size))
        files.append(file)
    _check_parts(paths, headers)
    model = GgufModel(tuple(files), tuple(headers))
    if not model.is_adapter:
        return model
    adapters = (replace(file, media_type=mediatype.AIMAGE_LORA) for file in files)
    return replace(model, files=tuple(adapters))


def _list_parts(path: Path, match: re.Match[str]) -> list[Path]:
    total = int(match["total"])
    if not 1 <= int(match["number"]) <= total:
        raise ModelError(f"{path}: invalid part number {int(match['number'])} of {total}")
    names = [f"{match['stem']}-{number:05}-of-{total:05}{ENDING}" for number in range(1, total + 1)]
    paths = [path.parent / name for name in names]
    if missing := [part_path.name for part_path in paths if not part_path.exists()]:
        remainder = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise FormatError(
            f"{path} is one of {total} parts, and these are missing: "
            f"{', '.join(missing[:_SHOWN])}{remainder}",
            hint=model_tree.MODEL_AGAIN,
        )
    return paths


def _check_parts(paths: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        stated = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if stated != (len(paths), number):
            raise FormatError(
                f"{path}: its metadata has part {stated[1]!r:.20} (from 0) of {stated[0]!r:.20}, "
                f"its name part {number} of {len(paths)}",
                hint="restore the original names of the parts",
            )
    tensors = [tensor.name for header in headers for tensor in header.tensors]
    for path, header in zip(paths, headers, strict=True):
        count = header.metadata.get("split.tensors.count", len(tensors))
        if count != len(tensors):
            raise FormatError(
                f"{path}: split.tensors.count is {count!r:.20}, the parts contain {len(tensors)}",
                hint=model_tree.MODEL_AGAIN,
            )
    if len(set(tensors)) < len(tensors):
        raise FormatError(f"duplicate tensor in the parts of {paths[0]}")
