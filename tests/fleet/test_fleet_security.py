"""TLS, nkeys, credentials and tenants of a fleet, on real NATS servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from clowder_aimage.cli.console import fleet_access
from clowder_aimage.errors import NetworkError
from clowder_aimage.fleet.link import FleetLink
from clowder_aimage.fleet.name import GATEWAY, OPERATOR, WORKER, FleetNames
from tests.fleet.fleet_run import SHIPPED_WORKER, FleetRun, Nats, ScriptedRole, prompt_as_picture
from tests.fleet.nats_config import Key, account, creds_file, shipped
from tests.process import Aimage
from tests.store import copy_store
from tests.wait import PATIENCE, until
from tests.worker.conftest import begin

pytestmark = pytest.mark.integration
Play = Callable[..., None]
KINDS = (GATEWAY, WORKER, OPERATOR)


@contextlib.contextmanager
def server(place: Path, text: str) -> Iterator[Nats]:
    """Run a NATS server with a configuration."""
    (place / "nats.conf").write_text(text)
    own = Nats(place / "js", arguments=("-c", str(place / "nats.conf"))).start()
    try:
        yield own
    finally:
        own.kill()


@pytest.fixture
def passwords(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {kind: f"{kind}-password" for kind in KINDS}
    for kind, password in found.items():
        monkeypatch.setenv(f"NATS_{kind.upper()}_PASSWORD", password)
    return found


# -- TLS and keys, by the options of the verbs


def test_a_fleet_with_tls_certificates_of_clients_and_nkeys(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs of a fleet: the options, from the command line and from the environment."""
    ca, strange = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    strange.cert_pem.write_to_path(tmp_path / "strange.pem")
    for name in ("server", "client"):
        made = ca.issue_cert("127.0.0.1", common_name=name)
        made.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    keys = {kind: Key("user") for kind in KINDS}
    for kind, key in keys.items():
        (tmp_path / f"{kind}.nk").write_bytes(key.seed + b"\n")
    text = shipped(tmp_path / "js")
    for kind, key in keys.items():
        user = SHIPPED_WORKER if kind == WORKER else kind
        old = rf"user: {user}[\s,]+password: \$NATS_{kind.upper()}_PASSWORD"
        text, count = re.subn(old, f"nkey: {key.public}", text)
        assert count == 1
    files = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    lines = "".join(f'{name}: "{tmp_path / file}"\n' for name, file in files.items())
    with server(tmp_path, f"{text}\ntls {{\n{lines}verify: true\n}}\n") as own:
        url = own.url.replace("nats://", "tls://")
        copy_store(tiny_store, tmp_path / "store")
        here = Aimage(tmp_path, tmp_path / "store")
        trust = ("--nats-ca", tmp_path / "ca.pem")
        client = ("--nats-cert", tmp_path / "client.pem", "--nats-key", tmp_path / "client.key")
        whole = ("--nats", url, *trust, *client)
        operator = (*whole, "--nats-nkey", tmp_path / "operator.nk")
        assert "aimage-jobs" in here("fleet", "init", "--max-bytes", "64MiB", *operator).out
        assert "max_file_store" in here("fleet", "init", *operator, code=2).err  # 8 GiB of 1

        monkeypatch.setattr(fleet_access, "PATIENCE", 1.0)

        def refused(code: int, *options: Any) -> str:
            return here("fleet", "status", *options, code=code).err

        nkey = ("--nats-nkey", tmp_path / "operator.nk")
        unknown = ("--nats-ca", tmp_path / "strange.pem")
        assert "certificate" in refused(1, "--nats", url, *unknown, *client, *nkey)
        assert "does not answer" in refused(1, "--nats", url, *trust, *nkey)  # no certificate
        (tmp_path / "other.nk").write_bytes(Key("user").seed)
        assert "credentials" in refused(4, *whole, "--nats-nkey", tmp_path / "other.nk")
        assert "credentials" in refused(4, *whole)
        monkeypatch.undo()
        (tmp_path / "bad.nk").write_text("SUNOSEED")
        assert "bad.nk" in refused(2, *whole, "--nats-nkey", tmp_path / "bad.nk")
        environment = {
            "AIMAGE_NATS": url,
            "AIMAGE_NATS_CA": str(tmp_path / "ca.pem"),
            "AIMAGE_NATS_CERT": str(tmp_path / "client.pem"),
            "AIMAGE_NATS_KEY": str(tmp_path / "client.key"),
            "AIMAGE_NATS_NKEY": str(tmp_path / "operator.nk"),
        }
        quiet = Aimage(tmp_path, tmp_path / "store", {**here.environment, **environment})
        assert "no worker is running" in quiet("fleet", "status").out
        gateway_key = ("--nats-nkey", tmp_path / "gateway.nk")
        worker_key = ("--nats-nkey", tmp_path / "worker.nk")
        gateway = begin(here, *whole, *gateway_key, verb="gateway")
        join = ("--join", url, *trust, *client, *worker_key, "--worker-name", SHIPPED_WORKER)
        worker = begin(here, *join)
        try:
            until(lambda: gateway.get("/v1/fleet")["workers"], "the worker")
            shown = here("fleet", "status", *operator).out
            assert SHIPPED_WORKER in shown and "ready" in shown
        finally:
            worker.end()
            gateway.end()


# -- a file of credentials


def test_credentials_of_an_operator_select_the_tenant(play: Play, tmp_path: Path) -> None:
    """Accounts that are JSON Web Tokens, as ``nsc`` makes them, and a file for each user."""
    operator, system = Key("operator"), Key("account")
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn"), -1)
    limits = {**unlimited, "leaf": -1, "mem_storage": -1, "disk_storage": -1, "streams": -1}
    limits["consumer"] = -1
    tenants = {name: Key("account") for name in ("one", "other")}
    tokens = {key.public: operator.claim(key, {"limits": limits}) for key in tenants.values()}
    tokens[system.public] = operator.claim(system, {"limits": unlimited | {"leaf": -1}})
    listed = "".join(f"{key}: {token}\n" for key, token in tokens.items())
    text = (
        f"operator: {operator.claim(operator, {})}\nsystem_account: {system.public}\n"
        f"resolver: MEMORY\nresolver_preload: {{\n{listed}}}\n"
        f'jetstream {{ store_dir: "{tmp_path}/js" }}\n'
    )
    limits_of_user = {"subs": -1, "data": -1, "payload": -1}
    files = {}
    for name, tenant in tenants.items():
        user = Key("user")
        token = tenant.claim(user, limits_of_user)
        files[name] = creds_file(tmp_path / f"{name}.creds", token, user)

    async def scene(fleet: FleetRun) -> None:
        role = ScriptedRole(prompt_as_picture)
        async with fleet.gateway() as url, fleet.worker(SHIPPED_WORKER, role):
            await fleet.know(url, 1)
            assert (await fleet.ask(url, "a cat", seed=1))[0] == 200
            fleet.creds = files["other"]
            link = fleet.operator()
            async with link.open():
                with pytest.raises(Exception, match="no fleet"):
                    await link.wait_until_ready(PATIENCE)

    with server(tmp_path, text) as own:
        play(scene, own, creds=files["one"])


# -- tenants


def test_a_tenant_neither_reads_nor_writes_another_s_jobs(
    play: Play, tmp_path: Path, passwords: dict[str, str]
) -> None:
    """Two accounts of the shipped configuration, with fleets of the same name."""

    async def scene(fleet: FleetRun) -> None:
        role, strange = ScriptedRole(prompt_as_picture), ScriptedRole(prompt_as_picture)
        other = FleetRun(fleet.nats, fleet.store, fleet.name, passwords, tenant="other-")
        other.session = fleet.session
        await other.make()
        async with (
            fleet.gateway() as url,
            fleet.worker(SHIPPED_WORKER, role),
            other.gateway() as other_url,
        ):
            await fleet.know(url, 1)
            link = other.operator()
            heard: list[str] = []

            async def hear(message: Any) -> None:
                heard.append(message.subject)

            curious = FleetLink(other.access_of(GATEWAY), GATEWAY, "curious")
            async with link.open(), curious.open():
                await link.wait_until_ready(PATIENCE)
                await curious.wait_until_ready(PATIENCE)
                await curious.client.subscribe(link.names.build_log_subject("*", "*"), cb=hear)
                await curious.client.subscribe(f"$KV.{link.names.workers}.*", cb=hear)
                await curious.client.flush()
                key = {"headers": {"Idempotency-Key": "k"}}
                assert (await fleet.ask(url, "secret", seed=1, **key))[0] == 200
                # The other tenant sees no worker, no job, no result, and answers its own requests
                assert (await other.ask(other_url, "x"))[0] == 503
                for name in (link.names.jobs, link.names.logs, link.names.dead):
                    info = await link.streams.stream_info(name)
                    assert info.state.last_seq == 0
                assert not heard
                async with other.worker(SHIPPED_WORKER, strange):
                    await other.know(other_url, 1)
                    assert (await other.ask(other_url, "mine", seed=2, **key))[0] == 200
                assert (role.served, strange.served) == (["secret"], ["mine"])

    text = shipped(tmp_path / "js", account("other"))
    with server(tmp_path, text) as own:
        play(scene, own, name="aimage", passwords=passwords)


def test_gateways_and_workers_are_limited_to_their_fleet(
    play: Play, tmp_path: Path, passwords: dict[str, str]
) -> None:
    """Two fleets of one account: only its operators see both."""

    async def scene(fleet: FleetRun) -> None:
        team = FleetRun(fleet.nats, fleet.store, "team", passwords)
        await team.make()
        names = FleetNames("team")
        for kind in (GATEWAY, WORKER):
            link = FleetLink(fleet.access_of(kind), kind, SHIPPED_WORKER)
            heard: list[str] = []

            async def hear(message: Any, into: list[str] = heard) -> None:
                into.append(message.subject)

            async with link.open():
                await link.wait_until_ready(PATIENCE)
                await link.client.subscribe(names.build_log_subject("*", "*"), cb=hear)
                await link.client.subscribe(names.build_job_subject("interactive", "*"), cb=hear)
                await link.client.publish(names.build_job_subject("interactive", "a", "b"), b"x")
                await link.client.publish(names.build_log_subject(SHIPPED_WORKER, "a"), b"x")
                await link.client.publish(names.build_cancel_subject("a"), b"x")
                for call in (
                    link.streams.get_msg(names.logs, seq=1),
                    link.streams.stream_info(names.jobs),
                ):
                    with pytest.raises((NatsError, TimeoutError)):
                        async with asyncio.timeout(0.3):
                            await call
                # A worker hears itself.
                assert kind == WORKER or not heard
        watching = team.operator()
        async with watching.open():
            await watching.wait_until_ready(PATIENCE)
            for name in (names.jobs, names.logs):
                assert (await watching.streams.stream_info(name)).state.last_seq == 0

    with server(tmp_path, shipped(tmp_path / "js")) as own:
        play(scene, own, name="aimage", passwords=passwords)


def test_a_worker_s_user_cannot_make_jobs_or_give_orders(
    play: Play, tmp_path: Path, passwords: dict[str, str]
) -> None:
    async def scene(fleet: FleetRun) -> None:
        link = FleetLink(fleet.access_of(WORKER), WORKER, SHIPPED_WORKER)
        names = link.names
        async with link.open():
            await link.wait_until_ready(PATIENCE)
            with pytest.raises(NetworkError):
                await link.store(
                    names.build_job_subject("interactive", "a", "b"), b"", patience=0.1
                )
            order = json.dumps({"order": "drain"}).encode()
            with pytest.raises(NoRespondersError):
                await link.client.request(names.build_control_subject("w1"), order, timeout=5)

    with server(tmp_path, shipped(tmp_path / "js")) as own:
        play(scene, own, name="aimage", passwords=passwords)
