"""Media types and annotation keys, as their specifications define them."""

from __future__ import annotations

# OCI image-spec 1.1, media-types.md
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
OCI_LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_TAR_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_LAYER_TAR_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"

# Docker registry, "Image Manifest Version 2, Schema 2"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_MANIFEST_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"

# Clowder's own
AIMAGE_MANIFEST = "application/vnd.clowder.aimage.manifest.v1+json"
AIMAGE_CONFIG = "application/vnd.clowder.aimage.config.v1+json"
AIMAGE_SAFETENSORS = "application/vnd.clowder.aimage.model.safetensors.layer.v1"
AIMAGE_FILE = "application/vnd.clowder.aimage.model.file.layer.v1"
AIMAGE_HEADER = "application/vnd.clowder.aimage.model.header.layer.v1"
AIMAGE_GGUF = "application/vnd.clowder.aimage.model.gguf.layer.v1"
AIMAGE_ONNX = "application/vnd.clowder.aimage.model.onnx.layer.v1"
AIMAGE_TORCHSCRIPT = "application/vnd.clowder.aimage.model.torchscript.layer.v1"
AIMAGE_SAVEDMODEL = "application/vnd.clowder.aimage.model.savedmodel.layer.v1"
AIMAGE_TRANSFORMERS = "application/vnd.clowder.aimage.model.transformers.layer.v1"
AIMAGE_LORA = "application/vnd.clowder.aimage.adapter.lora.layer.v1"
# The config and the artifact type of generated pictures.
AIMAGE_PICTURE = "application/vnd.clowder.aimage.picture.v1"
AIMAGE_PICTURE_CONFIG = "application/vnd.clowder.aimage.picture.config.v1+json"
# The artifact type of the statement from which AImage another one was computed
AIMAGE_DERIVATION = "application/vnd.clowder.aimage.derivation.v1+json"
# Suffixes of the media type of a compressed layer.
COMPRESSIONS = ("gzip", "zstd")

# Signatures: a bundle of sigstore, and cosign's form before version 3
SIGSTORE_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
SIMPLE_SIGNING = "application/vnd.dev.cosign.simplesigning.v1+json"

# ollama's tensor models
OLLAMA_TENSOR = "application/vnd.ollama.image.tensor"
OLLAMA_JSON = "application/vnd.ollama.image.json"
# The first generation, which is never written.
OLLAMA_CONFIG = "application/vnd.ollama.image.config"

MANIFESTS = frozenset({OCI_MANIFEST, DOCKER_MANIFEST, AIMAGE_MANIFEST})
INDEXES = frozenset({OCI_INDEX, DOCKER_MANIFEST_LIST})
DOCUMENTS = MANIFESTS | INDEXES

# Annotations of a layer of an AImage
NAME = "vnd.clowder.aimage.name"
# Marks an entry of index.json whose blobs may be missing.
PARTIAL = "vnd.clowder.aimage.partial"
DTYPE = "vnd.clowder.aimage.dtype"
SHAPE = "vnd.clowder.aimage.shape"
MEDIATYPE = "vnd.clowder.aimage.mediatype"
# The digest and size of a compressed layer's content.
CONTENT_DIGEST = "vnd.clowder.aimage.content.digest"
CONTENT_SIZE = "vnd.clowder.aimage.content.size"

# Annotation of a manifest in an index, or of the manifest itself
VARIANT = "vnd.clowder.aimage.variant"

# Annotations of an entry of index.json
REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
# The key in Clowder's first documents. It is never written.
CONTAINERD_NAME_MISSPELT = "io.containerd.image.namename"
CREATED = "org.opencontainers.image.created"
LICENSES = "org.opencontainers.image.licenses"
TITLE = "org.opencontainers.image.title"
# Of layers that are pictures: IPTC's source type, the software, and the signer whom they name
SOURCE_TYPE = "vnd.clowder.aimage.picture.source-type"
SOFTWARE_AGENT = "vnd.clowder.aimage.picture.software-agent"
SIGNER = "vnd.clowder.aimage.picture.signer"


def is_ours(media_type: str) -> bool:
    """Return True if a media type is one of Clowder's."""
    return media_type.startswith("application/vnd.clowder.aimage.")


def is_own_key(key: str) -> bool:
    """Return True if the key of an annotation is one of Clowder's."""
    return key.startswith("vnd.clowder.aimage.")


def split_compression(media_type: str) -> tuple[str, str]:
    """Split a media type into its base and its compression (``gzip``, ``zstd`` or nothing)."""
    base, plus, suffix = media_type.rpartition("+")
    return (base, suffix) if plus and suffix in COMPRESSIONS else (media_type, "")
