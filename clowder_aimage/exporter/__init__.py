"""From an AImage in a store to the directory it was made from: plan (every decision) -> write.

Tensors are gathered into the files that the model's library looks for, whole files are written as
they are, and what a neighbour packed into a tar is unpacked.
"""

from clowder_aimage.exporter.blobs import Blobs
from clowder_aimage.exporter.directory import whole_directory
from clowder_aimage.exporter.kind import is_ours
from clowder_aimage.exporter.link import Way
from clowder_aimage.exporter.plan import MLX, MODELOPT, Plan, plan_export
from clowder_aimage.exporter.shard import SHARD
from clowder_aimage.exporter.write import Written, write_files

__all__ = [
    "MLX",
    "MODELOPT",
    "SHARD",
    "Blobs",
    "Plan",
    "Way",
    "Written",
    "is_ours",
    "plan_export",
    "whole_directory",
    "write_files",
]
