"""The libraries that run models, and their devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.cli.console.installation import install_command
from clowder_aimage.cli.console.output import format_size
from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck
from clowder_aimage.errors import FormatError
from clowder_aimage.model.hardware import count_cores
from clowder_aimage.model.library_choice import SLOW
from clowder_aimage.oci import read_json

# Seconds; importing PyTorch and Transformers from a slow disk takes long.
_PATIENCE = 60.0
_COMMAND = (sys.executable, "-m", "clowder_aimage.cli.doctor.backend_process")
_MAX_LINE = 1 << 16
_WORDS = {
    "pictures": ("image models", "mlx"),
    "texts": ("language models of Transformers", "text"),
    "gguf": ("language models in GGUF files", "llama"),
}
_GPU_ADVICE = "install the driver of the GPU, and a build of PyTorch for it"
# They limit the threads of OpenBLAS.
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The lines that a process printed, and its exit code; None if it did not end in time."""

    lines: tuple[bytes, ...]
    code: int | None = 0


def run_process() -> ProcessResult:
    """Import the libraries in a process of their own."""
    try:
        done = subprocess.run(
            _COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return ProcessResult(tuple((error.stdout or b"").splitlines()), None)
    return ProcessResult(tuple(done.stdout.splitlines()), done.returncode)


@dataclass(frozen=True, slots=True)
class BackendCheck(MachineCheck):
    """``run_libraries`` imports them; ``environment`` has the limits of threads."""

    name = "backend"
    run_libraries: Callable[[], ProcessResult] = run_process
    environment: Mapping[str, str] | None = None
    cores: int = 0

    def run(self) -> Iterator[Finding]:
        result = self.run_libraries()
        described = {value["name"]: value for value in _parse_lines(result.lines)}
        are_all_missing = all(value.get("missing") for value in described.values())
        for name in _WORDS:
            if name in described:
                yield from self._judge(name, described[name], are_all_missing)
            else:
                yield _judge_end(name, result.code)
                return

    def _judge(self, name: str, value: dict[str, Any], are_all_missing: bool) -> Iterator[Finding]:
        subject, extra = _WORDS[name]
        if "error" in value:
            # One kind of models is enough for most users.
            is_ok = value["missing"] and not (are_all_missing and name == "pictures")
            message = f"{subject}: {value['error']}"
            advice = "" if is_ok else value["advice"] or install_command(extra)
            level = Level.OK if is_ok else Level.WARNING if value["missing"] else Level.ERROR
            yield Finding(level, message, advice, value)
            return
        parts = [value["library"], value.get("device"), _format_memory(value.get("memory"))]
        message = f"{subject}: {', '.join(filter(None, parts))}"
        if value.get("device") == SLOW:
            message += ": without OpenBLAS, products take 30 times as long"
            yield Finding(Level.WARNING, message, install_command("mlx"), value)
        elif value.get("warning"):
            has_torch = str(value["library"]).startswith("torch")
            advice = _GPU_ADVICE if has_torch else install_command("torch")
            yield Finding(Level.WARNING, value["warning"], advice, value)
        else:
            yield Finding(Level.OK, message, facts=value)
        if "openblas" in str(value.get("device")):
            yield from self._judge_threads()

    def _judge_threads(self) -> Iterator[Finding]:
        environment = os.environ if self.environment is None else self.environment
        cores = self.cores or count_cores()
        for name in _THREADS:
            text = environment.get(name, "")
            if text.isdecimal() and 0 < int(text) < cores:
                message = f"{name} limits OpenBLAS to {text} of {cores} cores"
                yield Finding(Level.WARNING, message, f"unset {name}", {name: text, "cores": cores})


def _parse_lines(lines: tuple[bytes, ...]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a process; libraries may print other lines."""
    for line in lines:
        try:
            value = read_json(line, "a result", _MAX_LINE)
        except FormatError:
            continue
        if isinstance(value, dict) and value.get("name") in _WORDS:
            yield value


def _judge_end(name: str, code: int | None) -> Finding:
    subject, extra = _WORDS[name]
    if code is None:
        reason = f"its library was not imported within {_PATIENCE:.0f} seconds"
    elif code < 0:
        reason = f"importing its library ended the process with {signal.Signals(-code).name}"
    else:
        reason = f"importing its library ended the process with exit code {code}"
    return Finding(Level.ERROR, f"{subject}: {reason}", install_command(extra), {"code": code})


def _format_memory(size: int | None) -> str:
    return f"{format_size(size)} of memory for models" if size else ""
