"""Verbs import only the modules that they need."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process import Aimage, run

HEAVY = {
    *("mlx", "numpy", "PIL", "jinja2", "tokenizers", "torch", "safetensors"),
    *("requests", "urllib3", "oras", "tenacity", "jsonschema"),
    *("aiohttp", "asyncio", "pydantic", "structlog", "prometheus_client"),
}


def imported(*arguments: str) -> set[str]:
    """Return the modules that a command line imports."""
    return imported_by("-m", "clowder_aimage.cli", *arguments)


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a Python process imports, as reported by Python."""
    done = run([sys.executable, "-X", "importtime", *arguments], text=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("pull", "--help"), ("run", "--help")],
    ids=" ".join,
)
def test_help_imports_no_heavy_modules(arguments: tuple[str, ...]) -> None:
    modules = imported(*arguments)
    assert "click" in modules  # the list is not empty
    assert not {m for m in modules if m.partition(".")[0] in HEAVY}


def test_version_imports_fewer_modules_than_help() -> None:
    modules = imported("--version")
    assert "click" in modules
    assert "clowder_aimage.oci" not in modules


def test_version_imports_little_more_than_click() -> None:
    """The goal is at most 1.2 times the time of importing click (benchmarks/startup.py)."""
    more = imported("--version") - imported_by("-c", "import click, runpy")
    ours = {name for name in more if name.startswith("clowder_aimage")}
    assert ours == {
        *("clowder_aimage", "clowder_aimage.errors", "clowder_aimage.cli"),
        *("clowder_aimage.cli.main", "clowder_aimage.cli.console"),
        *("clowder_aimage.cli.console.example", "clowder_aimage.cli.console.interruption"),
        *("clowder_aimage.cli.console.option", "clowder_aimage.cli.console.output"),
    }
    assert not more & {"dataclasses", "difflib", "json", "logging", "pathlib", "urllib.parse"}


def test_completing_a_verb_imports_no_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_AIMAGE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "aimage pu")
    monkeypatch.setenv("COMP_CWORD", "1")
    code = "import sys; from clowder_aimage.cli.main import main; sys.argv = ['aimage']; main()"
    modules = imported_by("-c", code)
    assert "click.shell_completion" in modules
    assert not {name for name in modules if name.startswith("clowder_aimage.cli.verbs")}


def test_a_pull_imports_no_modules_for_tokens_certificates_and_retries() -> None:
    """They take as long as the transfer of some hundred small blobs."""
    modules = imported("pull", "127.0.0.1:1/x:v1")
    assert "urllib3" in modules
    assert not {m.partition(".")[0] for m in modules} & {"requests", "oras", "tenacity", "certifi"}


def test_store_verbs_import_no_heavy_modules(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    store = str(here.store)
    for arguments in (("ls",), ("tag", "x", "y")):
        modules = imported("--store", store, *arguments)
        assert "clowder_aimage.layout.layout" in modules
        assert not {m for m in modules if m.partition(".")[0] in HEAVY}


def test_a_listing_imports_no_module_that_it_has_no_use_for(
    stocked: Callable[[], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stocked()
    for name in [name for name in os.environ if name.startswith("AIMAGE_")]:
        monkeypatch.delenv(name)  # those of these tests are looked up in the schema
    here("ls")  # it stores what it shows of each model
    modules = imported("--store", str(here.store), "ls")
    unused = {
        *("concurrent.futures", "ctypes", "decimal", "difflib", "http.client", "logging"),
        *("secrets", "shutil", "socket", "subprocess", "tempfile"),
        *("clowder_aimage.dialect", "clowder_aimage.registry", "clowder_aimage.document.schema"),
    }
    assert modules & unused == set()


@pytest.mark.integration
def test_the_base_install_can_create_push_and_pull(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    """No extra is imported."""
    here = aimage()
    extras = {"mlx", "numpy", "PIL", "jinja2", "tokenizers", "aiohttp"}
    for arguments in (
        ("create", "split", str(tiny)),
        ("create", repository, str(tiny), "--whole-files"),
        ("push", repository),
        ("pull", repository),
    ):
        modules = imported("--store", str(here.store), *arguments)
        assert not {m for m in modules if m.partition(".")[0] in extras}
