"""The log of a program of a fleet about its connection to NATS."""

from __future__ import annotations

import logging
import socket
import ssl

import pytest

from clowder_aimage.errors import NetworkError, UnauthorizedError
from clowder_aimage.fleet.connection_report import ConnectionReport, describe_network_error

MISSING = "no connection to NATS; trying again"


class Scene:
    """A report with a clock that stands, and the lines that it logs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "aimage.fleet")
        self.now, self._caplog = 0.0, caplog
        self.report = ConnectionReport("nats://nats.example", "aimage", lambda: self.now)

    def take(self) -> list[str]:
        lines = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return lines


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    return Scene(caplog)


def test_a_missing_connection_is_reported_at_once_and_ever_more_rarely(scene: Scene) -> None:
    times = []
    for second in range(1300):
        scene.now = float(second)
        # The words of network errors change
        scene.report.observe(NetworkError(f"attempt {second}"))
        times += [second] * len(scene.take())
    assert times == [0, 10, 30, 70, 150, 310, 610, 910, 1210]


def test_a_report_has_the_reason_and_the_url(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.report.observe(NetworkError("it does not answer"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    facts = vars(record)
    assert (facts["url"], facts["reason"]) == ("nats://nats.example", "it does not answer")
    assert facts["again_in"] == 10.0


def test_another_kind_of_failure_is_reported_at_once(scene: Scene) -> None:
    scene.report.observe(NetworkError("it does not answer"))
    scene.report.observe(UnauthorizedError("it refuses the credentials"))
    scene.report.observe(UnauthorizedError("it refuses the credentials"))
    assert scene.take() == [MISSING, "cannot use the fleet"]


def test_a_connection_that_is_back_is_reported_with_the_time(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.report.observe(None)
    assert not hasattr(caplog.records[0], "after")
    scene.report.observe(NetworkError("lost"))
    scene.now = 42.0
    scene.report.observe(None)
    assert vars(caplog.records[-1])["after"] == 42.0
    scene.take()
    scene.report.observe(NetworkError("lost again"))
    assert scene.take() == [MISSING]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(111, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (OSError("Multiple exceptions: [Errno 111] Connect, [Errno 111] x"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "certificate verify failed"), "certificate verify failed"),
        (TimeoutError(), "no answer in time"),
        (ValueError("odd"), "odd"),
    ],
)
def test_a_network_error_is_described_without_its_number(error: Exception, reason: str) -> None:
    assert describe_network_error(error) == reason
