"""From an AImage in a store to the directory it was made from: plan (every decision) -> write.

Tensors are gathered into the files that the model's library looks for, whole files are written as
they are, and what a neighbour packed into a tar is unpacked.
"""

from clowder_aimage.exporter.directory import whole_directory
from clowder_aimage.exporter.export_plan import MLX, MODELOPT, ExportPlan, plan_export
from clowder_aimage.exporter.export_writer import ExportedFiles, write_files
from clowder_aimage.exporter.layer_store import LayerStore, is_ours
from clowder_aimage.exporter.output_file import LinkMethod
from clowder_aimage.exporter.weight_file import SHARD

__all__ = [
    "MLX",
    "MODELOPT",
    "SHARD",
    "ExportPlan",
    "ExportedFiles",
    "LayerStore",
    "LinkMethod",
    "is_ours",
    "plan_export",
    "whole_directory",
    "write_files",
]
