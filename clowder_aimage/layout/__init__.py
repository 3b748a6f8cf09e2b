"""The OCI image layout (OCI image-spec, image-layout.md), shared by the processes of a node."""

from clowder_aimage.layout.ingest import FileIngest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.layout import ImageLayout

__all__ = ["FileIngest", "ImageLayout", "LayeredStore"]
