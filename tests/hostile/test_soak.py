"""All servers under a mixture of attacks, for some seconds; ``benchmarks/soak.py`` takes longer."""

from __future__ import annotations

import secrets
import sys
from typing import Any

import pytest

from benchmarks import soak

FLAT = {"resident": 100 * soak.MIB, "files": 10}


def report(*, ratio: float = 1.0, wrong: list[str] | None = None, **last: int) -> soak.Report:
    """Return a report of a server whose figures change to ``last`` in the second half."""
    clients = {"pull": {"wrong": wrong or [], "ratio": ratio}}
    samples: list[dict[str, Any]] = [
        {"at": at, "servers": {"worker": FLAT | (last if at >= 30 else {})}} for at in range(60)
    ]
    return soak.Report(1, clients, {}, [], {"worker": FLAT}, samples, {"worker": FLAT | last})


def test_growth_below_the_limits_is_no_missed_goal() -> None:
    assert report(ratio=2.9, resident=109 * soak.MIB, files=20).missed() == []


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (report(wrong=["404"]), ["pull: 404"]),
        (report(ratio=3.1), ["pull: p99 under attack is 3.1 times the other"]),
        (report(resident=111 * soak.MIB), ["worker: resident grew from 104857600 to 116391936"]),
        (
            report(files=40),
            [
                "worker: 10 descriptors before, 40 after",
                "worker: files grew from 10 to 40",
            ],
        ),
    ],
    ids=["wrong", "ratio", "memory", "descriptors"],
)
def test_each_goal_can_be_missed(found: soak.Report, missed: list[str]) -> None:
    assert found.missed() == missed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_good_clients_get_right_answers_during_attacks() -> None:
    """The descriptors are closed again; times and memory need a longer run."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    found = soak.soak(minutes=0.3, calm=0.02, idle=50, seed=secrets.randbits(32))
    assert found.wrong == [], found.seed
    assert found.open_files() == [], found.seed
    assert all(it["attack"]["count"] for it in found.clients.values()), found.clients
    assert found.attacks["models killed"] and found.attacks["kill_pull"]
