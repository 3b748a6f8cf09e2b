"""Failures around a node: unreadable stores, background tasks and invalid settings."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import urllib.error
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage.api.service import Readiness, make_service
from clowder_aimage.cli.verbs.serve import check_stores, spell
from clowder_aimage.engine.settings import gather
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.http import background
from clowder_aimage.layout import ImageLayout
from clowder_aimage.node import daemon as daemon_module
from clowder_aimage.node.daemon import Daemon
from clowder_aimage.node.settings import NodeSettings
from clowder_aimage.node.spec_files import read_directory
from clowder_aimage.registry import ClientOptions
from tests.layout.test_record_names import break_calls, drop_rights
from tests.node.node_run import LiveNode
from tests.node.test_node_live import asked
from tests.process import Aimage
from tests.registry.test_credential_helper import is_gone
from tests.scripted import Answer, ScriptedRegistry, artifact, serving
from tests.wait import until

REF = "127.0.0.1:1/none:v1"
NOT_WRITABLE = {"reason": "store not writable"}


@pytest.fixture
def store_with_pin(tmp_path: Path) -> ImageLayout:
    """Return a store with a pin."""
    store = ImageLayout(tmp_path / "store")
    store.pins.put("pinned:v1", {}, durable=False)
    return store


# -- readiness


def test_an_unreadable_store_is_a_readiness_reason(
    store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stat", "listdir", "open"):
        break_calls(monkeypatch, name, store_with_pin.root)
    missing = {"reason": "model missing", "model": REF}
    assert Readiness(store_with_pin).list_reasons([REF]) == [NOT_WRITABLE, missing]


def test_unreadable_pins_are_a_readiness_reason(
    store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"reason": "model missing", "model": "pinned:v1"}
    assert Readiness(store_with_pin).list_reasons() == [missing]
    break_calls(monkeypatch, "listdir", store_with_pin.root / ".aimage" / "pins")
    assert Readiness(store_with_pin).list_reasons() == [{"reason": "store not readable"}]


def refused(node: Any, method: Any, path: Any, body: Any) -> tuple[int, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(node, method, path, body)
    with caught.value as answer:
        return answer.code, json.load(answer)["error"]


@pytest.mark.integration
def test_a_live_node_is_not_ready_while_its_store_is_inaccessible(
    live_node: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_rights(monkeypatch)
    root = live_node.aimage.store
    (root / ".aimage").mkdir(parents=True)
    live_node.start()
    until(lambda: live_node.readiness()[0] == 200, "the node to be ready")
    root.chmod(0)
    try:
        code, said = live_node.readiness()
        assert code == 503 and NOT_WRITABLE in said["reasons"]
        now = live_node.status()
        assert not now["ready"] and NOT_WRITABLE in now["reasons"]
        assert set(now["disk"]) == {"total", "free", "used", "high", "low"}
        assert live_node.worker.get("/healthz") == {"status": "ok"}
    finally:
        root.chmod(0o755)
    assert live_node.readiness()[0] == 200
    assert live_node.worker.stop()[0] == 0


# -- background tasks


@pytest.fixture
def daemon(store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """Return a node without a server that measures continuously."""
    monkeypatch.setattr(daemon_module, "EVERY", 0.001)
    store_with_pin.pins.remove("pinned:v1")
    service = make_service(
        NodeSettings(), store_with_pin, ClientOptions(docker_config=store_with_pin.root)
    )
    return Daemon(service, NodeSettings(), {})


async def comes(holds: Any) -> None:
    """Wait until ``holds()`` is true."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


def test_a_failing_measurement_is_logged_once_and_repeated(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[Any]
    readiness, looks = daemon._service.readiness, []
    real = readiness.list_reasons
    ready = daemon.node.metrics.ready._value.get

    def failing(wanted: Any, missing: Any) -> list[dict[str, str]]:
        looks.append(len(looks))
        if len(looks) in range(3, 10):
            raise OSError(errno.EIO, "Input/output error")
        if len(looks) in range(10, 13):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(wanted, missing)

    async def play() -> Any:
        task = asyncio.create_task(daemon._measure())
        await comes(lambda: len(looks) > 2 and ready() == 0)
        await comes(lambda: len(looks) > 12 and ready() == 1)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(readiness, "list_reasons", failing)
    asyncio.run(play())
    assert [each.levelname for each in caplog.records] == ["ERROR", "ERROR"]


def test_an_accessible_store_is_ready_again(
    daemon: Daemon, store_with_pin: ImageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = daemon.node.metrics.ready._value.get

    async def play() -> None:
        task = asyncio.create_task(daemon._measure())
        await comes(lambda: ready() == 1)
        with monkeypatch.context() as closed:
            for name in ("stat", "listdir", "open"):
                break_calls(closed, name, store_with_pin.root, errno.EACCES)
            await comes(lambda: ready() == 0)
        await comes(lambda: ready() == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())


def test_a_failing_background_task_is_logged_and_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing() -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    async def play() -> None:
        going = asyncio.Event()

        async def on() -> None:
            while True:
                going.set()
                await asyncio.sleep(0.001)

        async with background.run_in_background(failing(), on()):
            await comes(lambda: caplog.records)
            going.clear()
            await asyncio.wait_for(going.wait(), 60)

    asyncio.run(play())
    (said,) = caplog.records
    assert said.levelname == "ERROR" and vars(said)["work"].endswith("failing")


# -- start


@pytest.mark.parametrize(
    ("verb", "place", "reason"),
    [
        ("node", "file", "Not a directory"),
        ("node", "/proc/x", "No such file or directory"),
        ("serve", "file/below", "Not a directory"),
    ],
)
def test_a_path_that_cannot_be_a_store_is_refused_at_start(
    tmp_path: Path, verb: str, place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("no directory")
    named = tmp_path / place
    done = Aimage(tmp_path, named)(verb, "--addr", "127.0.0.1:0", "--store", named, code=2)
    assert done.err.startswith(f"aimage: cannot use the store {named}: {reason}")
    assert done.out == "" and "--store" in done.err


def test_check_stores_does_not_create_the_store(tmp_path: Path) -> None:
    check_stores([tmp_path / "deep" / "store"])
    assert list(tmp_path.iterdir()) == []


def test_check_stores_accepts_a_read_only_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mkdir", "open"):
        break_calls(monkeypatch, name, tmp_path, errno.EROFS)
    check_stores([tmp_path])
    check_stores([tmp_path / "none", tmp_path])  # one store is usable
    with pytest.raises(UsageError, match="Read-only file system"):
        check_stores([tmp_path / "none"])


@pytest.mark.parametrize("number", [errno.EIO])
def test_check_stores_accepts_a_store_with_a_temporary_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    break_calls(monkeypatch, "scandir", tmp_path, number)
    check_stores([tmp_path])


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"collect": "500ms"}, "--collect: must be at least 1 second"),
        ({"collect": "0"}, "--collect: must be at least 1 second"),
        ({"min_age": "soon"}, "--min-age: invalid duration 'soon' (examples: 90, 30s, 5m, 1h30m)"),
        ({"high": 0.0}, "--high: must be above 0 and at most 100 percent of the disk"),
        ({"low": 101.0}, "--low: must be between 0 and 100 percent of the disk"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_range(
    said: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        gather(NodeSettings, said, None, spell)
    assert caught.value.message == sentence


def test_settings_at_the_limits_are_accepted() -> None:
    found, _ = gather(NodeSettings, {"collect": "1s", "high": 100.0, "low": 0.0}, None)
    assert (found.collect, found.high, found.low) == (1.0, 100.0, 0.0)


def test_unreadable_files_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, desired = tmp_path / "hidden", tmp_path / "desired"
    desired.mkdir()
    (desired / "models.json").symlink_to(hidden / "models.json")
    with pytest.raises(FormatError, match="the link has no target"):
        read_directory(desired)
    for name in ("stat", "open"):
        break_calls(monkeypatch, name, hidden, errno.EACCES)
        break_calls(monkeypatch, name, desired / "models.json", errno.EACCES)
    with pytest.raises(FormatError, match="Permission denied"):
        read_directory(desired)
    assert NodeSettings(desired=hidden / "desired").desired == hidden / "desired"


@pytest.mark.integration
def test_a_helper_that_hangs_holds_up_one_model_and_ends_with_the_node(
    live_node: LiveNode, tmp_path: Path
) -> None:
    manifest, blobs = artifact(b"{}", b"weights")
    child, helper = tmp_path / "child", tmp_path / "docker-credential-hang"
    helper.write_text(
        f"#!/bin/sh\nsleep 600 & echo $! > {child}.part; mv {child}.part {child}; wait\n"
    )
    helper.chmod(0o755)
    challenge = Answer(401, {"WWW-Authenticate": "Basic realm=x"})
    with (
        ScriptedRegistry(lambda _: challenge).running() as private,
        ScriptedRegistry(serving(manifest, blobs)).running() as public,
    ):
        config = {"credHelpers": {private.host: "hang"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        live_node.want({"ref": f"{private.host}/team/a:v1"}, {"ref": f"{public.host}/team/b:v1"})
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        live_node.start(PATH=path, DOCKER_CONFIG=str(tmp_path))
        until(child.exists, "the helper to run")
        live_node.reaches(f"{public.host}/team/b:v1", "present")
        live_node.end()
    until(lambda: is_gone(child), "the helper to end")
