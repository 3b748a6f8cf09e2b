"""An OCI image layout in a tar (OCI image-spec, image-layout.md): written and read as a stream."""

from clowder_aimage.archive.load import LoadResult, load
from clowder_aimage.archive.save import SaveResult, save

__all__ = ["LoadResult", "SaveResult", "load", "save"]
