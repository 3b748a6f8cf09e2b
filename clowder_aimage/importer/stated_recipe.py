"""Recipes as statements of derivations have them, and the arithmetic that they mean.

A specification is a name of arithmetic with the same bytes on every machine. Quantization here is
that of MLX on the CPU, and numpy's. MLX on a GPU rounds ties the other way, so that 2 to 4 of 1,000
codes differ: a program that quantizes so has to state another specification.
"""

from __future__ import annotations

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.oci import Digest
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.quantization import FP8
from clowder_aimage.trust.lineage import ComponentType, Derivation, DerivationRecipe, Operation

# Casts round to the nearest value, and ties to even
ROUND = "round-v1"
# Changes are summed in float32, and rounded once; quantized weights as in the base
FUSE = "fuse-v1"
# No value is computed
COPY = "copy-v1"


def state_conversion(parent: Digest, recipe: Recipe, *, is_variant: bool) -> Derivation:
    """Return the derivation of a conversion."""
    components = {
        component: ComponentType(
            _name_type(chosen), chosen.group_size if chosen.type.has_bias else None
        )
        for component, chosen in recipe.quantize.items()
    }
    operation = Operation.QUANTIZE if components else Operation.CAST
    stated = DerivationRecipe(operation, recipe.dtype, components, is_variant=is_variant)
    return state(parent, stated)


def state(parent: Digest, recipe: DerivationRecipe) -> Derivation:
    """Return the derivation by a recipe, with its specification."""
    return Derivation(parent, recipe, name_specification(recipe))


def name_specification(recipe: DerivationRecipe) -> str:
    """Return the name of the arithmetic of a recipe here. Raises FormatError."""
    if recipe.operation is Operation.FUSE:
        return FUSE
    if recipe.operation in (Operation.ADAPT, Operation.EXTRACT):
        return COPY
    names = {ROUND} if recipe.dtype is not None else set()
    for chosen in restore_recipe(recipe).quantize.values():
        kind = "affine" if chosen.type.has_bias else _name_type(chosen)
        names.add(f"{kind}-v1")
    return "+".join(sorted(names))


def _name_type(quantization: Quantization) -> str:
    return FP8 if quantization.is_by_row else quantization.type.name


def restore_recipe(stated: DerivationRecipe) -> Recipe:
    """Return the recipe of a conversion. Raises FormatError: it is not one of this program."""
    try:
        quantize = dict[str, Quantization]()
        for name, chosen in stated.components.items():
            quantize |= Recipe.parse(None, f"{name}={chosen.type}", chosen.group_size).quantize
        recipe = Recipe(Recipe.parse(stated.dtype).dtype, quantize)
    except UsageError as error:
        raise FormatError(f"its recipe is unknown here: {error.message}") from None
    if not recipe.changes:
        raise FormatError("its recipe changes nothing")
    if (stated.operation is Operation.QUANTIZE) != bool(quantize):
        raise FormatError(f"its recipe is not one to {stated.operation}")
    return recipe
