"""Artifacts built layer by layer in a store on disk, and a directory to export them to."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.export import ExportSummary, export
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype
from clowder_aimage.tensor import encode_header
from tests.store import unshare

NAME = Reference.parse("model")
KIT = "application/vnd.kitops.modelkit.model.v1.tar"
Tensor = tuple[str, tuple[int, ...], bytes]


def blob(tensors: Mapping[str, Tensor], **metadata: str) -> bytes:
    """Return a safetensors file of one tensor or of a group."""
    header = encode_header([(n, d, s) for n, (d, s, _) in tensors.items()], metadata or None)
    return header + b"".join(data for _, _, data in tensors.values())


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, as read by the reference library."""
    from safetensors import deserialize

    return {
        name: (item["dtype"], tuple(item["shape"]), bytes(item["data"]))
        for name, item in deserialize(path.read_bytes())
    }


def tar_of(*members: tarfile.TarInfo | tuple[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar of these members, with their content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                info = tarfile.TarInfo(member[0])
                info.size, info.mode = len(member[1]), mode
                tar.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def files_in(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@dataclass
class Artifact:
    """An AImage under construction: layers in a store, and its export directory."""

    home: Path
    config: dict[str, Any] = field(default_factory=lambda: {"schemaVersion": 1, "components": {}})
    layers: list[Layer] = field(default_factory=list)

    @property
    def store(self) -> ImageLayout:
        return ImageLayout(self.home / "store")

    @property
    def out(self) -> Path:
        return self.home / "out"

    def add(
        self,
        name: str,
        data: bytes,
        media_type: str = mediatype.AIMAGE_FILE,
        content: bytes | None = None,
    ) -> Layer:
        """Add a layer, with the digest of its decompressed content if given."""
        descriptor = Descriptor.of(media_type, data)
        self.store.push(descriptor, build_bytes_body(data))
        said = None
        if content is not None:
            plain = mediatype.split_compression(media_type)[0]
            said = Descriptor(plain, Digest.of(content), len(content))
        self.layers.append(Layer(descriptor, name, content=said))
        return self.layers[-1]

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor], **metadata: str) -> Layer:
        return self.add(name, blob(tensors, **metadata), mediatype.AIMAGE_SAFETENSORS)

    def add_tar(self, *members: Any, name: str = "kit", packed: bool = False) -> Layer:
        data = tar_of(*members)
        media_type = f"{KIT}+gzip" if packed else KIT
        return self.add(name, gzip.compress(data) if packed else data, media_type)

    def finish(self, dialect: str = "clowder") -> Artifact:
        """Write the manifest and tag it ``model``."""
        aimage = AImage(json.dumps(self.config).encode(), tuple(self.layers))
        manifest, config = DIALECTS[dialect].write(aimage)
        self.store.push(manifest.config, build_bytes_body(config))
        self.store.push(manifest.descriptor, build_bytes_body(manifest.raw), NAME)
        return self

    def export(self, **options: Any) -> ExportSummary:
        return export(self.store, NAME, self.out, **options)

    def exported(self, **options: Any) -> dict[str, bytes]:
        """Export it and return the files."""
        self.export(**options)
        return files_in(self.out)

    def check_nothing_left(self, kept: Iterable[str] = ()) -> None:
        assert sorted(path.name for path in self.home.iterdir()) == sorted(["store", *kept])

    def damage(self, layer: Layer) -> None:
        """Invert the last byte of a blob."""
        path = self.store.find_path(layer.descriptor)
        data = path.read_bytes()
        unshare(path)
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return Artifact(tmp_path / "home")
