"""Scan of values for decisions that depend on them. numpy is imported only for a scan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.formats.prequantized import convert_factors
from clowder_aimage.importer.planned_layer import join_name
from clowder_aimage.importer.range_reader import THREADS, RangeReader
from clowder_aimage.importer.recipe import AUTO, DTYPES, Recipe
from clowder_aimage.tensor.weight import Weight, WeightReader

# Bytes of a source that a thread scans at a time, and all threads together.
CHUNK = 1024 * 1024
CHUNKS = 8 * CHUNK
# Dtypes of the values that a recipe depends on.
_SURVEYED = {AUTO: ("F32",), "f16": ("F64", "F32", "BF16")}
OnSurvey = Callable[[int], None]  # bytes


def survey_weights(
    components: Mapping[str, Sequence[Weight]],
    recipe: Recipe,
    threads: int | None,
    on_survey: OnSurvey,
    on_surveyed: OnSurvey,
    *,
    checks_fit: bool = True,
) -> frozenset[tuple[str, str]]:
    """Return the (component, tensor) pairs of F32 tensors with only BF16 values, for AUTO.

    Only global scales are read for a recipe that does not depend on values. Without ``checks_fit``
    that values fit F16 is left to the encoder.

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
    dtypes = _SURVEYED.get(recipe.dtype, ()) if checks_fit or recipe.dtype == AUTO else ()
    selected = [pair for pair in pairs if pair[1].dtype in dtypes]
    if selected:
        on_survey(sum(weight.nbytes for _, weight in selected))
    stopped = threading.Event()
    exact: set[tuple[str, str]] = set()
    threads = threads or THREADS

    def survey(component: str, weight: Weight) -> None:
        chunks = _iter_chunks(weight, stopped, min(CHUNK, CHUNKS // threads))
        if recipe.dtype != AUTO:
            _check_fits(component, weight, chunks)
        elif weight.nbytes and _are_bf16(chunks):
            exact.add((component, weight.name))
        on_surveyed(weight.nbytes)

    run_parallel([partial(survey, *pair) for pair in selected], threads, stopped.set)
    return frozenset(exact)


def _iter_chunks(weight: Weight, stopped: threading.Event, size: int) -> Iterator[memoryview]:
    with RangeReader(weight.tensor.file_range, stopped) as reader:
        yield from reader.iter_chunks(size)
        reader.check_unchanged()


def _are_bf16(chunks: Iterator[memoryview]) -> bool:
    from clowder_aimage.importer import precision

    return all(map(precision.is_bf16, chunks))


def _check_fits(component: str, weight: Weight, chunks: Iterator[memoryview]) -> None:
    from clowder_aimage.importer import precision

    target = DTYPES["f16"]
    lost = sum(precision.cast(data, weight.dtype, target)[1] for data in chunks)
    if lost:
        raise precision.build_overflow_error(join_name(component, weight.name), lost, target)


def _check_factors(weight: Weight) -> None:
    for chunk in weight.parts:
        if chunk.reading is not WeightReader.AS_IS:
            with RangeReader(chunk.tensor.file_range, threading.Event()) as reader:
                convert_factors(chunk, reader.read())
