"""A worker that uses a smaller variant while it pulls an AImage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from clowder_aimage.engine.admission import BusyError
from clowder_aimage.engine.event import ImageEvent
from clowder_aimage.errors import VerificationError
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.wait import until_async
from tests.worker.engine_runs import FakeRunner, job, played, served

DIGESTS = dict[str, str]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, registry: RealRegistry) -> tuple[str, DIGESTS]:
    """Return a repository with ``v1`` and its variant ``int4``, and the digests of both."""
    home = tmp_path_factory.mktemp("pushed")
    here, name = Aimage(home, home / "store"), f"{registry.host}/worker/first"
    digests = {"v1": here("create", f"{name}:v1", TINY, "-q").line}
    convert = ("convert", f"{name}:v1", f"{name}:int4", "--quantize", "int4", "--attach", "-q")
    digests["int4"] = here(*convert).line
    for tag in digests:
        here("push", f"{name}:{tag}", "-q")
    return name, digests


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.engine.scheduler.Runner", FakeRunner)


def used(events: list[Any]) -> str:
    """Return the digest of the AImage that generated the picture."""
    (picture,) = [event for event in events if isinstance(event, ImageEvent)]
    return picture.digest


def test_the_request_after_the_pull_uses_the_aimage_itself(
    tmp_path: Path, pushed: tuple[str, DIGESTS]
) -> None:
    name, digests = pushed
    store = LayeredStore([tmp_path / "store"])

    async def play(engine: Any) -> list[str]:
        one = job(f"{name}:v1")
        found = [used(await served(engine, one))]
        await until_async(lambda: not engine._first._tasks)
        return [
            *found,
            used(await served(engine, one)),
            *(str(m.digest) for m in engine.list_loaded()),
        ]

    first, second, *loaded = played(store, play, first="int4")
    assert (first, second) == (digests["int4"], digests["v1"])
    # There is room for both.
    assert {*loaded} == {digests["int4"], digests["v1"]}
    assert {name for name, _ in store.list_tags()} == {f"{name}:v1", f"{name}@{digests['int4']}"}


def test_a_variant_serves_while_the_aimage_cannot_be_pulled(
    tmp_path: Path, pushed: tuple[str, DIGESTS], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, digests = pushed

    async def play(engine: Any) -> list[str]:
        pull = engine._transfers.pull

        def fail(reference: Reference, **options: Any) -> Any:
            if reference.digest is None:
                raise BusyError(1, 1)
            return pull(reference, **options)

        monkeypatch.setattr(engine._transfers, "pull", fail)
        return [used(await served(engine, job(f"{name}:v1"))) for _ in range(2)]

    store = LayeredStore([tmp_path / "store"])
    assert played(store, play, first="int4") == [digests["int4"]] * 2


@pytest.mark.parametrize(
    ("tag", "precision"), [("v1", None), ("v1", "int8"), ("v1@{v1}", "int4"), ("int4", "int4")]
)
def test_no_variant_is_used(
    tmp_path: Path, pushed: tuple[str, DIGESTS], tag: str, precision: str | None
) -> None:
    name, digests = pushed
    store = LayeredStore([tmp_path / "store"])

    async def play(engine: Any) -> str:
        return used(await served(engine, job(f"{name}:{tag}".format_map(digests))))

    assert played(store, play, first=precision) == digests[tag.partition("@")[0]]


def test_a_variant_of_another_aimage_fails_the_request(
    tmp_path: Path, pushed: tuple[str, DIGESTS], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(reference: Reference, *_: object) -> None:
        raise VerificationError(f"the variant int4 of {reference} is not of the same AImage")

    monkeypatch.setattr("clowder_aimage.engine.first_variant.find_variant", find)

    async def play(engine: Any) -> None:
        with pytest.raises(VerificationError, match="not of the same AImage"):
            await served(engine, job(f"{pushed[0]}:v1"))

    played(LayeredStore([tmp_path / "store"]), play, first="int4")
