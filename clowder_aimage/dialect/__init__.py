"""The forms of an AImage as a manifest; the blobs are the same in all."""

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.dialect.clowder import ClowderDialect
from clowder_aimage.dialect.container import ContainerDialect
from clowder_aimage.dialect.dialect import Dialect
from clowder_aimage.dialect.docker import DockerDialect
from clowder_aimage.dialect.kitops import KitOpsDialect
from clowder_aimage.dialect.modelpack import ModelPackDialect
from clowder_aimage.dialect.ollama import OllamaDialect
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Manifest, mediatype

# The dialects that are written.
DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        ClowderDialect(custom=True),
        ClowderDialect(),
        OllamaDialect(),
        ContainerDialect(),
        ModelPackDialect(),
    )
}
# From the most precise to the most widely accepted one; ModelPack, which is another kind of
# artifact, is written on request only.
FALLBACK_ORDER = ("custom", "clowder", "ollama", "container")
# All that are read, in order of detection: many artifacts look like a container.
READABLE: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        *(DIALECTS[name] for name in ("custom", "clowder", "ollama", "modelpack")),
        DockerDialect(),
        KitOpsDialect(),
        DIALECTS["container"],
    )
}
DEFAULT = "clowder"
_SIGNATURES = (mediatype.SIGSTORE_BUNDLE, mediatype.SIMPLE_SIGNING)


def detect(manifest: Manifest) -> Dialect:
    """Return the dialect of ``manifest``.

    Raises:
        FormatError: it is not an AImage in any known dialect.
    """
    # No policy decides about a signature: one with layers of an AImage would be a way around it.
    if any(layer.media_type in _SIGNATURES for layer in manifest.layers):
        raise FormatError(f"{manifest.digest} is not an AImage: it has layers of a signature")
    for dialect in READABLE.values():
        if dialect.matches(manifest):
            return dialect
    kind = manifest.artifact_type or manifest.config.media_type or manifest.media_type
    raise FormatError(
        f"{manifest.digest} is not an AImage ({kind[:100]})",
        hint="it can be pulled, pushed and listed, but not run or rewritten",
        remedy="not_an_aimage",
    )


__all__ = [
    "DEFAULT",
    "DIALECTS",
    "FALLBACK_ORDER",
    "READABLE",
    "AImage",
    "Dialect",
    "Layer",
    "detect",
]
