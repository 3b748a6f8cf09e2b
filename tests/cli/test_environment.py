"""The environment of a user: no home, directories of others, closed streams, optional files.

Sources: Kubernetes, "Configure a Security Context" (runAsUser, readOnlyRootFilesystem); XDG Base
Directory Specification; reports of go-containerregistry (#1852), velero (#10300) and containers
(image #514).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.config.user_directory import read_client_options
from clowder_aimage.errors import StoreError
from clowder_aimage.model.llama.temporary_directory import create_temporary_directory
from tests.cli.every_verb import CALLS
from tests.process import Aimage, Done, run
from tests.scripted import ScriptedRegistry, artifact, serving

ROOT = Path(__file__).parents[2]
USER = 12345
# In a mount namespace, so that nothing of it stays: the interpreter and the source where any user
# can read them, a directory that only root can read, and a root directory that is read-only.
SANDBOX = """
mount -t tmpfs none /mnt
mkdir /mnt/base /mnt/repo /mnt/packages /mnt/work
mkdir -m 700 /mnt/closed
mount --bind "$1" /mnt/base
mount --bind "$2" /mnt/packages
mount --bind "$3" /mnt/repo
chown "$4:$4" /mnt/work
mount -o remount,ro,bind /
shift 4
cd /mnt/work
exec "$@"
"""


def run_as_user(environment: dict[str, str], *verbs: str) -> dict[str, tuple[int, str]]:
    """Run verbs as a user id without an entry in /etc/passwd; return their codes and output."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("only root may make other mounts, and unshare and setpriv are needed")
    if run(["unshare", "--mount", "true"]).returncode != 0:
        pytest.skip("this container may not make mounts")
    python = f"/mnt/base/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    variables = {
        "PATH": "/usr/bin:/bin",
        "LD_LIBRARY_PATH": "/mnt/base/lib",
        "PYTHONPATH": "/mnt/repo:/mnt/packages",
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }
    done = run(
        [
            *("unshare", "--mount", "sh", "-ec", SANDBOX, "sh"),
            *(sys.base_prefix, sysconfig.get_path("purelib"), ROOT, USER),
            *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
            *("env", "-i", *(f"{name}={value}" for name, value in variables.items())),
            *(python, "-m", "tests.cli.every_verb", "/mnt/repo/examples/tiny", *verbs),
        ],
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {name: (code, printed) for name, (code, printed) in json.loads(done.stdout).items()}


def check_results(results: dict[str, tuple[int, str]]) -> None:
    """Check that each verb ended as documented."""
    for name, (code, printed) in results.items():
        assert "Traceback" not in printed, f"{name}: {printed}"
        expected = (CALLS[name][1],) if name in CALLS else range(7)
        assert code in expected, f"{name}: {code}: {printed}"


@pytest.mark.integration
def test_every_verb_runs_for_any_user_without_a_home_on_a_read_only_root() -> None:
    results = run_as_user({"AIMAGE_STORE": "/mnt/work/store"})
    assert results.keys() > CALLS.keys()
    check_results(results)


@pytest.mark.integration
def test_a_home_of_another_user_counts_as_absent() -> None:
    verbs = ("ls", "pull", "serve", "config show")
    home = {"HOME": "/mnt/closed", "XDG_RUNTIME_DIR": "/mnt/closed", "TMPDIR": "/mnt/closed"}
    results = run_as_user({"AIMAGE_STORE": "/mnt/work/store", **home}, *verbs)
    assert results.keys() == {"create", *verbs}
    check_results(results)
    path = "/mnt/closed/.config/aimage/config.json"
    assert results["pull"][1].count(f"warning: {path} is ignored: Permission denied") == 1


@pytest.mark.integration
def test_the_store_in_the_home_of_another_user_is_named() -> None:
    code, printed = run_as_user({"HOME": "/mnt/closed"}, "ls")["ls"]
    assert code == 1
    message, advice = printed.splitlines()
    assert message.startswith(
        "aimage: cannot use the store /mnt/closed/.local/share/aimage: Permission denied"
    )
    assert "--store" in advice


@pytest.mark.integration
def test_without_a_home_the_store_has_to_be_named() -> None:
    code, printed = run_as_user({}, "ls")["ls"]
    assert code == 2
    assert printed.startswith("aimage: this user has no home directory for a store\n")
    assert "--store" in printed
    assert "AIMAGE_STORE" in printed


# -- optional files: content of the configuration, and the reason in the warning


def make_directory(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_file(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


UNUSABLE: dict[str, tuple[str, Callable[[Path], object], str | None]] = {
    "empty": ("config.json", make_file(b""), "it is empty"),
    "blank": ("config.json", make_file(b"\n"), "it is empty"),
    "cut off": ("config.json", make_file(b'{"registries": {'), "not valid JSON"),
    "a list": ("config.json", make_file(b"[]"), "not of type 'object'"),
    "nothing": ("config.json", make_file(b"null"), "not of type 'object'"),
    "not text": ("config.json", make_file(b"{\xff}"), "decode"),
    "too deep": ("config.json", make_file(b"[" * 100_000), "nested"),
    "not YAML": ("config.yaml", make_file(b"run: ["), "line 2"),
    "tabs": ("config.yaml", make_file(b"run:\n\tremote: true"), "line 2"),
    "a text": ("config.yaml", make_file(b"hello"), "not of type 'object'"),
    "comments": ("config.yaml", make_file(b"# nothing yet\n"), None),
    "a directory": ("config.json", make_directory, "not a regular file"),
    "a pipe": ("config.json", make_pipe, "not a regular file"),
    "a loop": ("config.json", make_loop, "symbolic links"),
    "none": ("config.json", lambda _: None, None),
}


@pytest.fixture
def registry() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry(serving(*artifact(b"{}", b"weights"))).running() as running:
        yield running


def resolve_with(here: Aimage, registry: ScriptedRegistry, *options: str) -> Done:
    return here.attempt("resolve", f"{registry.host}/a:latest", *options)


@pytest.mark.parametrize("situation", UNUSABLE)
def test_an_unusable_configuration_counts_as_absent_for_a_client(
    situation: str, aimage: Callable[[], Aimage], registry: ScriptedRegistry
) -> None:
    here, (name, make, reason) = aimage(), UNUSABLE[situation]
    path = here.home / "config" / "aimage" / name
    path.parent.mkdir(parents=True)
    make(path)
    done = resolve_with(here, registry)
    assert done.code == 0, done.err
    warnings = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    if reason is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert warning.startswith(f"warning: {path} is ignored: ")
        assert reason in warning


def test_a_warning_is_an_event_with_json(
    aimage: Callable[[], Aimage], registry: ScriptedRegistry
) -> None:
    here = aimage()
    path = here.home / "config" / "aimage" / "config.json"
    path.parent.mkdir(parents=True)
    path.touch()
    event = json.loads(resolve_with(here, registry, "--json").err)
    assert event["message"] == f"warning: {path} is ignored: it is empty"
    assert (event["event"], event["level"]) == ("note", "warning")


@pytest.mark.parametrize("situation", [name for name, it in UNUSABLE.items() if it[2]])
def test_an_unusable_configuration_that_is_named_is_an_error(
    situation: str, aimage: Callable[[], Aimage], registry: ScriptedRegistry
) -> None:
    here, (name, make, _) = aimage(), UNUSABLE[situation]
    make(here.home / name)
    here.environment["AIMAGE_CONFIG"] = str(here.home / name)
    done = resolve_with(here, registry)
    assert done.code == 2
    assert str(here.home / name) in done.err


def test_a_server_does_not_start_without_a_configuration_that_exists(
    aimage: Callable[[], Aimage],
) -> None:
    here = aimage()
    path = here.home / "config" / "aimage" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("registry: {tokenFile: tokens")
    assert "cannot use the configuration" in here("registry", "serve", code=2).err


def test_a_directory_of_certificates_that_may_not_be_seen_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", "/closed/certs")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_dir", fail)
        assert read_client_options().ca_bundle is None


def test_without_a_place_for_temporary_files_one_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with (
        pytest.raises(StoreError, match="cannot create a temporary directory") as caught,
        create_temporary_directory(),
    ):
        pass
    assert "TMPDIR" in str(caught.value.hint)


HOMES: dict[str, dict[str, str | None]] = {
    "a file": {"HOME": "/etc/hostname"},
    "missing": {"HOME": "/nonexistent"},
    "relative": {"HOME": "home"},
    "empty": {"HOME": ""},
    "relative directories": {
        **dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"), "x"),
        "HOME": "/nonexistent",
    },
    "directories that are files": {
        **dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"), "/etc/hostname"),
    },
}


@pytest.mark.parametrize("situation", HOMES)
def test_a_home_that_is_not_one(
    situation: str, aimage: Callable[[], Aimage], registry: ScriptedRegistry
) -> None:
    here = aimage()
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        here.environment[name] = ""
    here.environment |= {name: value or "" for name, value in HOMES[situation].items()}
    done = resolve_with(here, registry)
    assert (done.code, done.err) == (0, "")
    assert here("pull", "-q", f"{registry.host}/a:latest").err == ""


# -- streams and locales of a process


STREAMS: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "no stdin": (("login", "h.io"), "<&-", 2, "no terminal to ask for the username"),
    "no stdin to load": (("load", "-"), "<&-", 5, "empty file"),
    "no stdin to validate": (("validate", "-"), "<&-", 5, ""),
    "no stdout": (("version",), ">&-", 0, ""),
    "no stderr": (("show", "absent"), "2>&-", 3, ""),
    "no streams": (("show", "absent"), "<&- >&- 2>&-", 3, ""),
    "a full disk": (("version",), ">/dev/full", 6, "No space left on device"),
    "a full disk for messages": (("show", "absent"), "2>/dev/full", 3, ""),
    "a full disk for many lines": (("config", "show"), ">/dev/full", 6, "cannot write to stdout"),
    "a full disk for help": (("--help",), ">/dev/full", 6, "No space left on device"),
}


@pytest.mark.integration
@pytest.mark.parametrize("situation", STREAMS)
def test_streams_that_are_closed_or_full(situation: str, aimage: Callable[[], Aimage]) -> None:
    here, (words, redirection, code, message) = aimage(), STREAMS[situation]
    script = f'exec "$0" -m clowder_aimage "$@" {redirection}'
    command: list[Any] = ["sh", "-c", script, sys.executable, *words]
    done = run(command, env=here.env(), cwd=here.home, text=True)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


LOCALES = (
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    {"LC_ALL": "xx_YY.unknown", "TZ": ":no/where", "TERM": ""},
)


@pytest.mark.integration
@pytest.mark.parametrize("locale", LOCALES, ids=lambda it: it["LC_ALL"])
def test_any_locale_prints_any_name(locale: dict[str, str], aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    here.environment |= {**locale, "AIMAGE_STORE": str(here.home / "größe")}
    assert here.process("config", "show").err == ""


@pytest.mark.integration
def test_a_working_directory_that_was_removed(aimage: Callable[[], Aimage]) -> None:
    here = aimage()
    (here.home / "gone").mkdir()
    script = (
        'cd gone && rmdir ../gone && "$0" -m clowder_aimage ls && "$0" -m clowder_aimage create x .'
    )
    done = run(["sh", "-c", script, sys.executable], env=here.env(), cwd=here.home, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot read .: No such file or directory" in done.stderr
