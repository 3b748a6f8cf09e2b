"""One URL that is refused while others are accepted, in a simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest

from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.session import Session
from clowder_aimage.registry.url_refusals import ROUNDS, URL_PATIENCE, UrlRefusals
from tests.scripted import Answer, ScriptedRegistry, Seen


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds


def get_two(refused: tuple[str, ...], status: int, tmp_path: Path) -> tuple[float, int]:
    """Get a URL that is accepted, then one of the refused ones; return the seconds and status."""
    time = Time()

    def answer(seen: Seen) -> Answer:
        is_refused = any(part in seen.path for part in refused) and time.now > 1000
        return Answer(status if is_refused else 200, {}, b"{}")

    with ScriptedRegistry(answer).running() as registry:
        name = Reference.parse(f"{registry.host}/team/x:v1")
        options = ClientOptions(docker_config=tmp_path, clock=time, sleep=time.sleep)
        with Session(name, options) as session:
            session.get(session.build_url("manifests/v1"), "*/*", "the manifest")
            time.sleep(1)
            response = session.request("GET", session.build_url(refused[-1]))
            response.finish()
    return time.now - 1001, response.status_code


# The refused paths, and the least and most seconds
SITUATIONS: dict[str, tuple[tuple[str, ...], float, float]] = {
    "a blob": (("blobs/sha256:a",), URL_PATIENCE, 45),
    "the referrers": (("referrers/sha256:a",), 10, 20),
    "all": (("manifests/v1", "blobs/sha256:a"), 250, 310),
    "all, with referrers": (("manifests/v1", "referrers/sha256:a"), 10, 20),
}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_refused_url_is_given_up(
    situation: str, status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused, least, most = SITUATIONS[situation]
    seconds, answered = get_two(refused, status, tmp_path)
    assert answered == status
    assert least <= seconds <= most
    waits = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert len(waits) == 1 and f"answers {status} to requests for /v2/team/x/" in waits[0]


def test_a_quota_serves_each_url() -> None:
    """Each request is refused a few times while others succeed, which is no reason to give up."""
    refusals, now = UrlRefusals(), 0.0
    for number in range(100):
        for _ in range(ROUNDS - 1):
            refusals.record_success("GET", "/other")
            now += 20.0
            assert not refusals.record_refusal("GET", f"/{number}", now).is_hopeless
        refusals.record_success("GET", f"/{number}")
    assert not refusals.record_refusal("GET", "/1", now).is_compared


def test_kinds_have_quotas_of_their_kind() -> None:
    refusals = UrlRefusals()
    for now in range(100):
        refusals.record_success("GET", "/blob")
        assert not refusals.record_refusal("PUT", "/manifest", float(now)).is_hopeless


def test_a_quick_registry_is_tried_for_some_time() -> None:
    refusals, hopeless = UrlRefusals(), []
    for now in range(60):
        refusals.record_success("GET", "/other")
        hopeless.append(refusals.record_refusal("GET", "/blob", float(now)).is_hopeless)
    assert hopeless.index(True) == URL_PATIENCE + 1
