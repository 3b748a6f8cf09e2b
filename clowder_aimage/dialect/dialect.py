"""The interface of all dialects, and the common form of their manifests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Descriptor, Manifest, mediatype


class Dialect(ABC):
    """A form of an AImage; ``write(read(m, c))`` keeps every blob's digest."""

    name: str
    # The vendor's name, for dialects that are only read.
    product: str

    @abstractmethod
    def matches(self, manifest: Manifest) -> bool:
        """Return True if ``manifest`` is in this dialect."""

    @abstractmethod
    def read(self, manifest: Manifest, config: bytes) -> AImage:
        """Return the AImage of a manifest and the bytes of its config. Raises FormatError."""

    def read_config(self, manifest: Manifest, config: bytes) -> bytes:
        """Return the config of the AImage that ``read`` returns. Raises FormatError."""
        return self.read(manifest, config).config

    def write(self, _: AImage, /) -> tuple[Manifest, bytes]:
        """Return the manifest and the config bytes of an AImage, the same for each call.

        Raises:
            UsageError: this dialect is only read.
            FormatError: the AImage cannot be written in it.
        """
        raise UsageError(
            f"cannot write the {self.name} dialect: {self.product} manifests can only be read",
            hint="other tools also read ModelPacks, which can be written",
            remedy="write_modelpack",
        )


def build_manifest(
    aimage: AImage,
    config_type: str,
    config: bytes,
    layers: list[dict[str, Any]],
    *,
    media_type: str = mediatype.OCI_MANIFEST,
    artifact_type: str = "",
    annotations: dict[str, str] | None = None,
) -> tuple[Manifest, bytes]:
    """Return the manifest of ``aimage`` with that config, and the bytes of the config.

    Raises FormatError: no reader would accept a config of that size.
    """
    if len(config) > MAX_DOCUMENT_SIZE:
        raise FormatError(
            f"a config of {len(config)} bytes is too large: the limit is {MAX_DOCUMENT_SIZE}",
            hint="pack the model into fewer layers, with its experts together",
        )
    document = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "artifactType": artifact_type,
        "config": Descriptor.of(config_type, config, algorithm=aimage.algorithm).to_json(),
        "layers": layers,
        "subject": aimage.subject and aimage.subject.to_json(),
        "annotations": annotations,
    }
    # Strict readers reject empty strings and null. An empty list of layers is required, though.
    fields = {key: value for key, value in document.items() if value or key == "layers"}
    return Manifest.build(fields), config
