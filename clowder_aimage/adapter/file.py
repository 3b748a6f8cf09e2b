"""Files of adapters: safetensors, with peft's configuration in the directory or the header."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.adapter.fit import Shapes, format_base_names
from clowder_aimage.adapter.layer import AdapterLayers, read_layers
from clowder_aimage.adapter.peft_config import CONFIG, WEIGHTS, PeftConfig, parse_metadata
from clowder_aimage.adapter.values import AdapterValues
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import read_header

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# The opcode PROTO of a pickle, and the zip archive of torch.save.
_PICKLES = (b"\x80", b"PK\x03\x04")
_AGAIN = "download the file again"
# Values that an adapter of a small base may have.
_MIN_LIMIT = 1 << 26


@contextmanager
def open_adapter(
    path: Path, label: str, config: Mapping[str, Any] | None = None
) -> Iterator[OpenAdapter]:
    """Open the adapter in a file or in a directory.

    ``config`` is its ``adapter_config.json``, by default that in the file's directory.

    Raises:
        FormatError: It is not a safetensors file or not an adapter, is damaged, incomplete, or of
            an unsupported kind.
        OSError: It cannot be read.
    """
    path, config = _locate(path, label, config)
    with path.open("rb") as file:
        _check_start(label, path, file.read(16))
        file.seek(0)
        try:
            header = read_header(file, path.stat().st_size)
        except FormatError as error:
            raise FormatError(f"{label} is damaged: {error}", hint=_AGAIN) from None
        peft = PeftConfig.parse(config, f"{CONFIG} of {label}") if config is not None else None
        metadata = parse_metadata(header.metadata, label)
        tensors = {name: info.shape for name, info in header.tensors.items()}
        layers = read_layers(label, tensors, peft)
        yield OpenAdapter(label, AdapterValues(label, file, header), layers, peft, metadata)


def _locate(
    path: Path, label: str, config: Mapping[str, Any] | None
) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the file of weights and the configuration of an adapter."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FormatError(
                f"{label} must contain one safetensors file with an adapter, not {len(files)}",
                hint=f"pass the file itself, or keep only {WEIGHTS}",
            )
        path = files[0]
    config_path = path.with_name(CONFIG)
    if config is None and path.name == WEIGHTS and config_path.is_file():
        value = read_json(config_path.read_bytes(), f"{CONFIG} of {label}")
        if not isinstance(value, dict):
            raise FormatError(f"{CONFIG} of {label} is not a JSON object")
        config = value
    return path, config


def _check_start(label: str, path: Path, start: bytes) -> None:
    """Reject pickled and GGUF files by their first bytes. Raises FormatError."""
    if start[8:9] == b"{":
        return
    if path.suffix.lower() in _PICKLED or start.startswith(_PICKLES):
        raise FormatError(
            f"{label} is pickled: loading it can execute arbitrary code, so it is not read",
            hint="convert the adapter to safetensors",
        )
    if start.startswith(b"GGUF"):
        raise FormatError(f"{label} is a GGUF file", hint="use the adapter's safetensors file")


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An open adapter: its values, layers and configurations."""

    label: str
    values: AdapterValues
    content: AdapterLayers
    config: PeftConfig | None
    metadata: Mapping[str, PeftConfig]

    @property
    def base_names(self) -> str:
        """Return the names of its base models in the adapter, for messages."""
        return format_base_names(self.values.header.metadata, self.configs)

    @property
    def configs(self) -> Iterable[PeftConfig]:
        """Return all configurations; the first has precedence."""
        return (*((self.config,) if self.config else ()), *self.metadata.values())

    def check_size(self, shapes: Shapes) -> None:
        """Check that the adapter is not much larger than its base. Raises FormatError."""
        count = sum(math.prod(info.shape) for info in self.values.header.tensors.values())
        limit = max(_MIN_LIMIT, 2 * sum(map(math.prod, shapes.values())))
        if count > limit:
            raise FormatError(
                f"{self.label} has {count} values, more than {limit}: too many for an adapter",
                hint="use an adapter that was made for this base",
            )
