"""Import of a model directory: inventory -> plan (all decisions, no weights) -> write.

A recipe changes weights: ``precision_scan`` reads values before the plan is made; ``precision``
and ``quantizer`` convert them during the write.
"""

from clowder_aimage.importer.blob_writer import PackedModel, check_config
from clowder_aimage.importer.plan import CreatePlan, Provenance, make_plan
from clowder_aimage.importer.recipe import Recipe

__all__ = ["CreatePlan", "PackedModel", "Provenance", "Recipe", "check_config", "make_plan"]
