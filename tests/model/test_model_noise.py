"""torch.randn without torch. The numbers were printed by torch 2.13 on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from clowder_aimage.model.flow.noise import randn

FIRST = {  # seed, size: the first, middle and last values of torch.randn(size)
    (0, 1): ([0], [1.54099607]),
    (42, 15): ([0, 7, 13, 14], [0.33669037, -0.63799703, -1.68979895, -0.98895991]),
    (42, 16): ([0, 8, 14, 15], [1.92691529, -0.75213528, -0.76883888, 0.76244539]),
    (1099511627781, 17): ([0, 8, 15, 16], [1.84232986, 2.61457705, 1.74703145, 0.74477696]),
    (18446744073709551615, 1000): (
        [0, 500, 998, 999],
        [-2.66429758, 1.33568275, 0.10915167, 0.66253668],
    ),
}


@pytest.mark.parametrize(("seed", "size"), FIRST)
def test_values_of_torch(seed: int, size: int) -> None:
    index, values = FIRST[seed, size]
    np.testing.assert_allclose(randn(seed, (size,))[index], values, atol=1e-6)


def test_shape_does_not_change_the_numbers() -> None:
    flat = randn(1, (2 * 3 * 5,))
    assert (randn(1, (2, 3, 5)) == flat.reshape(2, 3, 5)).all()


def test_only_the_low_32_bits_of_the_seed_count() -> None:
    assert (randn(7, (40,)) == randn(7 + (5 << 32), (40,))).all()
    assert (randn(7, (40,)) != randn(8, (40,))).any()


def test_type_and_spread() -> None:
    noise = randn(3, (100, 100))
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
