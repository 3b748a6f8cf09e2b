"""Scan of values that decisions depend on, where any do. Nothing of numpy is imported before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from clowder_aimage.formats.prequantized import factors
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.importer.span_reader import JOBS, SpanReader
from clowder_aimage.tensor.weight import Weight, WeightReader

OnSurvey = Callable[[int], None]  # bytes


def survey_weights(
    components: Mapping[str, Sequence[Weight]],
    recipe: Recipe,
    jobs: int | None,
    on_survey: OnSurvey,
    on_surveyed: OnSurvey,
) -> frozenset[tuple[str, str]]:
    """Return the (component, tensor) pairs with the property that the recipe asks for.

    See ``precision.survey``. Without a recipe that asks, nothing is imported and nothing read but
    global scales.

    Raises:
        ModelError: a value does not fit the type that is asked for.
        FormatError: a global scale is none.
    """
    pairs = [(name, weight) for name, weights in components.items() for weight in weights]
    for _, weight in pairs:
        _check_factors(weight)
    if recipe.dtype is None:
        return frozenset()
    from clowder_aimage.importer import precision

    recipe.check_components(name for name, weights in components.items() if weights)
    asked = precision.to_survey(pairs, recipe)
    if asked:
        on_survey(sum(weight.nbytes for _, weight in asked))
    return precision.survey(asked, recipe, jobs=jobs or JOBS, on_read=on_surveyed)


def _check_factors(weight: Weight) -> None:
    for part in weight.parts:
        if part.reading is not WeightReader.AS_IS:
            data = memoryview(bytearray(part.tensor.nbytes))
            with SpanReader(part.tensor.span, threading.Event()) as reader:
                reader.readinto(data)
            inverted = part.reading is WeightReader.DIVISOR
            factors(part.tensor.name, bytes(data), part.tensor.dtype, inverted=inverted)
