"""A fleet whose workers follow a policy of signatures: its gateway has their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.config import trust_policy
from clowder_aimage.config.trust_policy import UserFiles, _CurrentGate
from clowder_aimage.content.gate import GATES, unchecked
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.sign import sign, sign_with
from clowder_aimage.trust.acceptance import Format
from clowder_aimage.trust.statement import build_cosign_statement
from tests.fleet.fleet_run import FleetRun
from tests.trust.key_files import create_signer, write_key
from tests.trust.place import write_policy
from tests.wait import until_async

pytestmark = pytest.mark.integration
Play = Callable[..., None]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file of a policy, which this process follows once it exists."""
    path = tmp_path / "trust.yaml"
    monkeypatch.setattr(trust_policy, "SYSTEM_FILES", [path])
    connect = lambda: ClientOptions(docker_config=tmp_path)  # noqa: E731
    GATES[:] = [_CurrentGate(UserFiles(lambda: None, lambda: False), connect).find_gate]
    yield path
    GATES.clear()


def sign_stored(store: Path, signer: str, digest: Digest | None = None) -> None:
    """Sign the model in a store, or attach a signature of another digest to it."""
    bundle = sign_with(create_signer(signer), Format.BUNDLE)
    if digest is not None:
        bundle = lambda _: sign_with(create_signer(signer), Format.BUNDLE)(  # noqa: E731
            build_cosign_statement(digest)
        )
    with unchecked():
        sign(ImageLayout(store), Reference.parse("tiny"), None, bundle)


def test_a_fleet_serves_what_the_policy_of_its_workers_accepts_only(
    play: Play, policy: Path, tmp_path: Path
) -> None:
    _, public = write_key(tmp_path, "signer")

    async def scene(fleet: FleetRun) -> None:
        async with fleet.gateway() as url, fleet.worker("w1", WorkerRole):
            await fleet.know(url, 1)
            write_policy(policy, "*", public)
            for trap in (
                lambda: None,
                lambda: sign_stored(fleet.store, "other"),
                lambda: sign_stored(fleet.store, "signer", Digest.of(b"another manifest")),
            ):
                trap()
                status, value = await fleet.ask(url, "a", steps=1)
                assert status in (403, 404), value
                assert "data" not in value
            sign_stored(fleet.store, "signer")

            async def is_served() -> bool:
                return (await fleet.ask(url, "a", steps=1))[0] == 200

            # A gateway hears later what a worker has.
            await until_async(is_served)

    play(scene)
