"""adapters: those of a model in the store and in its registry, and where they must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.find_adapters import MAX_REPOSITORIES
from tests.importer.test_other_files import LORA, PLAIN
from tests.process import Aimage
from tests.real_registry import RealRegistry
from tests.scripted import Answer, ScriptedRegistry


@pytest.fixture
def here(aimage: Callable[[], Aimage]) -> Aimage:
    """Return a command line with the model ``base``, and files of two adapters."""
    here = aimage()
    (here.home / "base.safetensors").write_bytes(PLAIN)
    (here.home / "ink.safetensors").write_bytes(LORA)
    here("create", "-q", "base", "base.safetensors", "--whole-files")
    return here


def create(here: Aimage, name: str, base: str = "base") -> str:
    return here("create", name, "ink.safetensors", "--base", base).err


def test_adapters_of_a_model_in_the_store_are_listed(here: Aimage) -> None:
    assert "base:latest has no adapters" in here("adapters", "base").err
    assert here("adapters", "base", "--json").value == []
    create(here, "ink")
    here("create", "-q", "other", "ink.safetensors")
    (row,) = here("adapters", "base", "--json").value
    assert (row["reference"], row["type"], row["places"]) == ("ink:latest", "lora", ["store"])
    assert [line.split()[0] for line in here("adapters", "base").out.splitlines()] == [
        *("NAME", "ink:latest")
    ]
    here("adapters", "missing", code=3)


def test_create_and_push_say_where_an_adapter_is_listed_with_its_base(here: Aimage) -> None:
    assert "push it to the repository of its base" in create(here, "ink")
    here("tag", "base", "localhost:1/team/base:v1")
    advice = "to be listed with its base, push it to localhost:1/team/base"
    assert advice in create(here, "ink")
    assert advice in create(here, "localhost:1/team/ink:v1")
    assert "to be listed" not in create(here, "localhost:1/team/base:ink")
    assert "to be listed" not in here("create", "ink", "ink.safetensors").err


def test_a_registry_without_a_catalog_shows_its_repository(here: Aimage) -> None:
    def answer(seen: object) -> Answer:
        return Answer(404, {}, b"{}")

    with ScriptedRegistry(answer).running() as registry:
        name = f"{registry.host}/team/base:v1"
        here("tag", "base", name)
        create(here, f"{registry.host}/team/base:ink", name)
        done = here("adapters", name, "--json")
    assert [row["places"] for row in done.value] == [["store"]]
    assert "is not in its registry" in done.err
    assert "only the repository" in done.err


@pytest.mark.integration
def test_adapters_in_all_repositories_of_a_registry_are_listed(
    here: Aimage, registry: RealRegistry, tmp_path: Path
) -> None:
    assert MAX_REPOSITORIES > 2
    base, beside, apart = (
        f"{registry.host}/adapters/{name}" for name in ("base:v1", "base:ink", "ink:v2")
    )
    here("tag", "base", base)
    create(here, beside, base)
    (here.home / "ink.json").write_text('{"sd version": "x", "activation text": "inked"}')
    create(here, apart, base)
    assert "to be listed" not in here("push", base, beside).err
    assert f"push it to {registry.host}/adapters/base" in here("push", apart).err
    here("rm", apart)
    rows = {row["reference"]: row for row in here("adapters", base, "--json").value}
    assert {name: row["places"] for name, row in rows.items()} == {
        beside: ["store", "registry"],
        apart: ["registry"],
    }
    assert rows[apart]["triggerWords"] == ["inked"]
    # a store without the model asks the registry alone
    here("rm", base, beside)
    listed = here("adapters", base, "--json").value
    assert [row["places"] for row in listed] == [["registry"], ["registry"]]
