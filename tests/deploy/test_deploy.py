"""deploy/ and docker-compose.yml are valid, hardened, and consistent with the program."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest

from clowder_aimage.cli.main import cli
from clowder_aimage.config.user_directory import (
    SHARED_VARIABLES,
    check_variables,
    find_misspelt_variables,
    list_server_variables,
)
from clowder_aimage.document import schema
from clowder_aimage.engine.settings import Settings, gather
from tests.deploy.written import (
    COMPOSE,
    COMPOSE_CUDA,
    DEPLOY,
    DOCKERFILES,
    IGNORE,
    PLIST,
    PROGRAM,
    ROOT,
    SOCKET,
    UNITS,
    WORKER,
    compose,
    instructions,
    last,
    plist,
    typed,
    unit,
)
from tests.process import run
from tests.program import find_program

LARGEST_EXPOSURE = 3.0
USER = "10001:10001"
# launchd.plist(5): the keys allowed in our agent, and their types
KEYS: dict[str, type] = {
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "WorkingDirectory": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ProcessType": str,
    "ExitTimeOut": int,
    "Umask": int,
    "SoftResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


def name(path: Path) -> str:
    return path.name


def output(*command: object) -> str:
    """Return a program's output; fail the test with it if the program fails."""
    done = run([*map(str, command)], text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"exit code {done.returncode}: {said}"
    return said


def seconds(text: str) -> float:
    """Return the seconds of a duration of compose or systemd, in the formats used here."""
    return float(text.removesuffix("s"))


# -- all files


def test_every_command_line_is_accepted_by_the_program() -> None:
    lines = typed()
    assert len(lines) >= 6
    for where, arguments in lines.items():
        check_arguments(where, arguments)


def check_arguments(where: str, arguments: list[str]) -> None:
    command: click.Command = cli
    while isinstance(command, click.Group) and not arguments[0].startswith("-"):
        found = command.get_command(click.Context(command), arguments[0])
        assert found is not None, f"{where}: no verb {arguments[0]}"
        command, arguments = found, arguments[1:]
    try:
        command.make_context("aimage", list(arguments))
    except click.ClickException as error:
        pytest.fail(f"{where}: {error.format_message()}")


def test_the_worker_accepts_every_value() -> None:
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    from clowder_aimage.cli.verbs.serve import serve
    from clowder_aimage.engine.settings import Settings, gather

    for arguments in typed().values():
        if arguments[0] != "serve":
            continue
        options = serve.make_context("serve", arguments[1:]).params
        gather(
            Settings, {**options, "aliases": ",".join(options["aliases"])}, None
        )  # raises UsageError


def test_stop_timeouts_exceed_the_worker_s_drain_timeout() -> None:
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    from clowder_aimage.engine.settings import Settings

    grace = Settings().grace
    limits = {
        "compose": seconds(compose()["services"]["worker"]["stop_grace_period"]),
        "systemd": seconds(unit(WORKER)["TimeoutStopSec"]),
        "launchd": float(plist()["ExitTimeOut"]),
    }
    assert {k: v for k, v in limits.items() if v < grace + 10} == {}


def test_installed_extras_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"checkout\[([\w,]+)\]", (DEPLOY / "README.md").read_text())
    assert asked
    assert not set(",".join(asked).split(",")) - set(known)


def test_no_tag_is_latest() -> None:
    for path in (COMPOSE, *DEPLOY.rglob("*")):
        if path.is_file() and path.suffix != ".md":
            assert ":latest" not in path.read_text(), path


# -- images


def test_hadolint_reports_nothing() -> None:
    for path in DOCKERFILES:
        assert output(find_program("hadolint"), "--failure-threshold", "style", path) == ""


def test_images_run_as_one_user_other_than_root() -> None:
    for path in DOCKERFILES:
        assert last(path, "USER") == USER
        words = [word for word, _ in instructions(path)]
        after = words[len(words) - words[::-1].index("USER") :]
        assert not {"RUN", "COPY", "ADD"} & set(after)
        uid, _, gid = USER.partition(":")
        made = [rest for word, rest in instructions(path) if word == "RUN" and "useradd" in rest]
        assert f"--uid {uid} --gid {gid}" in made[-1]
        assert "/var/lib/aimage" in made[-1]
        assert last(path, "VOLUME") == "/var/lib/aimage"


def test_an_image_uses_one_port_everywhere() -> None:
    for path in DOCKERFILES:
        (port,) = re.findall(r"0\.0\.0\.0:(\d+)", last(path, "CMD"))
        assert last(path, "EXPOSE") == port
        assert re.findall(r"http://127\.0\.0\.1:(\d+)/healthz", last(path, "HEALTHCHECK")) == [port]


def test_both_images_run_the_same_command() -> None:
    for word in ("USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"):
        assert len({last(path, word) for path in DOCKERFILES}) == 1, word


def copied(path: Path) -> list[str]:
    """Return the files that a Dockerfile copies from the context."""
    copies = [rest.split() for word, rest in instructions(path) if word == "COPY"]
    return [source for words in copies if "--from=build" not in words for source in words[:-1]]


def test_the_context_contains_only_the_copied_files() -> None:
    for path in DOCKERFILES:
        lines = [line for line in IGNORE.read_text().splitlines() if line and line[0] != "#"]
        assert lines[0] == "*"
        assert {line[1:] for line in lines if line[0] == "!"} == set(copied(path))


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_the_copied_files_build_the_complete_wheel(path: Path, tmp_path: Path) -> None:
    """Run ``pip wheel`` on the context, with the build backend of pyproject.toml."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    for source in copied(path):
        if (ROOT / source).is_dir():
            away = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / source, ignore=away)
        else:
            (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / source)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = run(command, cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("clowder_aimage-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "clowder_aimage").rglob("*.py")}
    assert modules <= names
    schemas = {f"clowder_aimage/schemas/{p.name}" for p in (ROOT / "schemas").glob("*.json")}
    assert schemas and schemas <= names


# -- compose


def test_the_compose_files_match_their_schema() -> None:
    files = (COMPOSE, COMPOSE_CUDA)
    output(find_program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)


def test_the_override_names_the_gpu_of_the_worker_alone() -> None:
    """It is merged: what it omits, such as hardening, is that of the other file."""
    services = compose(COMPOSE_CUDA)["services"]
    assert [*services] == ["worker"] and "worker" in compose()["services"]
    worker = services["worker"]
    assert worker.keys() == {"image", "build", "environment", "deploy"}
    assert ROOT / worker["build"]["dockerfile"] in DOCKERFILES
    assert worker["image"] != compose()["services"]["worker"]["image"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    for name, value in worker["environment"].items():
        found, _ = gather(Settings, {name.removeprefix(Settings.PREFIX).lower(): value}, None)
        assert found.backend == "torch"


def test_the_schema_of_compose_files_refuses_a_wrong_key(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    checker = find_program("check-jsonschema")
    command = [checker, "--builtin-schema", "vendor.compose-spec", str(wrong)]
    assert run(command).returncode == 1


def test_the_default_profile_starts_only_the_registry() -> None:
    services = compose()["services"]
    assert [key for key, value in services.items() if not value.get("profiles")] == ["registry"]
    fleet = {"init", "nats", "fleet-init", "gateway-1", "gateway-2", "worker-1", "worker-2"}
    for profile, wanted in (("worker", {"init", "worker"}), ("fleet", fleet)):
        found = {key for key, value in services.items() if profile in value.get("profiles", ())}
        assert found == wanted


def test_nats_is_reached_by_the_fleet_alone() -> None:
    services = compose()["services"]
    assert compose()["networks"]["fleet"] == {"internal": True}
    assert services["nats"]["networks"] == ["fleet"] and "ports" not in services["nats"]
    inside = {name for name, one in services.items() if "fleet" in one.get("networks", ())}
    assert inside == {"nats", "fleet-init", "gateway-1", "gateway-2", "worker-1", "worker-2"}
    conf = DEPLOY / "docker" / "nats-server.conf"
    asked = set(re.findall(r"\$(NATS_\w+)", conf.read_text()))
    assert set(services["nats"]["environment"]) == asked
    users = {
        name: re.search(r"nats://([\w-]+):(\S+)@nats:4222", str(one.get("environment")))
        for name, one in services.items()
    }
    passwords = services["nats"]["environment"]
    for name, found in users.items():
        if found is not None:
            variable = found[1].upper().replace("-", "_")
            assert passwords[f"NATS_{variable}_PASSWORD"] == found[2], name
    kinds = {name: found[1] for name, found in users.items() if found}
    assert kinds == {
        "fleet-init": "operator",
        **dict.fromkeys(("gateway-1", "gateway-2"), "gateway"),
        **{name: name for name in ("worker-1", "worker-2")},
    }
    names = set()
    for at in (1, 2):
        own = services[f"worker-{at}"]["environment"].items()
        length = len(Settings.PREFIX)
        chosen = {
            key[length:].lower(): value for key, value in own if key[:length] == Settings.PREFIX
        }
        config, _ = gather(Settings, chosen, None)
        assert config.join is not None
        names.add(config.worker_name)
    assert names == {"worker-1", "worker-2"}


def test_each_container_of_the_fleet_has_its_keys_alone() -> None:
    found = {
        name: {volume.partition(":")[0] for volume in service["volumes"]}
        for name, service in compose()["services"].items()
    }
    having = {
        volume: {name for name, volumes in found.items() if volume in volumes}
        for volume in ("fleet-keys", "gateway-keys", "worker-keys")
    }
    gateways, workers = {"gateway-1", "gateway-2"}, {"worker-1", "worker-2"}
    assert having["fleet-keys"] == {"fleet-init"}
    assert having["gateway-keys"] == {"fleet-init", *gateways}
    assert having["worker-keys"] == {"fleet-init", *workers}
    for name in (*gateways, *workers):
        (keys,) = (v for v in compose()["services"][name]["volumes"] if "-keys:" in v)
        directory = keys.split(":")[1]
        environment = compose()["services"][name]["environment"]
        assert keys.endswith(":ro")
        assert environment["AIMAGE_FLEET_KEY"] == f"{directory}/root.public"
        assert ("AIMAGE_SIGNING_KEY" in environment) == (name in gateways)


SERVICES = ("registry", "init", "worker", "nats", "fleet-init", "gateway-1", "worker-1", "worker-2")


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_hardened(service: str) -> None:
    found: dict[str, Any] = compose()["services"][service]
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert "cap_add" not in found and "privileged" not in found and "network_mode" not in found
    assert found["security_opt"] == ["no-new-privileges:true"]
    for port in found.get("ports", ()):
        assert port.startswith("127.0.0.1:"), port
    if "build" in found:
        assert found["user"] == USER
    for volume in found["volumes"]:
        source, _, rest = volume.partition(":")
        access = rest.partition(":")[2]
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert access == "ro", volume
        else:
            assert source in compose()["volumes"], source


def test_the_worker_waits_for_the_token_and_the_model() -> None:
    """``up --wait`` has a condition for services that exit (docker/compose, start.go)."""
    services = compose()["services"]
    assert services["worker"]["depends_on"]["init"]["condition"] == "service_completed_successfully"
    assert services["init"]["depends_on"]["registry"]["condition"] == "service_healthy"
    (shared,) = {v.partition(":")[0] for v in services["init"]["volumes"]} & set(
        compose()["volumes"]
    )
    assert f"{shared}:/run/aimage:ro" in services["worker"]["volumes"]


def test_build_contexts_of_compose_exist() -> None:
    for service in compose()["services"].values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]) in DOCKERFILES
            assert service["pull_policy"] == "build"


def test_the_configuration_of_containers_matches_our_schema() -> None:
    document = json.loads((DEPLOY / "docker" / "config.json").read_text())
    schema.validate("config", document)
    init = compose()["services"]["init"]["environment"]
    host = init["MODEL"].partition("/")[0]
    assert document["registries"][host]["plainHttp"] is True
    assert host.partition(":")[0] in compose()["services"]


# -- systemd


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return the units as installed in a system that has a program at their ExecStart."""
    for path in (*UNITS, SOCKET):
        (tmp_path / path.name).write_text(path.read_text().replace(PROGRAM, "/bin/true"))
    return tmp_path


def test_systemd_accepts_every_line(installed: Path) -> None:
    units = sorted(installed.iterdir())
    said = output(find_program("systemd-analyze"), "--man=no", "verify", *units)
    assert [
        line for line in said.splitlines() if "aimage" in line
    ] == []  # others belong to the machine


def test_systemd_reports_an_unknown_line(installed: Path) -> None:
    unknown = installed / "aimage.service"
    unknown.write_text(unknown.read_text().replace("KillMode=", "KilMode="))
    command = [find_program("systemd-analyze"), "--man=no", "verify", str(unknown)]
    assert "KilMode" in run(command, text=True).stderr


def test_services_have_a_low_exposure_level() -> None:
    analyze = find_program("systemd-analyze")
    for path in UNITS:
        said = output(analyze, "--no-pager", "security", "--offline=true", path)
        found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
        assert found is not None, said
        assert float(found[1]) <= LARGEST_EXPOSURE


def test_services_share_one_user_and_write_only_their_directories() -> None:
    for path in UNITS:
        found = unit(path)
        assert found["User"] == found["Group"] == "aimage", path.name
        assert found["ProtectSystem"] == "strict" and "ReadWritePaths" not in found
        assert f"/var/lib/{found['StateDirectory']}" == "/var/lib/aimage"
        assert "Environment=AIMAGE_STORE=/var/lib/aimage" in path.read_text().splitlines()


def test_stop_signals_only_the_main_process_of_the_worker() -> None:
    """The worker ends its model processes itself once images are finished.

    One that was killed for memory does not stop the others (systemd.kill(5), OOMPolicy= in
    systemd.service(5)).
    """
    found = unit(WORKER)
    assert (found["KillMode"], found["OOMPolicy"], found["Type"]) == ("mixed", "continue", "notify")


def test_the_socket_is_limited_to_its_group_and_this_machine() -> None:
    found = unit(SOCKET)
    assert (found["SocketUser"], found["SocketGroup"]) == ("aimage", "aimage")
    assert (found["SocketMode"], found["DirectoryMode"]) == ("0660", "0750")
    places = re.findall(r"^ListenStream=(.*)$", SOCKET.read_text(), re.MULTILINE)
    assert places == ["/run/aimage/aimage.sock", "127.0.0.1:11434"]


def test_users_and_directories_are_created(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give directories away")
    users, directories = (
        DEPLOY / "systemd" / f"aimage.{kind}.conf" for kind in ("sysusers", "tmpfiles")
    )
    (tmp_path / "etc").mkdir()
    output(find_program("systemd-sysusers"), f"--root={tmp_path}", users)
    entry = re.search(
        r"^aimage:x:(\d+):(\d+):[^:]*:([^:]*):(\S+)$",
        (tmp_path / "etc" / "passwd").read_text(),
        re.MULTILINE,
    )
    assert entry is not None
    assert (entry[3], Path(entry[4]).name) == ("/var/lib/aimage", "nologin")
    output(find_program("systemd-tmpfiles"), f"--root={tmp_path}", "--create", directories)
    place = (tmp_path / "run" / "aimage").stat()
    assert (place.st_mode & 0o777, place.st_uid, place.st_gid) == (
        0o750,
        int(entry[1]),
        int(entry[2]),
    )


# -- launchd


def test_the_agent_has_only_keys_of_launchd() -> None:
    found = plist()
    assert found["Label"] == PLIST.stem
    for key, value in found.items():
        assert type(value) is KEYS.get(key), key
    assert {"Label", "ProgramArguments", "RunAtLoad", "KeepAlive"} <= set(found)
    assert found["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["Umask"] == 0o077


def test_the_agent_listens_only_on_this_machine() -> None:
    arguments = plist()["ProgramArguments"]
    assert Path(arguments[0]).is_absolute() and all(isinstance(a, str) for a in arguments)
    assert [a for a in arguments if a.startswith("--addr")] == ["--addr=127.0.0.1:11434"]


def test_the_command_of_the_readme_creates_the_agent(tmp_path: Path) -> None:
    (command,) = re.findall(
        r"^sed .*?(?=^\S|\Z)", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )[:1]
    (tmp_path / "Library" / "LaunchAgents").mkdir(parents=True)
    done = run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "Library" / "LaunchAgents" / PLIST.name).read_bytes()
    assert b"@HOME@" not in made
    program = shlex.quote(f"{tmp_path}/.local/share/aimage-venv/bin/aimage")
    assert program.encode() in made


def test_every_variable_of_the_program_is_accepted_by_all_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A person exports what deploy/ names, and starts any server."""
    files = [COMPOSE, COMPOSE_CUDA, *(path for path in DEPLOY.rglob("*") if path.is_file())]
    # What ends in "_" is a prefix
    names = {
        name
        for path in files
        for name in re.findall(r"\bAIMAGE_\w+", path.read_text("utf-8", "replace"))
        if not name.endswith("_")
    }
    assert {"AIMAGE_STORE", "AIMAGE_NATS"} <= names
    sections = ("worker", "node", "gateway", "registry")
    settings = (list_server_variables(section).values() for section in sections)
    assert names <= {*SHARED_VARIABLES, *(name for group in settings for name in group)}
    for name in names:
        monkeypatch.setenv(name, "x")
    for section in sections:
        check_variables(section)
    assert list(find_misspelt_variables()) == []
