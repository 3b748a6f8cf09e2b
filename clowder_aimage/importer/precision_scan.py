"""Scan of the values that decisions depend on. numpy is imported only if there are any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from clowder_aimage.content.parallel import in_parallel
from clowder_aimage.formats.prequantized import factors
from clowder_aimage.importer.planned_layer import layer_name
from clowder_aimage.importer.recipe import AUTO, DTYPES, Recipe
from clowder_aimage.importer.span_reader import JOBS, SpanReader
from clowder_aimage.tensor.weight import Weight, WeightReader

CHUNK = 1024 * 1024  # bytes of a source that are scanned at a time
CHUNKS = 8 * CHUNK  # for all threads together
_ASKED = {AUTO: ("F32",), "f16": ("F64", "F32", "BF16")}  # values that a recipe depends on
OnSurvey = Callable[[int], None]  # bytes


def survey_weights(
    components: Mapping[str, Sequence[Weight]],
    recipe: Recipe,
    jobs: int | None,
    on_survey: OnSurvey,
    on_surveyed: OnSurvey,
) -> frozenset[tuple[str, str]]:
    """Return the (component, tensor) pairs of F32 tensors with only BF16 values, for AUTO.

    For a recipe that depends on no values, only global scales are read.

    Raises:
        ModelError: A value does not fit F16, if requested.
        FormatError: A global scale is invalid.
    """
    pairs = [(name, weight) for name, weights in components.items() for weight in weights]
    for _, weight in pairs:
        _check_factors(weight)
    if recipe.dtype is None:
        return frozenset()
    recipe.check_components(name for name, weights in components.items() if weights)
    asked = [pair for pair in pairs if pair[1].dtype in _ASKED.get(recipe.dtype, ())]
    if asked:
        on_survey(sum(weight.nbytes for _, weight in asked))
    stopped = threading.Event()
    exact: set[tuple[str, str]] = set()
    jobs = jobs or JOBS

    def look(component: str, weight: Weight) -> None:
        chunks = _chunks(weight, stopped, min(CHUNK, CHUNKS // jobs))
        if recipe.dtype != AUTO:
            _check_fits(component, weight, chunks)
        elif weight.nbytes and _are_bf16(chunks):
            exact.add((component, weight.name))
        on_surveyed(weight.nbytes)

    in_parallel([partial(look, *pair) for pair in asked], jobs, stopped.set)
    return frozenset(exact)


def _chunks(weight: Weight, stopped: threading.Event, size: int) -> Iterator[memoryview]:
    with SpanReader(weight.tensor.file_range, stopped) as reader:
        yield from reader.chunks(size)
        reader.check_unchanged()


def _are_bf16(chunks: Iterator[memoryview]) -> bool:
    from clowder_aimage.importer import precision

    return all(map(precision.is_bf16, chunks))


def _check_fits(component: str, weight: Weight, chunks: Iterator[memoryview]) -> None:
    from clowder_aimage.importer import precision

    target = DTYPES["f16"]
    lost = sum(precision.cast(data, weight.dtype, target)[1] for data in chunks)
    if lost:
        raise precision.overflow(layer_name(component, weight.name), lost, target)


def _check_factors(weight: Weight) -> None:
    for part in weight.parts:
        if part.reading is not WeightReader.AS_IS:
            with SpanReader(part.tensor.file_range, threading.Event()) as reader:
                factors(part, reader.read())
