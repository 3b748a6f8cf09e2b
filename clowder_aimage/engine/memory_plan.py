"""The memory of loaded models: the estimated need of a model, and the models to unload for it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.tensor.weight import FLOATS

MIB = 1 << 20
# The interpreter and the libraries of a process
_PROCESS = 128 * MIB
# Of the weights: for the arrays of a picture, or the caches of texts
_WORK = 0.25
# Bytes of a number in the compute types
_COMPUTED = {"float32": 4, "f32": 4, "bfloat16": 2, "bf16": 2}


def estimate_need(stored: StoredAImage, dtype: str | None) -> int:
    """Return the bytes of memory for a model that computes in ``dtype``; None if it is unknown.

    Float tensors are cast to it; other blobs take their bytes.
    """
    itemsize, size = _COMPUTED.get(dtype or ""), 0
    for layer in stored.aimage.layers:
        if itemsize and layer.dtype in FLOATS and layer.shape is not None:
            size += itemsize * math.prod(layer.shape)
        else:
            size += (layer.content or layer.descriptor).size
    return estimate_need_of_bytes(size)


def estimate_need_of_bytes(size: int) -> int:
    """Return the bytes of memory for a model of which only the bytes of its blobs are known."""
    return _PROCESS + int(size * (1 + _WORK))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model: its need of memory, and if it is idle; ``counts`` for the largest number.

    A model that takes other memory, that of the machine instead of a GPU's, has a need of 0.
    """

    key: Hashable
    need: int
    is_idle: bool
    counts: bool = True


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """The memory for models in bytes and their largest number; None if unlimited or unknown.

    ``free`` is that available to a new process.
    """

    budget: int | None
    free: int | None = None
    models: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The models to unload before a load; ``reserved`` are the bytes that it leaves to others."""

    evicted: tuple[LoadedModel, ...]
    reserved: int


def plan_load(
    model: LoadedModel, loaded: Sequence[LoadedModel], room: MemoryRoom, reserve: int = 0
) -> LoadPlan | None:
    """Plan the load of ``model`` beside ``loaded`` ones, which are in the order of eviction.

    ``reserve``: bytes for a model that may be loaded later, ignored if both do not fit. A model
    that exceeds the budget is loaded alone. Returns None if busy models have to end first.
    """
    if room.budget is not None and model.need + reserve > room.budget:
        reserve = 0
    remaining, evicted = [*loaded], list[LoadedModel]()
    for candidate in loaded:
        if _has_memory(model, remaining, evicted, room, reserve):
            if _has_place(model, remaining, room):
                break
            if not candidate.counts:
                continue
        elif not candidate.need:
            # It takes other memory
            continue
        if candidate.is_idle:
            remaining.remove(candidate)
            evicted.append(candidate)
    if not _has_memory(model, remaining, evicted, room, reserve):
        return None
    if not _has_place(model, remaining, room):
        return None
    return LoadPlan(tuple(evicted), reserve + sum(other.need for other in remaining))


def _has_place(model: LoadedModel, others: Sequence[LoadedModel], room: MemoryRoom) -> bool:
    count = sum(other.counts for other in others)
    return room.models is None or not model.counts or count < room.models


def _has_memory(
    model: LoadedModel,
    others: Sequence[LoadedModel],
    evicted: Sequence[LoadedModel],
    room: MemoryRoom,
    reserve: int,
) -> bool:
    """Return True if a model fits beside others; alone, it is loaded in any case."""
    if not others:
        return True
    needed = model.need + reserve + sum(other.need for other in others)
    is_below = room.budget is None or needed <= room.budget
    freed = sum(other.need for other in evicted)
    return is_below and (room.free is None or model.need <= room.free + freed)
