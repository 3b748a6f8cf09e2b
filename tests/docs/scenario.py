"""Run the paths of docs/tutorial.md as a newcomer.

``python -m tests.docs.scenario PREFIX [WHEEL]``: unlike the tests of the documentation this also
runs the commands that install the package, into PREFIX instead of ``~/.local``, and from WHEEL
instead of the checkout. The number of commands and the seconds of each path are printed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.docs.document import ROOT, Command, Document
from tests.docs.shell import DIRECTORY, environment, placed, run_all
from tests.docs.test_docs_commands import first_missing, registries

TUTORIAL = Document(ROOT / "docs/tutorial.md")
# Seconds for a section that installs all packages, on a busy machine
_TIMEOUT = 1800
# heading: the largest number of commands
LIMITS = {
    "The first picture": 3,
    "A model on a second machine": 5,
    "A picture in Open WebUI": 4,
}


def commands(heading: str) -> list[Command]:
    """Return the commands of a section, with those that install packages."""
    with tempfile.TemporaryDirectory() as directory:
        section = Document(Path(directory) / "section.md")
        section.path.write_text(TUTORIAL.section(heading))
        installing = [
            Command(line, (), block.line)
            for block in section.blocks
            if block.language == "sh"
            for line in block.text.splitlines()
        ]
        return sorted([*installing, *section.commands], key=lambda command: command.line)


def follow(heading: str, prefix: Path, package: Path) -> str | None:
    """Run the commands of a section; return the first failure, or None."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        typed = commands(heading)
        whole = Document(TUTORIAL.path)
        places = stack.enter_context(registries(whole, home / "registries"))
        variables = environment(home) | {
            "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}",
            DIRECTORY: str(prefix / "bin"),
        }
        steps = [placed(command, places) for command in typed]
        install = (
            f"make -C {ROOT} install PREFIX={prefix} PYTHON={sys.executable} PACKAGE={package}"
        )
        steps = [
            Command(step.text.replace("make install", install), step.expected, step.line)
            for step in steps
        ]
        answers = run_all(steps, home, variables, places, seconds=_TIMEOUT)
        for step, (code, output) in zip(steps, answers, strict=True):
            missing = first_missing(step.expected, output)
            if code or missing:
                return f"$ {step.text}\nexit code {code}, missing {missing!r}\n{output}"
    return None


def main(prefix: Path, package: Path = ROOT) -> int:
    """Run all paths; return 1 after a failure."""
    for heading in LIMITS:
        began = time.monotonic()
        if failure := follow(heading, prefix, package):
            sys.stderr.write(f"{heading}: {failure}\n")
            return 1
        seconds = time.monotonic() - began
        sys.stdout.write(f"{heading}: {len(commands(heading))} commands, {seconds:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(argument).absolute() for argument in sys.argv[1:])))
