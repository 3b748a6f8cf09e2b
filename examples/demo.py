"""A complete workflow with the embedded shapes model, showing each command: ``make demo``.

The demo starts a registry on this machine, packs a model directory as an AImage, pushes it,
pulls it into a second, empty store, and makes pictures there. It needs no network, no Docker
and no root. It uses only the standard library; the work is done by ``aimage``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

EXAMPLES = Path(__file__).resolve().parent
MODEL = EXAMPLES / "shapes" / "model"
ADAPTER = EXAMPLES / "shapes" / "azure.safetensors"
OUTPUT = Path("demo-output")
PROMPTS = (
    "a red circle on a white background",
    "two blue squares",
    "a green triangle left of a yellow circle",
    "an orange star on a black background",  # the training data have no orange star
    "three pink crosses on a grey background",
    "a small cyan square in the top right corner",
)
ADAPTED = ("an azure star", "two azure circles on a black background")  # the model knows no azure
SEED, EACH = "1", "3"  # pictures per prompt, with consecutive seeds starting at this one
LIMIT = 120  # seconds for one step
CHILDREN: list[subprocess.Popen[str]] = []


class DemoError(Exception):
    """A failed step; the message describes the step and the failure."""


def main() -> None:
    """Run all steps, and always clean up."""
    signal.signal(signal.SIGTERM, _terminated)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aimage-demo-", ignore_cleanup_errors=True) as name:
        try:
            picture = demo(Path(name))
        except DemoError as error:
            sys.exit(f"\ndemo: {error}")
        except KeyboardInterrupt:
            print("\ndemo: interrupted", file=sys.stderr)
            sys.exit(130)
        finally:
            for child in CHILDREN:
                stop(child)
    print(f"\nDone in {time.monotonic() - began:.0f} s. The pictures: {picture.resolve()}")
    print("The model is a small Z-Image that knows drawn shapes: examples/shapes tells more.")
    print("A real model directory takes the same commands. Next: docs/first-picture.md")


def demo(home: Path) -> Path:
    """Run the steps; return the path of the sheet with all pictures."""
    program = find_program()
    environment = make_environment(home)

    say("A registry on this machine, over an empty directory")
    host = start_registry(program, environment, home / "registry")
    reference = f"{host}/demo/shapes:v1"
    here, there = ["--store", str(home / "here")], ["--store", str(home / "there")]

    def aimage(*arguments: str) -> str:
        return run(program, environment, *arguments)

    say("create: the model directory becomes an AImage in the store 'here', a blob per tensor")
    created = last_line(aimage("create", reference, show_path(MODEL), *here))

    say("push: it goes to the registry")
    pushed = last_line(aimage("push", reference, *here))

    say("pull: it arrives in a second store, 'there', which was empty")
    pulled = last_line(aimage("pull", reference, *there))
    agree("create, push and pull", created, pushed, pulled)

    say("show: what it consists of")
    aimage("show", reference, *there)

    say("run: pictures from prompts, with the weights that came from the registry")
    OUTPUT.mkdir(exist_ok=True)

    def pictures(prompt: str, *options: str) -> list[str]:
        place = OUTPUT / prompt.replace(" ", "-")
        place.mkdir(exist_ok=True)
        wish = [*options, "--seed", SEED, "-n", EACH, "-o", str(place), "--no-open"]
        return aimage("run", reference, prompt, *wish, *there).split("\n")[:-1]

    paths = [path for prompt in PROMPTS for path in pictures(prompt)]

    say("replay: a picture says how it was made; made again, it is the same")
    agree("replay", last_line(aimage("replay", paths[-1], *there)), "equal")

    say("run --lora: an adapter of 250 kB adds a ninth colour, without changing the weights")
    for prompt in ADAPTED:
        paths += pictures(prompt, "--lora", show_path(ADAPTER))

    sheet = OUTPUT / "shapes.png"
    subprocess.run([sys.executable, str(EXAMPLES / "sheet.py"), str(sheet), *paths], check=True)
    return sheet


def find_program() -> str:
    """Return the ``aimage`` beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("aimage")
    found = str(beside) if beside.is_file() else shutil.which("aimage")
    if found is None:
        raise DemoError("aimage is not installed: run 'make demo'")
    return found


def make_environment(home: Path) -> dict[str, str]:
    """Return an environment without the user's store, settings and proxies."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AIMAGE_")}
    around = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy"), "127.0.0.1"]))
    return kept | {
        "DOCKER_CONFIG": str(home / "docker"),
        "NO_PROXY": around,
        "no_proxy": around,
    }


def start_registry(program: str, environment: dict[str, str], store: Path) -> str:
    """Start ``aimage registry serve`` as a child; return its HOST:PORT once it is listening."""
    arguments = ["registry", "serve", "--addr", "127.0.0.1:0", "--store", str(store)]
    show_command(arguments, " &")
    log = store.with_name("registry.log")  # a pipe would fill up with its access log
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    CHILDREN.append(child)
    late = threading.Timer(LIMIT, child.kill)  # if the server never prints a line
    late.start()
    try:
        line = child.stdout.readline().strip() if child.stdout else ""
    finally:
        late.cancel()
    if not re.fullmatch(r"http://127\.0\.0\.1:\d+", line):
        child.kill()
        child.wait()
        said = (line + "\n" + log.read_text(errors="replace")).strip()
        raise DemoError(f"the registry did not start:\n{indented(said)}")
    print(indented(line))
    return line.removeprefix("http://")


def run(program: str, environment: dict[str, str], *arguments: str) -> str:
    """Show a command, run it, and show its output; return its stdout."""
    show_command(arguments)
    child = subprocess.Popen(
        [program, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    CHILDREN.append(child)
    try:
        out, err = child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        err += f"(killed after {LIMIT} s)"
    CHILDREN.remove(child)
    for text in (err, out):
        if text.strip():
            print(indented(text.rstrip()))
    if child.returncode:
        raise DemoError(f"'aimage {arguments[0]}' exited with {child.returncode}, expected 0")
    return out


def stop(child: subprocess.Popen[str]) -> None:
    """Terminate a child, and kill it if necessary."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def agree(what: str, *values: str) -> None:
    """Fail unless all values are the same."""
    if len(set(values)) != 1 or not values[0]:
        raise DemoError(f"{what} do not agree:\n" + indented("\n".join(values)))
    if values[0] != "equal":
        print(f"  The digest is the same all the way: {values[0]}")


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def show_command(arguments: list[str] | tuple[str, ...], end: str = "") -> None:
    """Print the command as a user would type it."""
    print(f"$ aimage {shlex.join(arguments)}{end}", flush=True)


def show_path(path: Path) -> str:
    """Return the path relative to the current directory if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
