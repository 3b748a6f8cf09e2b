"""Verbs import only the modules that they need."""

from __future__ import annotations

import sys

import pytest

from tests.process import run

HEAVY = {
    *("mlx", "numpy", "PIL", "jinja2", "tokenizers", "torch", "safetensors"),
    *("requests", "urllib3", "oras", "tenacity", "jsonschema"),
    *("aiohttp", "asyncio", "pydantic", "structlog", "prometheus_client"),
}


def imported(*arguments: str) -> set[str]:
    """Return the modules that a command line imports, as reported by Python."""
    done = run(
        [sys.executable, "-X", "importtime", "-m", "clowder_aimage.cli", *arguments],
        text=True,
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("pull", "--help"), ("run", "--help")],
    ids=" ".join,
)
def test_help_imports_no_heavy_modules(arguments):
    modules = imported(*arguments)
    assert "click" in modules  # the list is not empty
    assert not {m for m in modules if m.partition(".")[0] in HEAVY}


def test_version_imports_fewer_modules_than_help():
    modules = imported("--version")
    assert "click" in modules
    assert "clowder_aimage.oci" not in modules


def test_store_verbs_import_no_heavy_modules(stocked):
    here = stocked()
    store = str(here.store)
    for arguments in (("ls",), ("tag", "x", "y")):
        modules = imported("--store", store, *arguments)
        assert "clowder_aimage.layout.layout" in modules
        assert not {m for m in modules if m.partition(".")[0] in HEAVY}


@pytest.mark.integration
def test_the_base_install_can_create_push_and_pull(aimage, tiny, repository):
    """No extra is imported."""
    here = aimage()
    extras = {"mlx", "numpy", "PIL", "jinja2", "tokenizers", "aiohttp"}
    for arguments in (
        ("create", repository, str(tiny)),
        ("push", repository),
        ("pull", repository),
    ):
        modules = imported("--store", str(here.store), *arguments)
        assert not {m for m in modules if m.partition(".")[0] in extras}
