"""OCI values: validated when parsed, immutable, standard library only."""

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.oci.descriptor import Descriptor
from clowder_aimage.oci.digest import Digest
from clowder_aimage.oci.manifest import MAX_MANIFEST_SIZE, Index, Manifest, parse_document
from clowder_aimage.oci.reference import Reference

__all__ = [
    "MAX_MANIFEST_SIZE",
    "Descriptor",
    "Digest",
    "Index",
    "Manifest",
    "Reference",
    "parse_document",
    "read_json",
]
