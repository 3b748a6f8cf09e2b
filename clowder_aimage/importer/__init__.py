"""From a model directory to blobs: inventory -> plan (every decision, no weights) -> write."""

from clowder_aimage.importer.inventory import Inventory, take_inventory
from clowder_aimage.importer.plan import Plan, Provenance, make_plan
from clowder_aimage.importer.write import write_layers

__all__ = ["Inventory", "Plan", "Provenance", "make_plan", "take_inventory", "write_layers"]
