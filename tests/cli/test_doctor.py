"""The checks of ``aimage doctor``: situations with injected facts, and the verb."""

from __future__ import annotations

import base64
import email.utils
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clowder_aimage import __version__
from clowder_aimage.cli.console.installation import EXTRAS
from clowder_aimage.cli.doctor import backend, examination
from clowder_aimage.cli.doctor.backend import BackendCheck, ProcessResult
from clowder_aimage.cli.doctor.clock import ClockCheck
from clowder_aimage.cli.doctor.configuration import ConfigurationCheck
from clowder_aimage.cli.doctor.credentials import CredentialsCheck
from clowder_aimage.cli.doctor.examination import examine
from clowder_aimage.cli.doctor.finding import Check, Finding, Level, Stage
from clowder_aimage.cli.doctor.fleet import FleetCheck, FleetSettings
from clowder_aimage.cli.doctor.hub import HubCheck
from clowder_aimage.cli.doctor.memory import MemoryCheck
from clowder_aimage.cli.doctor.port import PortCheck
from clowder_aimage.cli.doctor.program import ProgramCheck
from clowder_aimage.cli.doctor.proxy import ProxyCheck
from clowder_aimage.cli.doctor.registry import RegistryCheck
from clowder_aimage.cli.doctor.server_time import ServerTimes
from clowder_aimage.cli.doctor.store import FileSystem, StoreCheck
from clowder_aimage.cli.doctor.worker import WorkerCheck
from clowder_aimage.content.file_system import Limit, Space
from clowder_aimage.content.mount import Mount
from clowder_aimage.engine.worker_client import WorkerClient
from clowder_aimage.errors import NetworkError, UsageError
from clowder_aimage.model.library_choice import SLOW
from clowder_aimage.registry import ClientOptions
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry, Seen
from tests.scripted_worker import Asked, Says, ScriptedWorker, says

OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR
GB = 10**9
NOW = 1_800_000_000.0
SECRET = "pa55word"


def describe(check: Check) -> list[str]:
    """Return the findings of a check as texts: level, message, advice."""
    return [
        f"{found.level}: {found.message}" + (f" -> {found.advice}" if found.advice else "")
        for found in check.run()
    ]


# The program and its libraries


def test_the_program_names_each_missing_extra_with_its_purpose() -> None:
    there = {EXTRAS[name].package for name in EXTRAS if name not in ("hf", "torch")}
    found = list(ProgramCheck(lambda package: package in there).run())
    assert found[0].message.startswith(f"aimage {__version__}, Python 3.")
    assert found[1].facts["missing"] == ["hf", "torch"]
    assert found[2].message == "[hf] is not installed: models of the Hugging Face hub"
    assert "[hf]" in found[2].facts["install"]
    assert [each.level for each in found] == [OK] * 4


MISSING = {"error": "needs the extra", "missing": True, "advice": "pip install x"}
MLX = {"library": "mlx 1", "device": "cpu (openblas)", "memory": None, "warning": None}


@dataclass(frozen=True)
class Libraries:
    """The output of the process for each kind, its end, and the findings."""

    name: str
    found: tuple[str, ...]
    pictures: dict[str, Any] | None = field(default_factory=lambda: MLX)
    texts: dict[str, Any] | None = field(default_factory=lambda: MISSING)
    code: int | None = 0
    variables: dict[str, str] = field(default_factory=dict)


LIBRARIES = [
    Libraries("cpu", ("ok: image models: mlx 1, cpu (openblas)",)),
    Libraries(
        "gpu",
        ("ok: image models: mlx 1, gpu, 51 GB of memory for models",),
        MLX | {"device": "gpu", "memory": 51 * GB},
    ),
    Libraries("slow BLAS", ("warning: image models: mlx 1, cpu (no fast BLAS)", "[mlx]"),
              MLX | {"device": SLOW}),
    Libraries("unused GPU", ("warning: MLX computes on the CPU, although -> ", "torch"),
              MLX | {"warning": "MLX computes on the CPU, although"}),
    Libraries("GPU of another build", ("warning: a GPU: no kernel -> install the driver",),
              MLX | {"library": "torch 2", "device": "torch 2 cpu", "warning": "a GPU: no kernel"}),
    Libraries("one thread", ("warning: OMP_NUM_THREADS limits OpenBLAS to 1 of 8 cores -> unset",),
              variables={"OMP_NUM_THREADS": "1"}),
    Libraries("nothing", ("warning: image models: needs the extra -> pip install x",), MISSING),
    Libraries("texts only", ("ok: image models: needs the extra",), MISSING, {"library": "l 1"}),
    Libraries("broken", ("error: image models: cannot be used: libgomp -> ",),
              {"error": "cannot be used: libgomp", "missing": False, "advice": None}),
    Libraries("another processor", ("error: image models: importing its library ended the "
              "process with SIGILL",), None, None, -4),
    Libraries("later end", ("ok: image models: mlx 1", "error: language models of Transformers: "
              "importing its library ended the process with exit code 3"), texts=None, code=3),
    Libraries("no end", ("error: image models: its library was not imported within 60 s",),
              None, None, None),
]  # fmt: skip


@pytest.mark.parametrize("case", LIBRARIES, ids=lambda case: case.name)
def test_libraries_of_models(case: Libraries) -> None:
    values = {"pictures": case.pictures, "texts": case.texts}
    values |= {"gguf": None if case.texts is None else MISSING}
    lines = [b"a library prints this"]
    lines += [json.dumps({"name": n, **v}).encode() for n, v in values.items() if v is not None]
    result = ProcessResult(tuple(lines), case.code)
    found = "\n".join(describe(BackendCheck(lambda: result, case.variables, 8)))
    position = 0
    for text in case.found:
        assert text in found[position:], found
        position = found.index(text, position)
    expected = {text.partition(":")[0] for text in case.found if text.startswith(("w", "e"))}
    assert {line.partition(":")[0] for line in found.splitlines()} - {"ok"} == expected


# The machine


@pytest.mark.parametrize(
    ("total", "available", "limit", "found"),
    [
        (64 * GB, 40 * GB, None, "ok: 64 GB in all, 40 GB available"),
        (64 * GB, 7 * GB, 8 * GB, "ok: 64 GB in all, 7 GB available, the control group allows 8"),
        (64 * GB, GB, None, "warning: 64 GB in all, 1 GB available: too little for most models -> "
         "end other programs"),
        (64 * GB, GB, GB, "the control group allows 1 GB: too little for most models -> raise the "
         "limit"),
        (0, None, None, "ok: unknown"),
    ],
)  # fmt: skip
def test_memory(total: int, available: int | None, limit: int | None, found: str) -> None:
    (line,) = describe(MemoryCheck(lambda: total, lambda: available, lambda: limit))
    assert found in line


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "ok: none"),
        (
            {"https_proxy": f"http://me:{SECRET}@proxy.example.com:3128", "NO_PROXY": ".local"},
            "ok: https by proxy.example.com:3128; directly: .local",
        ),
        ({"ALL_PROXY": f"ftp://me:{SECRET}@x"}, "error: ALL_PROXY is not the URL of a proxy -> "),
    ],
)
def test_proxies_are_shown_without_their_passwords(variables: dict[str, str], found: str) -> None:
    (line,) = describe(ProxyCheck(variables))
    assert line.startswith(found) and SECRET not in line


@pytest.mark.parametrize(
    ("skews", "found"),
    [
        ({}, "ok: not compared: no server stated its time"),
        ({"a": 29.0}, "ok: differs by less than 30 s from a"),
        ({"a": 31.0}, "warning: 31 s behind a: signatures may be refused -> sudo "),
        ({"a": -90.0}, "warning: 90 s ahead of a"),
        ({"a": 1.0, "b": 0.0, "c": 400.0}, "warning: the clock of c differs by 400 s -> set"),
        ({"a": 300.0, "b": 301.0, "c": 0.0}, "warning: 300 s behind a"),
    ],
)
def test_the_clock_is_compared_with_those_of_servers(skews: dict[str, float], found: str) -> None:
    times = ServerTimes()
    for server, seconds in skews.items():
        times.record(server, seconds)
    assert any(line.startswith(found) for line in describe(ClockCheck(times)))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Date": email.utils.formatdate(NOW + 60, usegmt=True)}, 60),
        ({"date": email.utils.formatdate(NOW, usegmt=True), "AGE": "0"}, 0),
        ({"Date": email.utils.formatdate(NOW - 900, usegmt=True), "Age": "900"}, None),
        ({"Date": "yesterday"}, None),
        ({}, None),
    ],
)
def test_the_time_of_a_server_is_that_of_its_own_response(
    headers: dict[str, str], seconds: float | None
) -> None:
    times = ServerTimes(lambda: NOW)
    times.observe("a", headers)
    assert [skew.seconds for skew in times.list_skews()] == ([] if seconds is None else [seconds])


# The store and the configuration

SYSTEM = FileSystem(Mount("ext4"), set(), Space(100 * GB, 0, 50 * GB), True)


@pytest.mark.parametrize(
    ("system", "found"),
    [
        (SYSTEM, "ok: file system: ext4"),
        (SYSTEM, "ok: free space: 50 GB of 100 GB"),
        (FileSystem(SYSTEM.mount, set(), Space(9 * GB, 0, GB), True),
         "warning: free space: 1 GB of 9 GB: too little for most models -> aimage gc"),
        (FileSystem(SYSTEM.mount, set(), Space(GB, GB, 0), True),
         "error: free space: 0 B of 1 GB: the disk is full"),
        (FileSystem(SYSTEM.mount, set(), None, True), "ok: free space: unknown"),
        (FileSystem(Mount("nfs4"), {Limit.HOST_LOCKS}, None, True),
         "warning: file system: nfs4, of a network, has no locks between hosts"),
        (FileSystem(Mount("cifs"), {Limit.MODES, Limit.TIMES}, None, True),
         "warning: file system: cifs, of a network, cannot set modes: blobs are not "
         "write-protected -> aimage df"),
    ],
)  # fmt: skip
def test_the_file_system_of_a_store(system: FileSystem, found: str, tmp_path: Path) -> None:
    lines = describe(StoreCheck(lambda: [tmp_path / "none"], lambda _: system))
    assert lines[0] == f"ok: {tmp_path / 'none'} does not exist yet"
    assert any(line.startswith(found) for line in lines), lines


def test_a_store_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    system = FileSystem(SYSTEM.mount, None, SYSTEM.space, False)
    lines = describe(StoreCheck(lambda: [tmp_path / "none"], lambda _: system))
    assert lines[0].startswith(f"error: {tmp_path / 'none'} does not exist and cannot be created")


def test_incomplete_names_are_warnings_and_a_read_only_store_is_one(
    aimage: Callable[..., Aimage], abridged: Path
) -> None:
    here = aimage()
    here("create", "-q", "x", abridged)
    here("tag", "x", "registry.example.com/team/x:v1")
    blob = max((here.store / "blobs").rglob("*"), key=lambda path: path.stat().st_size)
    blob.unlink()
    system = FileSystem(SYSTEM.mount, None, SYSTEM.space, False)
    lines = describe(StoreCheck(lambda: [here.store], lambda _: system))
    assert lines[0].startswith(f"warning: {here.store}: read-only, version 1, 2 names -> nothing")
    name = "registry.example.com/team/x:v1"
    assert set(lines[1:3]) == {
        f"warning: {each} is incomplete -> to complete it: aimage pull {name}"
        for each in (name, "x:latest")
    }


@pytest.mark.parametrize(
    ("text", "variables", "found"),
    [
        ("{}", {}, "ok: "),
        ('{"registries": {"x.example.com": {"jobs": 2}}}', {}, "config.json: registries"),
        ('{"run": {"remoet": true}}', {}, "error: cannot use the configuration "),
        ('{"run": {"remoet": true}}', {}, "did you mean 'remote'?"),
        ('{"run"', {}, "error: cannot use the configuration "),
        ("{}", {"AIMAGE_SERVE_KEEPALIVE": "1"}, "error: unknown environment variable AIMAGE_SERVE"),
        ("{}", {"AIMAGE_STOER": "x"}, "AIMAGE_STOER -> did you mean AIMAGE_STORE?"),
        ("{}", {"AIMAGE_STORE_SINGLE_WRITER": "maybe"}, "error: invalid AIMAGE_STORE_SINGLE_W"),
    ],
)
def test_the_configuration(
    text: str,
    variables: dict[str, str],
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AIMAGE_CONFIG", str(path))
    lines = describe(ConfigurationCheck())
    assert any(found in line for line in lines), lines
    assert describe(ConfigurationCheck(lambda: None))[0].startswith("ok: none: this user has no")


def test_places_of_credentials_are_shown_without_secrets(tmp_path: Path) -> None:
    auth = base64.b64encode(f"operator:{SECRET}".encode()).decode()
    entries = {"auths": {"https://index.docker.io/v1/": {"auth": auth}}, "credsStore": "pass"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    broken = tmp_path / "auth.json"
    broken.write_text("{")
    options = ClientOptions(docker_config=tmp_path, container_auth=(broken,))
    lines = describe(CredentialsCheck(options))
    assert lines[0].startswith(f"warning: {broken}: cannot be read: ")
    assert lines[1] == (
        f"ok: {tmp_path}/config.json: all others (docker-credential-pass), docker.io"
    )
    assert "operator" not in str(lines) and auth not in str(lines)
    assert describe(CredentialsCheck(ClientOptions())) == ["ok: no credentials are stored"]


# Servers


@dataclass(frozen=True)
class RegistryCase:
    """A registry's answers without credentials and with those of the user, and the finding."""

    name: str
    found: str
    without: int = 200
    accepted: int = 200
    is_stored: bool = False


REGISTRIES = [
    RegistryCase("open", "ok: HOST answers by HTTP"),
    RegistryCase("private", "warning: HOST answers by HTTP, and requires credentials; none for "
                 "HOST in DIR/config.json -> aimage login HOST", 401),
    RegistryCase("accepted", "ok: HOST answers by HTTP; DIR/config.json: sent to HOST", 401,
                 is_stored=True),
    RegistryCase("refused", "error: HOST answers by HTTP; DIR/config.json: refused by HOST (401) "
                 "-> remove them with: aimage logout HOST", 401, 401, is_stored=True),
    RegistryCase("not a registry", "error: HOST answers by HTTP, but not as a registry -> ", 404),
]  # fmt: skip


@pytest.mark.parametrize("case", REGISTRIES, ids=lambda case: case.name)
def test_a_registry(case: RegistryCase, tmp_path: Path) -> None:
    auth = base64.b64encode(f"operator:{SECRET}".encode()).decode()

    def answer(seen: Seen) -> Answer:
        status = case.accepted if "Authorization" in seen.headers else case.without
        headers = {"WWW-Authenticate": 'Basic realm="x"'} if status == 401 else {}
        return Answer(status, headers | {"Date": email.utils.formatdate(NOW, usegmt=True)})

    with ScriptedRegistry(answer).running() as registry:
        entries = {"auths": {registry.host: {"auth": auth}} if case.is_stored else {}}
        (tmp_path / "config.json").write_text(json.dumps(entries))
        times = ServerTimes(lambda: NOW - 40)
        (line,) = describe(
            RegistryCheck(registry.host, ClientOptions(docker_config=tmp_path), times)
        )
        assert {seen.path for seen in registry.seen} == {"/v2/"}
        (skew,) = times.list_skews()
    assert line.replace(registry.host, "HOST").replace(str(tmp_path), "DIR").startswith(case.found)
    assert SECRET not in line and auth not in line
    assert skew.server == registry.host and 38 < skew.seconds < 42


@pytest.mark.parametrize("level", [WARNING, ERROR])
def test_a_registry_that_is_not_there_has_the_level_of_its_use(level: Level) -> None:
    check = RegistryCheck("127.0.0.1:1", ClientOptions(), ServerTimes(), level)
    (found,) = check.run()
    assert (found.level, check.late.level) == (level, level)
    assert found.message.startswith("cannot reach 127.0.0.1:1") and found.advice


@pytest.mark.parametrize(
    ("token", "status", "path", "found"),
    [
        (None, 200, "/api/models?limit=1", "ok: URL answers; no token is set"),
        (SECRET, 200, "/api/whoami-v2", "ok: URL accepts the token in HF_TOKEN"),
        (SECRET, 401, "/api/whoami-v2", "error: URL refuses the token in HF_TOKEN (401) -> put a"),
        (None, 503, "/api/models?limit=1", "warning: URL answers 503 -> set HF_ENDPOINT"),
        (None, 302, "/api/models?limit=1", "warning: URL answers 302 -> set HF_ENDPOINT"),
    ],
)
def test_the_hub(token: str | None, status: int, path: str, found: str) -> None:
    with ScriptedRegistry(lambda _: Answer(status, {"Location": "/login"})).running() as hub:
        url = f"http://{hub.host}"
        check = HubCheck(
            ClientOptions(),
            ServerTimes(),
            lambda: True,
            lambda: (token, "HF_TOKEN") if token else None,
            url,
        )
        (line,) = describe(check)
        (seen,) = hub.seen
    assert line.replace(url, "URL").startswith(found) and SECRET not in line
    assert seen.path == path
    assert seen.headers.get("Authorization") == (f"Bearer {token}" if token else None)


def test_a_hub_that_is_not_used_is_not_asked_and_one_out_of_reach_is_a_warning() -> None:
    check = HubCheck(
        ClientOptions(), ServerTimes(), lambda: False, lambda: None, "http://x.invalid"
    )
    (line,) = describe(check)
    assert line.startswith("ok: not used")
    check = HubCheck(
        ClientOptions(), ServerTimes(), lambda: True, lambda: None, "http://127.0.0.1:1"
    )
    (line,) = describe(check)
    assert line.startswith("warning: cannot reach 127.0.0.1:1")


def answer_as_worker(
    version: str = __version__, reasons: Sequence[str] = ()
) -> Callable[..., Says]:
    def answer(asked: Asked) -> Says:
        if asked.path == "/v1/worker":
            return says({"version": version, "scope": "admin"})
        if asked.path == "/readyz":
            return says({"status": "?", "reasons": list(reasons)}, 503 if reasons else 200)
        return says({"data": [{"id": "x"}]})

    return answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (answer_as_worker(), f"ok: HOST: version {__version__}, 1 model, ready"),
        (answer_as_worker("9.9.9"), "warning: HOST: version 9.9.9, 1 model, while this is"),
        (
            answer_as_worker(reasons=("draining", "model missing")),
            f"warning: HOST: version {__version__}, 1 model, not ready: draining; model missing ->",
        ),
        (
            lambda _: says({"error": {"message": "unknown token"}}, 401),
            "error: unknown token -> set AIMAGE_TOKEN",
        ),
    ],
    ids=["ready", "version", "not ready", "token"],
)
def test_the_worker(answer: Callable[[Asked], Says], found: str) -> None:
    with ScriptedWorker(answer).running() as worker:
        (line,) = describe(WorkerCheck(lambda: WorkerClient(worker.host), is_expected=True))
        address = str(WorkerClient(worker.host).endpoint)
    assert line.replace(address, "HOST").startswith(found), line


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_missing_worker_is_an_error_if_one_is_named(is_expected: bool) -> None:
    check = WorkerCheck(lambda: WorkerClient("127.0.0.1:1"), is_expected)
    (found,) = check.run()
    assert found.level is (ERROR if is_expected else OK)
    assert bool(found.advice) is is_expected


@pytest.mark.parametrize(
    ("headers", "body", "found"),
    [
        ({}, b"Ollama is running", "warning: HOST is used by ollama -> aimage serve --addr X:2"),
        ({"Server": "nginx/1"}, b"", "warning: HOST is used by BaseHTTP"),
    ],
)
def test_a_port_of_another_program_is_a_warning(
    headers: dict[str, str], body: bytes, found: str
) -> None:
    with ScriptedRegistry(lambda _: Answer(404, headers, body)).running() as server:
        (line,) = describe(PortCheck(server.host, "aimage serve", "X:2"))
    assert line.replace(server.host, "HOST").startswith(found)


def test_a_port_is_free_or_used_by_a_worker() -> None:
    (line,) = describe(PortCheck("127.0.0.1:1", "aimage serve", "X:2"))
    assert line == "ok: 127.0.0.1:1 is free (aimage serve)"
    with ScriptedWorker(answer_as_worker()).running() as worker:
        (line,) = describe(PortCheck(worker.host, "aimage serve", "X:2"))
    assert line == f"ok: {worker.host} is used by aimage, as a worker"


def test_a_fleet_adds_the_clock_of_its_server() -> None:
    times, settings = ServerTimes(), FleetSettings("nats://me:pa55word@n.example.com", {})
    (line,) = describe(FleetCheck(settings, times, lambda _: (3, -77.0)))
    assert line == "ok: aimage, on NATS at n.example.com: ready, 3 workers"
    assert [skew.seconds for skew in times.list_skews()] == [-77.0]
    assert SECRET not in FleetCheck(settings, times).late.message


def test_a_fleet_out_of_reach_is_an_error_with_advice() -> None:
    look = fail(NetworkError("NATS does not answer"))
    (line,) = describe(FleetCheck(FleetSettings("n.example.com", {}), ServerTimes(), look))
    assert line.startswith("error: NATS does not answer -> check its address")


def test_a_fleet_is_that_of_the_environment_or_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    monkeypatch.setenv("AIMAGE_CONFIG", str(path))
    path.write_text("{}")
    assert FleetSettings.read() is None
    path.write_text('{"gateway": {"nats": "nats://a"}}')
    assert FleetSettings.read() == FleetSettings("nats://a", {})
    for name, value in {"NATS": "nats://b", "NATS_CREDS": "/c", "FLEET": "f"}.items():
        monkeypatch.setenv(f"AIMAGE_{name}", value)
    options = {"fleet": "f", "nats_creds": Path("/c")}
    assert FleetSettings.read() == FleetSettings("nats://b", options)


# The examination and the verb


@dataclass
class Stub:
    """A check that calls a function."""

    work: Callable[[], object]
    stage: Stage = Stage.MACHINE
    name: str = "stub"
    late: Finding = Finding(ERROR, "late")  # noqa: RUF009 - frozen

    def run(self) -> Iterator[Finding]:
        yield Finding(OK, "begun")
        self.work()


def fail(error: Exception) -> Callable[..., NoReturn]:
    def work(*_: object) -> NoReturn:
        raise error

    return work


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize(
    ("error", "message", "advice"),
    [
        (UsageError("wrong", hint="do it"), "wrong", "do it"),
        (NetworkError("no store", remedy="name_store"), "no store", "name a directory with"),
        (PermissionError(13, "Permission denied", "/f"), "/f: Permission denied", ""),
        (KeyError("x"), "the check ended with KeyError: 'x'", "this is a defect"),
    ],
)
def test_an_error_of_a_check_is_a_finding(
    stage: Stage, error: Exception, message: str, advice: str
) -> None:
    (result,) = examine([Stub(fail(error), stage)])
    assert [found.level for found in result.findings] == [OK, ERROR]
    assert result.findings[1].message == message
    assert result.findings[1].advice.startswith(advice)


def test_a_check_of_the_network_that_does_not_end_is_left_behind() -> None:
    ended = threading.Event()
    checks = [Stub(ended.wait, Stage.NETWORK), Stub(lambda: None, Stage.NETWORK, "quick")]
    late, quick = examine(checks, patience=0.05)
    ended.set()
    assert [found.message for found in late.findings] == ["late"]
    assert quick.name == "quick"


def test_offline_makes_no_connection() -> None:
    checks = [Stub(fail(KeyError()), stage) for stage in (Stage.NETWORK, Stage.AFTER)]
    (result,) = examine([*checks, Stub(lambda: None)], is_offline=True)
    assert [found.message for found in result.findings] == ["begun"]


@pytest.fixture
def here(aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch) -> Aimage:
    """Return the command line on a machine whose libraries are described by a short program."""
    lines = [json.dumps({"name": name, **MLX}) for name in ("pictures", "texts", "gguf")]
    monkeypatch.setattr(
        backend, "_COMMAND", (sys.executable, "-ISc", f"print({chr(10).join(lines)!r})")
    )
    # However busy this machine is
    monkeypatch.setattr(examination, "PATIENCE", 60.0)
    made = aimage()
    made.environment |= {"HF_HUB_OFFLINE": "1", "AIMAGE_HOST": "127.0.0.1:1"}
    return made


def test_the_verb_prints_lines_of_80_columns_and_fails_for_an_error(here: Aimage) -> None:
    done = here("doctor", code=1)
    lines = done.out.splitlines()
    # Only a path may be longer
    assert all(len(line) <= 80 or max(map(len, line.split())) > 50 for line in lines), done.out
    assert {line.split()[0] for line in lines[:-1] if line[0] != " "} <= {"ok", "warning", "error"}
    assert "error    worker    cannot connect to the worker at http://127.0.0.1:1:" in done.out
    assert "-> start one with 'aimage serve', or set AIMAGE_HOST to\n" in done.out
    assert lines[-1].endswith("1 error")


def test_the_verb_offline_as_json(here: Aimage, tmp_path: Path) -> None:
    value = here("doctor", "--offline", "--json").value
    assert (value["ok"], value["errors"], value["offline"]) == (True, 0, True)
    assert value["warnings"] == sum(each["level"] == "warning" for each in value["findings"])
    names = {each["check"] for each in value["findings"]}
    assert names == {"program", "backend", "memory", "store", "config", "proxy", "login"}
    assert all(set(each) == {"check", "level", "message", "advice", "facts"}
               for each in value["findings"])  # fmt: skip


def test_a_broken_configuration_leaves_the_other_checks(here: Aimage, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    here.environment["AIMAGE_CONFIG"] = str(path)
    done = here("doctor", "--offline", code=1)
    assert "error    config    cannot use the configuration" in done.out
    assert "ok       store " in done.out and "Traceback" not in done.out + done.err


@pytest.mark.integration
def test_the_real_libraries_are_imported_in_a_process(aimage: Callable[..., Aimage]) -> None:
    done = aimage().process("doctor", "--offline", "--json")
    found = [each for each in done.value["findings"] if each["check"] == "backend"]
    assert len(found) >= 3
    assert not any(each["level"] == "error" for each in found), found
    if os.environ.get("AIMAGE_REQUIRE_TOOLS"):
        assert found[0]["facts"]["library"].startswith("mlx ")
