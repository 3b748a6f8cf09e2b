"""A shell that runs the commands of a document one by one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from clowder_aimage.oci import mediatype
from tests.controlnet_file import tensors, write_file
from tests.docs.document import ROOT, Command
from tests.process import spawn
from tests.real_registry import PASSWORD

PROGRAM = Path(sys.executable).with_name("aimage")
# The variable with another directory of the program, for servers
DIRECTORY = "PROGRAM_DIRECTORY"
TIMEOUT = 400  # seconds for a document, on a busy machine under coverage
WORKER = ":11434"  # the address of a worker in documents, and the default
NODE = ":8050"  # the same for a node
# Commands that do not exit. Their first output means that they are ready.
_SERVER = re.compile(
    r"(?:\w+=\S* )*(aimage (?:registry serve|serve|node(?= -|\W*$))\b)(?!.* --help)"
)
# Clients of a worker or a node, if the environment has no address
_FUNCTION = """\
aimage() {{
  case " $* " in
    " ps "* | " stop "* | " sleep "* | " wake "* | *" --remote "*)
      AIMAGE_HOST=${{AIMAGE_HOST:-127.0.0.1{worker}}} command aimage "$@" ;;
    " node status "*)
      AIMAGE_HOST=${{AIMAGE_HOST:-127.0.0.1{node}}} command aimage "$@" ;;
    " run "*) AIMAGE_HOST=${{AIMAGE_HOST-}} command aimage "$@" ;;
    *) command aimage "$@" ;;
  esac
}}
"""
_STEP = """\
{{
{text}
}} > "{answer}.out" 2>&1
echo $? > "{answer}.code"
"""
_START = """\
{{
{text}
}} > "{answer}.out" 2> "{answer}.err" &
_server=$!; _servers="$_servers $_server"
for _ in $(seq 600); do
  [ -s "{answer}.out" ] || ! kill -0 "$_server" 2> /dev/null && break; sleep 0.05
done
if kill -0 "$_server" 2> /dev/null; then echo 0; else wait "$_server"; echo $?; fi > "{answer}.code"
"""
_END = """\
[ -z "$_servers" ] || kill $_servers 2> /dev/null
wait 2> /dev/null
"""


def environment(home: Path) -> dict[str, str]:
    """Return an environment with aimage on PATH, an empty home, and no settings."""
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


def placed(command: Command, places: Mapping[str, str]) -> Command:
    """Return the command with the actual addresses of the document's servers."""
    text, expected = command.text, "\n".join(command.expected)
    if "config show" in text:  # its addresses are defaults
        return command
    for name, place in places.items():
        text, expected = text.replace(name, place), expected.replace(name, place)
    if re.search(r"serve.*:0\b", text):  # any free port
        expected = re.sub(r":\d+$", ":...", expected, flags=re.MULTILINE)
    if WORKER in places and re.match(r"(\w+=\S* )*aimage serve\b", text):
        said = re.search(r"--addr|--socket|AIMAGE_SERVE_ADDR", text)
        text = text if said else f"AIMAGE_SERVE_ADDR=127.0.0.1{places[WORKER]} {text}"
    return Command(text, tuple(expected.splitlines()), command.line)


def run_all(
    commands: list[Command],
    home: Path,
    variables: Mapping[str, str],
    places: Mapping[str, str] | None = None,
    *,
    seconds: float = TIMEOUT,
) -> list[tuple[int, str]]:
    """Run the commands in one shell; return the exit code and the output of each.

    The output of a server is its result first, and then its log. Servers end with the shell.
    """
    place, answers, script = home / "place", home / "answers", home / "script"
    furnish(place)
    ollama(home / ".ollama" / "models")
    (home / ".curlrc").write_text("no-progress-meter\n")  # not shown on a terminal
    answers.mkdir()
    steps = [_step(command, answers / str(i)) for i, command in enumerate(commands)]
    known = {WORKER: WORKER, NODE: NODE} | dict(places or {})
    begin = _FUNCTION.format(worker=known[WORKER], node=known[NODE])
    script.write_text(f"{begin}_servers=\n{''.join(steps)}{_END}")
    shell = spawn(
        ["bash", script],
        cwd=place,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = shell.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):  # may have been left running
            os.killpg(shell.pid, signal.SIGTERM)
    assert not said, said
    return [_answer(answers / str(i)) for i in range(len(commands))]


def _step(command: Command, answer: Path) -> str:
    """Return the shell code for a command.

    A server runs in the background, and the shell waits until it prints something or exits.
    """
    if (found := _SERVER.match(command.text)) is None:
        return _STEP.format(text=command.text, answer=answer)
    program = f"${{{DIRECTORY}:-{PROGRAM.parent}}}/{command.text[found.start(1) :]}"
    text = f"{command.text[: found.start(1)]}exec {program}"
    return _START.format(text=text.rstrip().removesuffix("&"), answer=answer)


def _answer(answer: Path) -> tuple[int, str]:
    parts = [answer.with_suffix(f".{kind}") for kind in ("out", "err")]
    text = "".join(part.read_text() for part in parts if part.exists())
    return int(answer.with_suffix(".code").read_text()), text


def furnish(place: Path) -> None:
    """Create the files of the directory that a reader works in."""
    for name in ("tiny", "shapes/model", "shapes/enhancer"):
        shutil.copytree(ROOT / "examples" / name, place / "examples" / name)
    for file in (ROOT / "examples" / "shapes").glob("*.safetensors"):
        shutil.copy(file, place / "examples" / "shapes")
    write_file(place / "union.safetensors", tensors())
    (place / "password.txt").write_text(f"{PASSWORD}\n")


def ollama(models: Path) -> None:
    """Create a store of ollama, with a model ``llama3.2:1b`` of a hundred bytes."""
    (models / "blobs").mkdir(parents=True)

    def blob(kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (models / "blobs" / f"sha256-{digest}").write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": mediatype.DOCKER_MANIFEST,
        "config": blob(mediatype.DOCKER_CONFIG, b'{"model_format":"gguf"}'),
        "layers": [blob("application/vnd.ollama.image.model", b"GGUF" + bytes(96))],
    }
    name = models / "manifests" / "registry.ollama.ai" / "library" / "llama3.2" / "1b"
    name.parent.mkdir(parents=True)
    name.write_text(json.dumps(manifest))
