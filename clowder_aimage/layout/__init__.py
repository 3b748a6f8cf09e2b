"""The OCI image layout (OCI image-spec, image-layout.md) that the processes of a node share."""

from clowder_aimage.layout.ingest import FileIngest
from clowder_aimage.layout.layout import ImageLayout
from clowder_aimage.layout.stores import Stores

__all__ = ["FileIngest", "ImageLayout", "Stores"]
