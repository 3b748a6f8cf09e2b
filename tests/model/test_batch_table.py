"""The table of batches: what is measured, and what follows for a size."""

from __future__ import annotations

import pytest

from clowder_aimage.engine.settings import Settings
from clowder_aimage.errors import ModelError, NoMemoryError, UsageError
from clowder_aimage.model.batch_table import BatchTable, measure_table, parse_batch
from clowder_aimage.model.library_choice import MLX, TORCH, TorchTuning

# Milliseconds of a pass of an H100, alone and of each of several: Z-Image in fp8
H100 = {512: (20.2, 17.5, 15.0, 14.6), 768: (43, 42, 41.5, 41)}
H100 |= {1024: (69.4, 67.5, 66.3, 66.0)}


def test_the_table_follows_from_the_times_of_the_device() -> None:
    timed = []

    def time_passes(side: int, count: int) -> float:
        timed.append((side, count))
        return count * H100[side][(1, 2, 4, 8).index(count)] / 1000

    table, is_final = measure_table(time_passes)
    assert is_final
    assert table.limits == {512**2: 4}
    # Larger pictures keep the device as busy as those of 768
    assert timed[-2:] == [(768, 1), (768, 2)]
    assert [table.get_limit(side**2) for side in (64, 256, 512, 513, 1024)] == [4, 4, 4, 1, 1]
    assert BatchTable.parse(table.to_json()) == table and table.largest == 4


def test_a_device_that_gains_nothing_or_has_no_memory_has_no_batches() -> None:
    assert measure_table(lambda _, count: 0.93 * count) == (BatchTable(), True)

    def time_passes(side: int, count: int) -> float:
        if side * count > 2048:
            raise NoMemoryError("the memory of the GPU is insufficient")
        return 1.0

    table, is_final = measure_table(time_passes)
    assert table.limits == {512**2: 4, 768**2: 2, 1024**2: 2} and not is_final

    def fail(side: int, _: int) -> float:
        if side > 512:
            raise ModelError("the attention backend cannot compute this model")
        return 1.0

    assert measure_table(fail) == (BatchTable(), False)
    assert BatchTable().largest == 1


def test_a_lack_of_memory_lowers_the_limits_of_such_pictures_and_larger_ones() -> None:
    table = BatchTable({64**2: 8, 256**2: 8, 512**2: 4})
    table.lower(256**2, 8)
    assert table.limits == {64**2: 8, 256**2: 7, 512**2: 4}
    table.lower(512**2, 2)
    assert table.limits == {64**2: 8, 256**2: 7, 512**2: 1}
    everywhere = BatchTable.of_count(4)
    assert everywhere.get_limit(1 << 30) == 4 and BatchTable.of_count(1).limits == {}


@pytest.mark.parametrize(
    "entries", [None, {}, [[1]], [[1, 2, 3]], [["1", 2]], [[1, 0]], [[1, True]]]
)
def test_entries_that_are_not_those_of_a_table_are_an_empty_one(entries: object) -> None:
    assert BatchTable.parse(entries).limits == {}


def test_the_option_is_a_number_off_or_auto() -> None:
    assert [parse_batch(text) for text in (None, "auto", "OFF", "1", 4)] == [None, None, 1, 1, 4]
    for text in ("", "0", "65", "many", "1.5", "²", "9" * 5000):
        with pytest.raises(ValueError, match="expected auto, off, or a number from 1 to 64"):
            parse_batch(text)
    assert Settings.model_validate({"batch": "off"}).limits.batch == 1


def test_batches_are_an_option_of_torch_and_not_reproducible() -> None:
    TorchTuning(batch=4).check(TORCH)
    TorchTuning(batch=1, reproducible=True).check(MLX)
    with pytest.raises(UsageError, match="rounds differently"):
        TorchTuning(batch=2, reproducible=True).check(TORCH)
    with pytest.raises(UsageError, match="are options of torch"):
        TorchTuning(batch=2).check(MLX)
