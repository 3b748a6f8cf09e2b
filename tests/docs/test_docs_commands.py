"""Every command that the documentation shows is typed here, and must do what is shown.

In a ``console`` block, lines after ``$`` are commands and the others what they print: ``...``
stands for anything, and lines may be left out. A comment ``# exit code 3`` at the end of a command
says that it fails. A document's commands share one shell, in a directory that holds
``examples/tiny`` and ``examples/shapes/model``; ``localhost:5000`` is a registry,
``localhost:5001`` one that wants the user ``operator`` with the password in ``password.txt``. What
cannot be run stands in an ``sh`` block, under a comment ``<!-- not run: why -->``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.document import GUIDES, ROOT, SHELLS, Command, Document
from tests.real_registry import PASSWORD, find_registry, free_port

PROGRAM = Path(sys.executable).with_name("aimage")
TIMEOUT = 120  # seconds for a document
DOCUMENTS = [Document(path) for path in GUIDES]
WITH_COMMANDS = [document for document in DOCUMENTS if document.commands]


def names(document: Document) -> str:
    return document.name


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=names)
def test_commands(document: Document, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    if not PROGRAM.is_file():
        pytest.skip("aimage is not installed beside this Python")
    with registries(document, tmp_path / "registries") as places:
        commands = [_placed(command, places) for command in document.commands]
        results = run_all(commands, tmp_path, _environment(tmp_path))
    for command, (code, output) in zip(commands, results, strict=True):
        where = f"{document.name}, line {command.line}: $ {command.text}\n"
        assert "Traceback" not in output, where + output
        assert code == command.code, f"{where}exit code {code}, not {command.code}\n{output}"
        missing = first_missing(command.expected, output)
        assert missing is None, f"{where}does not print {missing!r}, but\n{output[:4000]}"


@contextlib.contextmanager
def registries(document: Document, directory: Path) -> Iterator[dict[str, str]]:
    """The addresses in the document, and where on this machine they are."""
    typed = "\n".join(command.text for command in document.commands)
    places: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, private in (("localhost:5000", False), ("localhost:5001", True)):
            if name in typed:
                place = directory / ("private" if private else "open")
                place.mkdir(parents=True)
                places[name] = stack.enter_context(_registry(place, private))
        for port in set(re.findall(r"(?:localhost|127\.0\.0\.1)(:50[5-9]\d)\b", typed)):
            places[port] = f":{free_port()}"
        yield places


@contextlib.contextmanager
def _registry(directory: Path, private: bool) -> Iterator[str]:
    """Debian's docker-registry where it is installed, else our own (which has no accounts)."""
    if shutil.which("docker-registry"):
        with find_registry(directory, private=private) as found:
            yield found.host.replace("127.0.0.1", "localhost")
        return
    process = subprocess.Popen(
        [PROGRAM, "registry", "serve", "--addr", "127.0.0.1:0", "--store", directory],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"localhost:{process.stdout.readline().strip().rpartition(':')[2]}"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def _placed(command: Command, places: dict[str, str]) -> Command:
    text, expected = command.text, "\n".join(command.expected)
    for name, place in places.items():
        text, expected = text.replace(name, place), expected.replace(name, place)
    if re.search(r"registry serve.*:0\b", text):  # any free port
        expected = re.sub(r":\d+$", ":...", expected, flags=re.MULTILINE)
    return Command(text, tuple(expected.splitlines()), command.line)


def _environment(home: Path) -> dict[str, str]:
    """A reader's shell: aimage on PATH, a home of its own, no settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("AIMAGE_", "DOCKER_", "XDG_")) and key != "SOURCE_DATE_EPOCH"
    }
    return kept | {
        "PATH": f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "DOCKER_CONFIG": str(home / "docker"),
        "NO_PROXY": "localhost,127.0.0.1",
        "no_proxy": "localhost,127.0.0.1",
        "LC_ALL": "C.UTF-8",
    }


def run_all(
    commands: list[Command], home: Path, environment: dict[str, str]
) -> list[tuple[int, str]]:
    """Type the commands into one shell; the exit code and the output of each."""
    place = home / "place"
    shutil.copytree(ROOT / "examples" / "tiny", place / "examples" / "tiny")
    shutil.copytree(ROOT / "examples" / "shapes" / "model", place / "examples" / "shapes" / "model")
    (place / "password.txt").write_text(f"{PASSWORD}\n")
    answers = home / "answers"
    answers.mkdir()
    script = home / "script"
    script.write_text(
        "\n".join(_step(command, answers / str(i)) for i, command in enumerate(commands))
    )
    shell = subprocess.Popen(
        ["bash", script],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):  # servers that were left running
            os.killpg(shell.pid, signal.SIGTERM)
    assert not said, said
    return [
        (int((answers / f"{i}.code").read_text()), (answers / f"{i}.out").read_text())
        for i in range(len(commands))
    ]


def _step(command: Command, answer: Path) -> str:
    """One command for the shell. A server goes to the background once it has said something."""
    if not re.search(r"\bregistry serve\b", command.text):
        return f'{{\n{command.text}\n}} > "{answer}.out" 2>&1\necho $? > "{answer}.code"'
    text = command.text.rstrip().removesuffix("&")
    return (
        f'{{\n{text}\n}} > "{answer}.out" 2>&1 &\n'
        f'for _ in $(seq 200); do [ -s "{answer}.out" ] && break; sleep 0.05; done\n'
        f'echo 0 > "{answer}.code"'
    )


def first_missing(expected: tuple[str, ...], output: str) -> str | None:
    """The first line of ``expected`` that ``output`` does not have, after the lines before it."""
    lines = iter([" ".join(line.split()) for line in output.splitlines()])
    for wanted in expected:
        pattern = ".*".join(map(re.escape, " ".join(wanted.split()).split("...")))
        if wanted.strip() and not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def test_the_judge_of_output_can_refuse() -> None:
    output = "one\n  two  sha256:abc\nthree\n"
    assert first_missing(("one", "two sha256:...", "three"), output) is None
    assert first_missing(("two ...",), output) is None
    assert first_missing(("...", "three"), output) is None
    assert first_missing(("three", "one"), output) == "one"
    assert first_missing(("two",), output) == "two"


def test_the_shell_keeps_codes_output_and_variables(tmp_path: Path) -> None:
    commands = [
        Command("a=$(echo x); cd examples", (), 1),
        Command('echo "$a"; ls; false  # exit code 1', (), 2),
        Command("echo a \\\n  b", (), 3),
    ]
    assert run_all(commands, tmp_path, dict(os.environ)) == [
        (0, ""),
        (1, "x\nshapes\ntiny\n"),
        (0, "a b\n"),
    ]
    assert [command.code for command in commands] == [0, 1, 0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_a_command_that_is_not_run_says_why(document: Document) -> None:
    for block in document.blocks:
        where = f"{document.name}, line {block.line}"
        if block.language in SHELLS:
            assert block.has_reason, f"{where}: no '<!-- not run: why -->' right above"
        elif block.language != "console":
            assert not re.search(r"^\$ ", block.text, re.MULTILINE), f"{where}: not a console block"


def test_manifests_in_the_format_are_real(tmp_path: Path) -> None:
    """Each line of the manifests and configs in docs/format.md, but for ``...``, is printed."""
    if not PROGRAM.is_file():
        pytest.skip("aimage is not installed beside this Python")
    store, real = tmp_path / "store", ""
    for dialect in ("clowder", "ollama", "container", "modelpack"):
        command = [PROGRAM, "create", "-q", "tiny", ROOT / "examples" / "tiny"]
        command += ["--dialect", dialect, "--store", store]
        digest = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        manifest = json.loads(_blob(store, digest))
        config = json.loads(_blob(store, manifest["config"]["digest"]))
        real += json.dumps(manifest, indent=2) + json.dumps(config, indent=2)
    real += (store / "index.json").read_text()
    printed = {_bare(line) for line in real.splitlines()}
    shown = [b for b in Document(ROOT / "docs" / "format.md").blocks if b.language == "json"]
    assert len(shown) >= 4
    for block in shown:
        for line in block.text.splitlines():
            wanted = ".*".join(map(re.escape, _bare(line).split("...")))
            assert any(re.fullmatch(wanted, text) for text in printed), line


def _blob(store: Path, digest: str) -> bytes:
    return (store / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()


def _bare(line: str) -> str:
    return line.strip().removesuffix(",")
