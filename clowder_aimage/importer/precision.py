"""Float types: from one to another, and which F32 tensors hold nothing but BF16 values.

Conversions round to nearest, ties to even (IEEE 754-2019, 4.3.1); NaN stays NaN. BF16 has no numpy
type, so it is handled as the upper half of the bits of a float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from clowder_aimage.content.parallel import in_parallel
from clowder_aimage.errors import ModelError
from clowder_aimage.importer.planned_layer import layer_name
from clowder_aimage.importer.recipe import AUTO, DTYPES, Recipe
from clowder_aimage.importer.span_reader import SpanReader
from clowder_aimage.tensor.weight import FLOATS, Weight

CHUNK = 1024 * 1024  # bytes of a source that are looked at or cast at once
CHUNKS = 8 * CHUNK  # of all threads together
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_INFINITY = 0x7F80  # the bits of BF16's, without the sign
_QUIET = 0x0040  # makes a NaN of what would be infinite once its lower half is cut off
_LARGEST = {"F16": "65504", "BF16": "3.39e38", "F32": "3.4e38"}
_WIDER = {
    "F16": "use bf16, which reaches as far as float32",
    "BF16": "use f32, which reaches a little further",
}
Values = npt.NDArray[Any]


def cast(data: memoryview, source: str, target: str) -> tuple[Values, int]:
    """Return values as the bits of ``target``, and the count of finite ones that became infinite.

    ``source`` and ``target`` are dtypes of safetensors; the array has as many words as the input.
    """
    values = np.frombuffer(data, _NUMPY[source])
    if source == target:
        return values, 0
    if (source, target) == ("F32", "BF16"):
        halves = np.frombuffer(data, "<u2")
        if not halves[::2].any():
            return np.ascontiguousarray(halves[1::2]), 0
    with np.errstate(over="ignore", invalid="ignore"):
        wide = widened(values, source)
        narrow = _rounded(wide) if target == "BF16" else wide.astype(_NUMPY[target])
        return narrow, _lost(wide, narrow, target)


def _lost(wide: Values, narrow: Values, target: str) -> int:
    is_infinite = (narrow & 0x7FFF) == _INFINITY if target == "BF16" else np.isinf(narrow)
    return int(np.count_nonzero(is_infinite & np.isfinite(wide))) if is_infinite.any() else 0


def widened(values: Values, dtype: str) -> Values:
    """Return the same values as float32, or as float64 where they were."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values if dtype == "F64" else values.astype(np.float32, copy=False)


def _rounded(values: Values) -> Values:
    bits = (_to_odd(values) if values.dtype == np.float64 else values).view(np.uint32)
    upper = bits >> 16
    rounded = (bits + (0x7FFF + (upper & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    kept = upper | np.where(upper & 0x7F, 0, _QUIET).astype(np.uint32)
    return np.where(is_nan, kept, rounded).astype(np.uint16)


def _to_odd(values: Values) -> Values:
    """Return float32 rounded to odd, so that a second rounding is as exact as one.

    The last bit is set where something was cut off. Source: Boldo and Melquiond, "When double
    rounding is odd".
    """
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32).copy()
    is_inexact = np.isfinite(nearest) & (nearest.astype(np.float64) != values)
    is_above = is_inexact & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    bits -= is_above.astype(np.uint32)
    odd: Values = (bits | is_inexact.astype(np.uint32)).view(np.float32)
    return odd


def overflow(name: str, count: int, target: str) -> ModelError:
    """Return the error for values beyond the range of a type."""
    values = "1 value" if count == 1 else f"{count} values"
    return ModelError(
        f"{values} of {name[:200]} cannot be {target}, which ends at {_LARGEST[target]}",
        hint=_WIDER.get(target, "no type here reaches further: keep it as it is"),
    )


def survey(
    weights: Iterable[tuple[str, Weight]],
    recipe: Recipe,
    *,
    jobs: int,
    on_read: Callable[[int], None],
) -> frozenset[tuple[str, str]]:
    """Look at the values of ``to_survey``, before anything is decided.

    Returns:
        for AUTO, which (component, tensor) in F32 hold BF16 values alone.

    Raises:
        ModelError: a value does not fit F16, where that is asked for.
    """
    stopped = threading.Event()
    exact: set[tuple[str, str]] = set()
    chunk = min(CHUNK, CHUNKS // jobs)

    def look(component: str, weight: Weight) -> None:
        if recipe.dtype != AUTO:
            _check_fits(component, weight, DTYPES["f16"], stopped, chunk)
        elif _is_exact(weight, stopped, chunk):
            exact.add((component, weight.name))
        on_read(weight.nbytes)

    in_parallel([partial(look, *pair) for pair in weights], jobs, stopped.set)
    return frozenset(exact)


def to_survey(weights: Iterable[tuple[str, Weight]], recipe: Recipe) -> list[tuple[str, Weight]]:
    """Return the weights whose values a recipe depends on."""
    if recipe.dtype == AUTO:
        wanted: tuple[str, ...] = ("F32",)
    elif recipe.dtype == "f16":
        wanted = tuple(name for name in FLOATS if name != "F16")
    else:
        wanted = ()
    return [(component, weight) for component, weight in weights if weight.dtype in wanted]


def _is_exact(weight: Weight, stopped: threading.Event, chunk: int) -> bool:
    """Return whether the lower half of every word is zero: such a float32 is a BF16."""
    buffer = memoryview(bytearray(min(chunk, weight.nbytes)))
    with SpanReader(weight.tensor.span, stopped) as reader:
        while count := reader.readinto(buffer):
            if np.frombuffer(buffer[:count], "<u2")[::2].any():
                return False
        reader.check_unchanged()
    return weight.nbytes > 0


def _check_fits(
    component: str, weight: Weight, target: str, stopped: threading.Event, chunk: int
) -> None:
    buffer = memoryview(bytearray(min(chunk, weight.nbytes)))
    lost = 0
    with SpanReader(weight.tensor.span, stopped) as reader:
        while count := reader.readinto(buffer):
            lost += cast(buffer[:count], weight.dtype, target)[1]
    if lost:
        raise overflow(layer_name(component, weight.name), lost, target)
