"""The installation of this program, and the command that adds an extra to it."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

_NAME = "clowder-aimage"
# files that tools leave in the environments that they make, and their commands
_TOOLS = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}


class Extra(NamedTuple):
    """A package that is installed with an extra, and the purpose of the extra."""

    package: str
    purpose: str


EXTRAS = {
    "c2pa": Extra("c2pa", "pictures that are signed, and their signatures"),
    "fleet": Extra("nats", "many workers behind one address"),
    "format": Extra("jinja2", "results by a template"),
    "hf": Extra("huggingface_hub", "models of the Hugging Face hub"),
    "llama": Extra("xllamacpp", "language models in GGUF files"),
    "mlx": Extra("mlx", "image models, and quantization"),
    "otel": Extra("opentelemetry", "traces by OpenTelemetry"),
    "server": Extra("aiohttp", "the store as a registry"),
    "socks": Extra("socks", "SOCKS proxies"),
    "text": Extra("mlx_lm", "language models of Transformers"),
    "torch": Extra("diffusers", "image models with PyTorch, on GPUs of NVIDIA and AMD"),
    "trust": Extra("sigstore", "signatures and their policy"),
    "worker": Extra("pydantic", "a worker and a node"),
    "zstd": Extra("zstandard", "layers compressed with zstd"),
}


def install_command(extras: str) -> str:
    """Return the command that installs ``extras`` from the origin of this installation."""
    requested = set(extras.split(","))
    # These commands install anew: keep the extras that are there.
    if command := _find_tool():
        requested |= {name for name, extra in EXTRAS.items() if is_installed(extra.package)}
    return f"{command or _find_pip()} {_format_requirement(','.join(sorted(requested)))}"


def is_installed(package: str) -> bool:
    """Return True if Python finds a package."""
    return importlib.util.find_spec(package) is not None


def _find_tool() -> str | None:
    """Return the command of a tool that makes environments; None in any other environment."""
    for file, command in _TOOLS.items():
        if Path(sys.prefix, file).is_file():
            return command
    # The Python of Debian, Ubuntu and Homebrew refuses packages (PEP 668).
    is_managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").is_file()
    return "pipx install --force" if is_managed and sys.prefix == sys.base_prefix else None


def _find_pip() -> str:
    """Return the command that installs into this environment."""
    # Not find_spec("pip"): setuptools hooks into that, and warns if distutils is imported.
    if not any(metadata.distributions(name="pip")):
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    program = shutil.which("pip")
    is_of_environment = program is not None and Path(program).parent == Path(sys.executable).parent
    return "pip install" if is_of_environment else f"{shlex.quote(sys.executable)} -m pip install"


def _format_requirement(extras: str) -> str:
    """Return the arguments that name this package: a directory, an address, or its name alone."""
    origin, extras = _read_origin(), f"[{extras}]"
    url, vcs = str(origin.get("url", "")), origin.get("vcs_info")
    if "dir_info" in origin:
        option = "-e " if origin["dir_info"].get("editable") else ""
        return option + shlex.quote(unquote(urlsplit(url).path) + extras)
    if vcs is not None:
        revision = vcs.get("requested_revision")
        url = f"{vcs['vcs']}+{url}" + (f"@{revision}" if revision else "")
    return shlex.quote(f"{_NAME}{extras} @ {url}" if url else f"{_NAME}{extras}")


def _read_origin() -> dict[str, Any]:
    """Return the origin of the package (PyPA, "Recording the Direct URL Origin")."""
    try:
        text = metadata.distribution(_NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        # A checkout on the path.
        root = Path(__file__).parents[3]
        return {"url": root.as_uri(), "dir_info": {}} if (root / "pyproject.toml").is_file() else {}
    origin = json.loads(text or "{}")
    return origin if isinstance(origin, dict) else {}
