"""Options of pull: dry run, rate limit, and the check of free space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.content.copy_option import Rate
from tests.process import Aimage, run
from tests.real_registry import RealRegistry
from tests.scripted import ScriptedRegistry, artifact, serving


@pytest.mark.integration
def test_a_dry_run_fetches_only_manifests(
    aimage: Callable[..., Aimage], tiny: Path, registry: RealRegistry, repository: str
) -> None:
    here, there = aimage("here"), aimage("there")
    digest = here("create", repository, tiny, "--whole-files").line
    here("push", repository)
    mark = registry.mark()
    value = there("pull", repository, "--dry-run", "--json").value
    assert registry.count(mark, repository) == {"GET manifest": 1}
    assert not there.store.exists()
    assert value["digest"] == digest
    assert value["alreadyThere"] == {"blobs": 0, "size": 0}
    assert value["fetch"]["blobs"] == 13
    there("pull", repository)
    again = there("pull", repository, "--dry-run", "--json").value
    assert again["fetch"] == {"blobs": 0, "size": 0}
    assert again["alreadyThere"] == value["fetch"]


def test_a_rate_limit_is_respected(
    aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits of the connections are recorded instead of slept."""
    waits: list[float] = []

    def rate(limit: float) -> Rate:
        return Rate(limit, clock=lambda: 0.0, sleep=waits.append)

    monkeypatch.setattr("clowder_aimage.cli.verbs.pull.Rate", rate)
    with ScriptedRegistry(serving(*artifact(b"{}", b"x" * 100_000))).running() as registry:
        aimage()("pull", f"{registry.host}/x", "--limit-rate", "50k")
    assert max(waits) == pytest.approx(100_002 / 50e3)


def test_an_invalid_rate_is_refused(aimage: Callable[..., Aimage]) -> None:
    assert "invalid rate" in aimage()("pull", "a.example.com/x", "--limit-rate", "0", code=2).err


def test_a_pull_without_enough_space_is_not_started(
    aimage: Callable[..., Aimage], registry: RealRegistry, pushed: str
) -> None:
    there = aimage("there")
    there.store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=17m", "tmpfs", str(there.store)]
    if run(mount).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        mark = registry.mark()
        done = there("pull", pushed, code=6)
        assert "the download requires" in done.err
        assert registry.count(mark, pushed.rpartition(":")[0]) == {"GET manifest": 1}
        assert list(there.store.iterdir()) == []
    finally:
        run(["umount", str(there.store)], check=True)
