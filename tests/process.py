"""The command line as a user meets it: a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = [sys.executable, "-m", "clowder_aimage.cli"]


@dataclass
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The only line of stdout."""
        (line,) = self.out.splitlines()
        return line


@dataclass
class Aimage:
    """``aimage`` with a home and a store of its own."""

    home: Path
    store: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: object, code: int = 0, stdin: str = "") -> Done:
        """Run a verb; the test fails with all output when it exits with another code."""
        done = subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env=self.env(),
            cwd=self.home,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, f"{done.returncode}: {done.stdout}\n{done.stderr}"
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Begin a verb and come back at once."""
        return subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env(),
            cwd=self.home,
        )

    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIMAGE_", "DOCKER_"))}
        for name in ("SOURCE_DATE_EPOCH", "REGISTRY_AUTH_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
            kept.pop(name, None)
        return kept | {
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "DOCKER_CONFIG": str(self.home / "docker"),
            "AIMAGE_STORE": str(self.store),
            "PYTHONPATH": str(Path(__file__).parent.parent),
            **self.environment,
        }
