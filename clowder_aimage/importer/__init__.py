"""From a model directory to blobs: inventory -> plan (every decision, no weights) -> write.

What weights are stored as is a recipe; with one, a survey looks at values before the plan, and
``precision`` and ``quantize`` change them while they are written.
"""

from clowder_aimage.formats.diffusers import take_inventory
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.importer.blob_writer import PackedModel, check_config, pack, write_layers
from clowder_aimage.importer.create_plan import CreatePlan, Provenance, make_plan
from clowder_aimage.importer.recipe import Recipe

__all__ = [
    "CreatePlan",
    "Inventory",
    "PackedModel",
    "Provenance",
    "Recipe",
    "check_config",
    "make_plan",
    "pack",
    "take_inventory",
    "write_layers",
]
