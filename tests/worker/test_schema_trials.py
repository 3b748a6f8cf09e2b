"""The trials of schemas: each caller has places and a budget of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from clowder_aimage.engine.schema_trials import PLACES, SchemaBudgetError, SchemaTrials
from clowder_aimage.errors import UsageError


@dataclass
class Scene:
    """Trials by a clock that is set."""

    now: float = 1000.0
    trials: SchemaTrials = field(init=False)

    def __post_init__(self) -> None:
        self.trials = SchemaTrials(lambda: self.now)

    async def run(self, caller: str, seconds: float, *, refused: bool) -> None:
        """Do a trial that takes ``seconds``. Raises SchemaBudgetError."""
        async with self.trials.hold(caller):
            try:
                with self.trials.charge(caller):
                    self.now += seconds
                    if refused:
                        raise UsageError("it takes too long")
            except UsageError:
                assert refused


@pytest.mark.parametrize(
    ("caller", "trial", "refused", "later", "retry_after"),
    [
        ("me", 2.0, True, 0.0, 52),
        ("me", 2.0, True, 51.0, 1),
        # The first trial is forgotten
        ("me", 2.0, True, 53.0, None),
        ("me", 1.0, True, 0.0, None),
        # The schema was refused before
        ("me", 0.001, True, 0.0, None),
        ("me", 2.0, False, 0.0, None),
        # A server without tokens
        ("", 2.0, True, 0.0, None),
        ("other", 2.0, True, 0.0, 52),
    ],
)
def test_refused_schemas_of_a_caller_take_a_bounded_time(
    caller: str, trial: float, refused: bool, later: float, retry_after: int | None
) -> None:
    async def play() -> int | None:
        scene = Scene()
        for _ in range(5):
            await scene.run(caller, trial, refused=refused)
        scene.now += later
        # Others are not refused
        await scene.run("third", 0.0, refused=False)
        try:
            await scene.run(caller, 0.0, refused=False)
        except SchemaBudgetError as error:
            return error.retry_after
        return None

    assert asyncio.run(play()) == retry_after


@pytest.mark.parametrize(("caller", "places"), [("me", PLACES), ("", 2 * PLACES)])
def test_trials_of_a_caller_leave_places_to_others(caller: str, places: int) -> None:
    async def play() -> list[str]:
        trials, held, is_over = SchemaTrials(lambda: 0.0), list[str](), asyncio.Event()

        async def hold(name: str) -> None:
            async with trials.hold(name):
                held.append(name)
                await is_over.wait()

        tasks = [asyncio.create_task(hold(caller)) for _ in range(places + 3)]
        tasks.append(asyncio.create_task(hold("other")))
        await asyncio.sleep(0)
        begun = list(held)
        is_over.set()
        await asyncio.gather(*tasks)
        assert len(held) == len(tasks)
        return begun

    assert asyncio.run(play()) == [caller] * places + ["other"]
