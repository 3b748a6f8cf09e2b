"""Run every verb in a child of this process, and print the exit codes and messages as JSON.

The verbs are those of the command line, so that a new one is run too. It is a program of its own,
since it becomes a user who may not read the interpreter's directory: it imports nothing of pytest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import click

from clowder_aimage.cli.main import cli

# Nothing listens there.
REGISTRY = "127.0.0.1:1"
REMOTE = f"{REGISTRY}/tiny:latest"
LISTENING = ("--addr", "127.0.0.1:0")
# Arguments on a store with the model "tiny", and the exit code. A verb that is not listed is called
# with names for its required arguments, and must end with an exit code of the documentation.
CALLS: dict[str, tuple[tuple[str, ...], int]] = {
    "completion": (("bash",), 0),
    "config show": ((), 0),
    "df": ((), 0),
    "diff": (("tiny", "tiny"), 0),
    "doctor": (("--offline",), 0),
    "du": ((), 0),
    "export": (("tiny", "exported"), 0),
    "gc": ((), 0),
    "help": ((), 0),
    "index": ((), 0),
    "login": ((REGISTRY, "-u", "user", "-p", "password"), 2),
    "logout": ((REGISTRY,), 2),
    "ls": ((), 0),
    "node": (LISTENING, 0),
    "pin": (("tiny",), 0),
    "pull": ((REMOTE,), 1),
    "registry serve": (LISTENING, 0),
    "repo ls": ((REGISTRY,), 1),
    "rm": (("other",), 0),
    "save": (("tiny", "-o", "tiny.tar"), 0),
    "serve": (LISTENING, 0),
    "show": (("tiny",), 0),
    "tag": (("tiny", "other"), 0),
    "tags": ((f"{REGISTRY}/tiny",), 1),
    "unpin": (("tiny",), 0),
    "validate": (("tiny",), 0),
    "verify": ((), 0),
    "version": ((), 0),
}
SECONDS = 60.0


def iter_commands(
    command: click.Command, context: click.Context, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the words of each verb, and the verb."""
    if not isinstance(command, click.Group):
        yield words, command
        return
    if command.invoke_without_command:
        yield words, command
    for name in command.list_commands(context):
        if (verb := command.get_command(context, name)) is not None:
            yield from iter_commands(verb, context, (*words, name))


def build_arguments(words: tuple[str, ...], command: click.Command) -> tuple[str, ...]:
    """Return the arguments of a call: those of the table, else a name for each required one."""
    if (call := CALLS.get(" ".join(words))) is not None:
        return call[0]
    uses_registry = any(param.name == "plain_http" for param in command.params)
    required = [param for param in command.params if param.required]
    return (REMOTE if uses_registry else "tiny",) * len(required)


def run(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run a verb; end it when it serves. Return its exit code, and what it printed."""
    program = [sys.executable, "-m", "clowder_aimage", *arguments]
    with subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        timer = threading.Timer(SECONDS, child.kill)
        timer.start()
        printed = b""
        for line in child.stdout or ():
            printed += line
            if line.startswith(b"http://127.0.0.1:"):
                child.send_signal(signal.SIGTERM)
        timer.cancel()
    return child.returncode, printed.decode(errors="replace")


def main() -> None:
    """Create the model, run the verbs in the working directory, and print their results.

    The arguments of the program are the directory of the model, and the verbs; by default all.
    """
    model, *chosen = sys.argv[1:]
    results = {"create": run(("create", "tiny", model, "--whole-files", "-q"))}
    for words, command in iter_commands(cli, click.Context(cli)):
        name = " ".join(words)
        if name not in results and (not chosen or name in chosen):
            results[name] = run((*words, *build_arguments(words, command)))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    os.umask(0o022)
    main()
