"""The number of forward passes of a model that are computed at once, by the size of a picture.

The limits are measured on the device: a large picture alone keeps it busy, several small ones share
the time to read the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from clowder_aimage.errors import ModelError, NoMemoryError, UsageError

# Sides of the pictures that are measured, and the numbers of passes; smaller ones gain as much
SIDES = (512, 768, 1024)
COUNTS = (2, 4, 8)
# A batch has to take less than this share of the time of its passes in smaller ones, since each
# picture waits for all others
_SHARE = 0.9


# Passes that may be asked for
_MOST = 64
# Pixels, more than any picture has
_EVERY_SIZE = 1 << 40


def parse_batch(value: object) -> int | None:
    """Return the passes at once for "auto" (None), "off" (1) or a number. Raises ValueError."""
    text = str(value).strip().lower()
    if value is None or text == "auto":
        return None
    if text == "off":
        return 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST):
        raise ValueError(f"expected auto, off, or a number from 1 to {_MOST}")
    return int(text)


@dataclass(slots=True)
class BatchTable:
    """The most passes at once, by the pixels of a picture; 1 beyond the largest.

    A picture has one pass in each step, and two with guidance.
    """

    limits: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_count(cls, count: int) -> BatchTable:
        """Return the table of a limit for pictures of all sizes."""
        return cls({_EVERY_SIZE: count} if count > 1 else {})

    @classmethod
    def parse(cls, entries: object) -> BatchTable:
        """Return a table from its entries in JSON; an empty one if they are not those of one."""
        if not isinstance(entries, list):
            return cls()
        for entry in entries:
            is_pair = isinstance(entry, list) and [type(each) for each in entry] == [int, int]
            if not is_pair or min(entry) < 1:
                return cls()
        return cls(dict(entries))

    def to_json(self) -> list[list[int]]:
        """Return the pairs of pixels and passes."""
        return [[pixels, count] for pixels, count in sorted(self.limits.items())]

    @property
    def largest(self) -> int:
        """Return the most passes at once, of a picture of any size."""
        return max(self.limits.values(), default=1)

    def get_limit(self, pixels: int) -> int:
        """Return the most passes at once for pictures of a size: the limit of the next larger."""
        sizes = [size for size in self.limits if size >= pixels]
        return self.limits[min(sizes)] if sizes else 1

    def lower(self, pixels: int, count: int) -> None:
        """Compute fewer than ``count`` passes at once, of this size and of larger ones.

        The device has too little memory for as many.
        """
        lower = max(1, count - 1)
        self.limits = {
            size: min(each, lower) if size >= pixels else each for size, each in self.limits.items()
        }


def measure_table(
    time_passes: Callable[[int, int], float],
    sides: Iterable[int] = SIDES,
    counts: Iterable[int] = COUNTS,
) -> tuple[BatchTable, bool]:
    """Return the table that follows from the seconds of ``count`` passes for pictures of a side.

    And True if it is final: the device did not fail, nor lack memory, perhaps for a while.
    ``time_passes`` may raise ModelError, or UsageError for a side. Larger pictures than those that
    do not gain are not measured.
    """
    table, is_final = BatchTable(), True
    for side in sides:
        best = 1
        try:
            each = time_passes(side, 1)
            for count in counts:
                seconds = time_passes(side, count) / count
                if seconds > _SHARE * each:
                    break
                best, each = count, seconds
        except NoMemoryError:
            # Another program may have the memory now
            is_final = False
        except ModelError:
            return BatchTable(), False
        except UsageError:
            pass
        if best == 1:
            break
        table.limits[side * side] = best
    return table, is_final
