"""Several seeds of one prompt."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import click

from clowder_aimage.cli.console.option import parse_with
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import MAX_PICTURES
from clowder_aimage.generation.seed import MAX_SEED


def _parse_seeds(text: str) -> tuple[int, ...]:
    seeds: list[int] = []
    for span in text.split(","):
        ends = re.fullmatch(r"([0-9]{1,20})(?:\.\.([0-9]{1,20}))?", span.strip(), re.ASCII)
        if ends is None:
            raise ValueError(f"expected seeds such as 1..16 or 1,5,9, not {text!r:.60}")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last <= MAX_SEED:
            raise ValueError(f"{span.strip()} has no seeds from 0 to 2^64 - 1, in rising order")
        if len(seeds) + last - first >= MAX_PICTURES:
            raise ValueError(f"{text:.60} has more than {MAX_PICTURES} seeds")
        seeds += range(first, last + 1)
    return tuple(seeds)


seed_option = click.option(
    "--seeds",
    metavar="SEEDS",
    callback=parse_with(_parse_seeds),
    help="Generate a picture of each seed, such as 1..16 or 1,5,9.",
)
sheet_option = click.option(
    "--sheet", is_flag=True, help="Write a sheet of all pictures with their seeds, too."
)


def plan_seed_runs(seed: int | None, seeds: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return runs of consecutive seeds: the first, random if it is None, and their number.

    Raises UsageError: seeds with another option for them.
    """
    if not seeds:
        return [(secrets.randbits(32) if seed is None else seed, count)]
    if seed is not None or count != 1:
        option = "-n" if seed is None else "--seed"
        raise UsageError(f"--seeds cannot be combined with {option}")
    runs: list[tuple[int, int]] = []
    following = None
    for run_seed in seeds:
        if run_seed == following:
            first, length = runs.pop()
            runs.append((first, length + 1))
        else:
            runs.append((run_seed, 1))
        following = run_seed + 1
    return runs
