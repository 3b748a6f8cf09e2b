"""Limits of single registries in the configuration, overridden by the command line."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.content.copy_option import Rate
from clowder_aimage.errors import UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.pull import PullOptions, pull
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.host_settings import HostSettings, parse_rate, read_settings
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry, artifact, serving

BLOBS = [b"{}", *(str(i).encode() * 50_000 for i in range(8))]


class Counting:
    """A registry that serves one artifact, and counts concurrent blob requests.

    With ``hold``, a response waits until two are pending: a client that sends requests one by
    one is then slow, and one that does not is detected at once.
    """

    def __init__(self, *, hold: bool = False) -> None:
        self.inner = serving(*artifact(*BLOBS))
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.two = threading.Event()
        self.patience = 8 if hold else 0.02  # less than the client's read timeout

    def __call__(self, seen: Any) -> Answer:
        if "/blobs/" not in seen.path:
            return self.inner(seen)
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now > 1:
                self.two.set()
        self.two.wait(self.patience)
        with self.lock:
            self.now -= 1
        return self.inner(seen)


@pytest.fixture
def configured(aimage: Callable[..., Aimage], tmp_path: Path) -> Callable[..., Aimage]:
    """Return ``configured(host, **entry)``: the command line with that configuration."""

    def make(host: Any, **entry: Any) -> Aimage:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"registries": {host: entry}}))
        here = aimage()
        here.environment["AIMAGE_CONFIG"] = str(path)
        return here

    return make


def test_jobs_of_a_registry_limit_concurrent_requests(configured: Callable[..., Aimage]) -> None:
    one = Counting()
    with ScriptedRegistry(one).running() as registry:
        configured(registry.host, jobs=1)("pull", f"{registry.host}/x")
    assert one.most == 1


def test_jobs_on_the_command_line_take_precedence(configured: Callable[..., Aimage]) -> None:
    several = Counting(hold=True)
    with ScriptedRegistry(several).running() as registry:
        configured(registry.host, jobs=1)("pull", f"{registry.host}/x", "--jobs", "4")
    assert several.most > 1


def test_rate_of_a_registry_limits_a_pull(
    configured: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits of the connections are recorded instead of slept."""
    waits: list[float] = []

    def rate(limit: float) -> Rate:
        return Rate(limit, clock=lambda: 0.0, sleep=waits.append)

    monkeypatch.setattr(sys.modules["clowder_aimage.pull"], "Rate", rate)
    with ScriptedRegistry(serving(*artifact(*BLOBS))).running() as registry:
        configured(registry.host, limitRate="100k")("pull", f"{registry.host}/x")
    assert max(waits) == pytest.approx(sum(map(len, BLOBS)) / 100e3)


def test_rate_on_the_command_line_takes_precedence(configured: Callable[..., Aimage]) -> None:
    """At the configured byte per second it would take days."""
    with ScriptedRegistry(serving(*artifact(*BLOBS))).running() as registry:
        here = configured(registry.host, limitRate="1")
        here("pull", f"{registry.host}/x", "--limit-rate", "1G")


@pytest.mark.parametrize(("limit", "given", "used"), [(7, None, [7]), (7, 9, [9]), (0, None, [])])
def test_an_explicit_rate_takes_precedence(
    limit: int, given: int | None, used: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Noted(Rate):
        def __init__(self, limit: float) -> None:
            made.append(limit)
            super().__init__(limit, sleep=lambda _: None)

    monkeypatch.setattr(sys.modules["clowder_aimage.pull"], "Rate", Noted)
    with ScriptedRegistry(serving(*artifact(*BLOBS))).running() as registry:
        settings = {registry.host: HostSettings(limit=limit), "other.example.com": HostSettings()}
        connection = ClientOptions(docker_config=tmp_path, registries=settings)
        options = PullOptions(rate=Noted(given) if given else None)
        pull(
            Reference.parse(f"{registry.host}/x"),
            ImageLayout(tmp_path / "store"),
            connection,
            options,
        )
    assert made == used


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1", 1),
        ("500k", 500_000),
        ("20M", 20_000_000),
        ("20MB", 20_000_000),
        ("1.5GiB/s", 1_610_612_736),
        ("64ki", 65_536),
        ("10b/s", 10),
    ],
)
def test_rates_are_parsed(text: str, rate: int, tmp_path: Path) -> None:
    """The command line and the configuration's schema accept the same rates."""
    assert parse_rate(text) == rate
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"registries": {"r.example.com": {"limitRate": text}}}))
    assert read_settings(path)[0] == {"r.example.com": HostSettings(limit=rate)}


@pytest.mark.parametrize(
    "entry",
    [
        {"jobs": 0},
        {"jobs": 65},
        {"jobs": 1.5},
        {"limitRate": 500},
        {"limitRate": "fast"},
        {"limitRate": "0"},
        {"limitRate": "9" * 400 + "g"},
        {"chunkSize": 1024},
    ],
)
def test_invalid_limits_are_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"registries": {"r.example.com": entry}}))
    with pytest.raises(UsageError, match="cannot use the configuration"):
        read_settings(path)
