"""Files of adapters: safetensors, with the configuration of peft beside them or in the header."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.adapter.fit import Shapes, told_base
from clowder_aimage.adapter.layer import AdapterLayers, read_layers
from clowder_aimage.adapter.peft_config import CONFIG, WEIGHTS, PeftConfig, parse_metadata
from clowder_aimage.adapter.values import AdapterValues
from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import read_header

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLES = (b"\x80", b"PK\x03\x04")
_AGAIN = "download the file again"
_LEAST = 1 << 26  # values that an adapter of a small base may have


@contextmanager
def open_adapter(
    path: Path, what: str, config: Mapping[str, Any] | None = None
) -> Iterator[OpenAdapter]:
    """Open the adapter in a file or in a directory; its base may be unknown.

    ``config`` is its ``adapter_config.json``, if it is not beside the file.

    Raises:
        FormatError: It is not a safetensors file or not an adapter, is damaged, incomplete, or of a
            kind that cannot be read.
        OSError: It cannot be read.
    """
    path, config = _locate(path, what, config)
    with path.open("rb") as file:
        _check_start(what, path, file.read(16))
        file.seek(0)
        try:
            header = read_header(file, path.stat().st_size)
        except FormatError as error:
            raise FormatError(f"{what} is damaged: {error}", hint=_AGAIN) from None
        peft = PeftConfig.parse(config, f"{CONFIG} of {what}") if config is not None else None
        metadata = parse_metadata(header.metadata, what)
        tensors = {name: info.shape for name, info in header.tensors.items()}
        found = read_layers(what, tensors, peft)
        yield OpenAdapter(what, AdapterValues(what, file, header), found, peft, metadata)


def _locate(
    path: Path, what: str, config: Mapping[str, Any] | None
) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the file of weights and the configuration of an adapter."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise FormatError(
                f"{what} must contain one safetensors file with an adapter, not {len(files)}",
                hint=f"pass the file itself, or keep only {WEIGHTS}",
            )
        path = files[0]
    beside = path.with_name(CONFIG)
    if config is None and path.name == WEIGHTS and beside.is_file():
        value = read_json(beside.read_bytes(), f"{CONFIG} of {what}")
        if not isinstance(value, dict):
            raise FormatError(f"{CONFIG} of {what} is not a JSON object")
        config = value
    return path, config


def _check_start(what: str, path: Path, start: bytes) -> None:
    """Check that a file begins as safetensors, if it begins as another known format."""
    if start[8:9] == b"{":
        return
    if path.suffix.lower() in _PICKLED or start.startswith(_PICKLES):
        raise FormatError(
            f"{what} is pickled: loading it can execute arbitrary code, so it is not read",
            hint="convert the adapter to safetensors",
        )
    if start.startswith(b"GGUF"):
        raise FormatError(f"{what} is a GGUF file", hint="use the adapter's safetensors file")


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An open adapter: its values, layers and configurations."""

    what: str
    values: AdapterValues
    found: AdapterLayers
    config: PeftConfig | None
    metadata: Mapping[str, PeftConfig]

    @property
    def told(self) -> str:
        """The bases that the adapter names."""
        return told_base(self.values.header.metadata, self.configs())

    def configs(self) -> Iterable[PeftConfig]:
        """Return all configurations, the first of which counts."""
        return (*((self.config,) if self.config else ()), *self.metadata.values())

    def check_size(self, shapes: Shapes) -> None:
        """Check that the adapter is not much larger than its base. Raises FormatError."""
        count = sum(math.prod(info.shape) for info in self.values.header.tensors.values())
        limit = max(_LEAST, 2 * sum(map(math.prod, shapes.values())))
        if count > limit:
            raise FormatError(
                f"{self.what} has {count} values, more than {limit}: too many for an adapter",
                hint="use an adapter that was made for this base",
            )
