"""A check of requests for pictures by the description of a model: no weights are read."""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import AImageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.adapter_source import AdapterFinder, AdapterSource
from clowder_aimage.model.loader import read_family
from clowder_aimage.model.runnable import open_runnable
from clowder_aimage.oci import Reference

# The components that adapters change
_ADAPTED = ("text_encoder", "transformer")


def check_unloaded(
    store: ImageLayout, stored: StoredAImage, request: GenerateRequest, lora_dir: str | None
) -> None:
    """Reject a request that a model does not support, before it is loaded.

    These are sides, features of other families, and adapters of other models; the loaded model
    checks prompts, pictures and memory, too. What is wrong with the model itself is an error of
    its load.

    Raises:
        UsageError: The model does not support the request.
        NotFoundError, FormatError: An adapter is not there, is damaged, or is for another model.
    """
    try:
        from clowder_aimage.model.flow.family import check_by_family

        family = read_family(store, stored.aimage)
    # Imports of packages that are not installed fail, too
    except (AImageError, ImportError):
        return
    check_by_family(family, request)
    if request.adapters.loras and (shapes := _collect_shapes(stored.aimage)):
        with store.lease() as lease:
            directory = Path(lora_dir) if lora_dir else None

            def open_stored(reference: Reference) -> StoredAImage:
                return open_runnable(store, reference, lease)

            finder = AdapterFinder(store, open_stored, directory)
            source = AdapterSource(finder, store, stored, lambda: shapes)
            source.open(request.adapters.loras)


def _collect_shapes(aimage: AImage) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that adapters change; empty if the manifest lacks some."""
    layers = [
        layer
        for layer in aimage.layers
        if layer.component in _ADAPTED and (layer.is_tensor or layer.is_shard)
    ]
    if any(layer.shape is None for layer in layers):
        return {}
    return {layer.name: layer.shape for layer in layers if layer.shape is not None}
