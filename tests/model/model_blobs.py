"""A model directory as blobs in a temporary store: one blob per tensor and per small file."""

from __future__ import annotations

import json
from pathlib import Path

from clowder_aimage.content.store import Reader, build_bytes_body, build_file_body
from clowder_aimage.dialect import DIALECTS
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.tensor import encode_header, read_header

SMALL = (".json", ".jinja", ".txt")


class FolderStore:
    """The read interface of a content store, over a directory of blobs named by digest."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_path(self, content: Descriptor, /) -> Path:
        path = self.root / content.digest.encoded
        if not path.exists():
            raise NotFoundError(f"no {content.digest}")
        return path

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        file = self.find_path(content).open("rb")
        file.seek(offset)
        return file

    def add(self, media_type: str, data: bytes) -> Descriptor:
        descriptor = Descriptor.of(media_type, data)
        path = self.root / descriptor.digest.encoded
        if not path.exists():
            path.write_bytes(data)
        return descriptor


def import_directory(
    directory: Path, root: Path, *, key: str = "{name}"
) -> tuple[FolderStore, AImage]:
    """Split every safetensors file into blobs below ``root``.

    ``key`` is the name of the tensor inside its blob: ``{name}``, ``{component}/{name}``
    or ``data``.
    """
    root.mkdir(parents=True, exist_ok=True)
    store = FolderStore(root)
    layers: list[Layer] = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.name.endswith(".index.json") or not path.is_file():
            continue
        if path.suffix == ".safetensors":
            layers += tensor_layers(store, path, path.parent.name, key)
        elif path.suffix in SMALL:
            layers.append(Layer(store.add(mediatype.AIMAGE_FILE, path.read_bytes()), name))
    return store, AImage(b"{}", tuple(layers))


def tensor_layers(store: FolderStore, path: Path, component: str, key: str) -> list[Layer]:
    """Return a layer for every tensor of a safetensors file."""
    layers = []
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size)
        for name, info in header.tensors.items():
            file.seek(header.data_offset + info.start)
            inside = key.format(name=name, component=component)
            data = encode_header([(inside, info.dtype, info.shape)]) + file.read(info.nbytes)
            descriptor = store.add(mediatype.AIMAGE_SAFETENSORS, data)
            layers.append(Layer(descriptor, f"{component}/{name}", info.dtype, info.shape))
    return layers


def replace(store: FolderStore, aimage: AImage, name: str, **changes: object) -> AImage:
    """Return the AImage with fields of one JSON file changed, or without the file (no changes)."""
    layers = []
    for layer in aimage.layers:
        if layer.name != name:
            layers.append(layer)
        elif changes:
            value = json.loads(store.find_path(layer.descriptor).read_bytes()) | changes
            data = json.dumps(value).encode()
            layers.append(Layer(store.add(mediatype.AIMAGE_FILE, data), name))
    return AImage(aimage.config, tuple(layers))


def into_layout(store: FolderStore, aimage: AImage, root: Path, name: str) -> None:
    """Write the AImage to an image layout at ``root``, as ``name``."""
    layout = ImageLayout(root)
    for layer in aimage.layers:
        layout.push(layer.descriptor, build_file_body(store.find_path(layer.descriptor)))
    whole = AImage(b'{"schemaVersion":1}', aimage.layers)
    manifest, config = DIALECTS["clowder"].write(whole)
    layout.push(manifest.config, build_bytes_body(config))
    layout.push(manifest.descriptor, build_bytes_body(manifest.raw), Reference.parse(name))
