"""Every command that the documentation shows is typed here, and must do what is shown.

In a ``console`` block, lines after ``$`` are commands and the others what they print: ``...``
stands for anything, and lines may be left out. A comment ``# exit code 3`` at the end of a command
says that it fails. A document's commands share one shell, in a directory that holds
``examples/tiny``, ``examples/shapes`` (model, adapter, enhancer); ``localhost:5005`` is a registry,
``localhost:5001`` one that wants the user ``operator`` with the password in ``password.txt``, and
``~/.ollama/models`` a store of ollama's with ``llama3.2:1b`` in it. ``aimage serve``, ``aimage
registry serve`` and ``aimage node`` go to the background when they are ready, and end with the
document; the ports 11434, 8050, and 5050 to 5099 stand for free ones. What cannot be run
stands in an ``sh`` block, under a comment ``<!-- not run: why -->``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clowder_aimage.exporter.image import ImageSource
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Manifest, Reference
from clowder_aimage.pictures.artifact import encode_picture_config
from clowder_aimage.pictures.generated_picture import GeneratedPicture
from tests.docs.document import GUIDES, ROOT, SHELLS, Command, Document
from tests.docs.preloaded import preloaded
from tests.docs.shell import NODE, PROGRAM, WORKER, environment, placed, run_all
from tests.process import run, spawn
from tests.program import find_program
from tests.real_registry import find_registry, free_port

DOCUMENTS = [Document(path) for path in GUIDES]
WITH_COMMANDS = [document for document in DOCUMENTS if document.commands]


def names(document: Document) -> str:
    return document.name


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with preloaded(tmp_path_factory.mktemp("preloaded")) as directory:
        yield directory


@pytest.mark.integration
@pytest.mark.parametrize("document", WITH_COMMANDS, ids=names)
def test_commands(document: Document, tmp_path: Path, program: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    if not PROGRAM.is_file():
        pytest.skip("aimage is not installed beside this Python")
    for tool in ("curl", "jq", "openssl"):
        if any(tool in command.text.split() for command in document.commands):
            find_program(tool)
    with registries(document, tmp_path / "registries") as places:
        commands = [placed(command, places) for command in document.commands]
        variables = environment(tmp_path)
        variables["PATH"] = f"{program}{os.pathsep}{variables['PATH']}"
        results = run_all(commands, tmp_path, variables, places)
    for command, (code, output) in zip(commands, results, strict=True):
        where = f"{document.name}, line {command.line}: $ {command.text}\n"
        assert "Traceback" not in output, where + output
        assert code == command.code, f"{where}exit code {code}, not {command.code}\n{output}"
        missing = first_missing(command.expected, output)
        assert missing is None, f"{where}does not print {missing!r}, but\n{output[:4000]}"


@contextlib.contextmanager
def registries(document: Document, directory: Path) -> Iterator[dict[str, str]]:
    """Return the addresses in the document, and those on this machine that stand for them."""
    typed = "\n".join(command.text for command in document.commands)
    places: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, private in (("localhost:5005", False), ("localhost:5001", True)):
            if name in typed:
                place = directory / ("private" if private else "open")
                place.mkdir(parents=True)
                places[name] = stack.enter_context(_registry(place, private))
        for port in set(re.findall(r"(?:localhost|127\.0\.0\.1)(:50[5-9]\d)\b", typed)):
            places[port] = f":{free_port()}"
        if WORKER in typed or re.search(r"\baimage serve\b", typed):
            places[WORKER] = f":{free_port()}"
        if NODE in typed:
            places[NODE] = f":{free_port()}"
        yield places


@contextlib.contextmanager
def _registry(directory: Path, private: bool) -> Iterator[str]:
    """Debian's docker-registry where it is installed, else our own (which has no accounts)."""
    if shutil.which("docker-registry"):
        with find_registry(directory, private=private) as found:
            yield found.host.replace("127.0.0.1", "localhost")
        return
    process = spawn(
        [PROGRAM, "registry", "serve", "--addr", "127.0.0.1:0", "--store", directory],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"localhost:{process.stdout.readline().strip().rpartition(':')[2]}"
    finally:
        process.terminate()
        process.communicate(timeout=60)


def first_missing(expected: tuple[str, ...], output: str) -> str | None:
    """Return the first line of ``expected`` that ``output`` lacks after the lines before it."""
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


@pytest.mark.integration
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


@pytest.mark.integration
def test_the_shell_starts_a_server_and_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    port = free_port()
    commands = [
        Command(f"aimage registry serve --addr 127.0.0.1:{port} --store s &", (), 1),
        Command(f"curl -s http://127.0.0.1:{port}/v2/_catalog", (), 2),
        Command(f"aimage registry serve --addr 127.0.0.1:{port} --store s", (), 3),
        Command("aimage registry serve --help | head -n 1", (), 4),
    ]
    find_program("curl")
    begun, listed, taken, told = run_all(commands, tmp_path, environment(tmp_path))
    assert begun[0] == 0 and begun[1].startswith(f"http://127.0.0.1:{port}\n")
    assert listed == (0, '{"repositories": []}')
    assert taken[0] == 1 and "in use" in taken[1]
    assert told[1].startswith("Usage: aimage registry serve")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_addresses_of_a_worker_are_placed() -> None:
    places = {"localhost:5005": "localhost:7", WORKER: ":9"}

    def typed(text: str, *expected: str) -> tuple[str, tuple[str, ...]]:
        found = placed(Command(text, expected, 1), places)
        return found.text, found.expected

    url = "http://127.0.0.1:11434"
    moved = ("http://127.0.0.1:9",)
    assert typed("aimage serve &", url) == ("AIMAGE_SERVE_ADDR=127.0.0.1:9 aimage serve &", moved)
    assert typed("aimage serve --addr 127.0.0.1:11434", url) == (
        "aimage serve --addr 127.0.0.1:9",
        moved,
    )
    assert typed(f"curl {url}/localhost:5005/x")[0] == "curl http://127.0.0.1:9/localhost:7/x"
    assert typed("aimage config show", url) == ("aimage config show", (url,))


def test_a_command_that_is_not_run_says_why() -> None:
    for document, block in ((d, block) for d in DOCUMENTS for block in d.blocks):
        where = f"{document.name}, line {block.line}"
        if block.language in SHELLS:
            assert block.has_reason, f"{where}: no '<!-- not run: why -->' right above"
        elif block.language != "console" and not block.has_reason:
            assert not re.search(r"^\$ ", block.text, re.MULTILINE), f"{where}: not a console block"


@pytest.mark.integration
def test_manifests_in_the_format_are_real(tmp_path: Path) -> None:
    """Each line of the manifests and configs in docs/format.md, but for ``...``, is printed."""
    if not PROGRAM.is_file():
        pytest.skip("aimage is not installed beside this Python")
    store, real = tmp_path / "store", ""
    for dialect in ("clowder", "ollama", "container", "modelpack"):
        command: list[str | Path] = [PROGRAM, "create", "-q", "tiny", ROOT / "examples" / "tiny"]
        command += ["--dialect", dialect, "--store", store]
        digest = run(command, check=True, text=True).stdout.strip()
        manifest = json.loads(_blob(store, digest))
        config = json.loads(_blob(store, manifest["config"]["digest"]))
        real += json.dumps(manifest, indent=2) + json.dumps(config, indent=2)
    layout, name = ImageLayout(store), Reference.parse("tiny")
    image = ImageSource(layout, read_aimage(layout, name), name)
    index = json.loads(image.open(image.resolve(name)).read())
    entry = Descriptor.from_json(index["manifests"][0])
    described = Manifest.parse(image.open(entry).read()).config
    real += json.dumps(json.loads(image.open(described).read()), indent=2)
    real += json.dumps(json.loads((store / "index.json").read_text()), indent=2)
    made = {"reference": "localhost:5005/team/tiny:v1", "digest": digest, "steps": 2}
    made |= {"prompt": "a red fox in the snow", "width": 64}
    config = json.loads(encode_picture_config([GeneratedPicture(b"a picture", 7, "png", made)]))
    real += json.dumps(config, indent=2)
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
