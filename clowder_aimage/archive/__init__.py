"""An OCI image layout in a tar (OCI image-spec, image-layout.md): written and read as a stream."""

from clowder_aimage.archive.load import Loaded, load
from clowder_aimage.archive.save import Saved, save

__all__ = ["Loaded", "Saved", "load", "save"]
