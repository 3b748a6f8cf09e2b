"""Names without a host in the default registry of the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.host_settings import read_settings
from tests.process import Aimage


@pytest.mark.parametrize(
    ("default", "text", "expected"),
    [
        ("r.example.com", "a:1", "r.example.com/a:1"),
        ("r.example.com:5001/models/us", "team/a", "r.example.com:5001/models/us/team/a:latest"),
        ("r.example.com", "localhost:5001/a:1", "localhost:5001/a:1"),
        ("", "a:1", "a:1"),
    ],
)
def test_names_without_a_host_are_expanded(default: str, text: str, expected: str) -> None:
    options = ClientOptions(default_registry=default)
    assert str(options.expand(Reference.parse(text))) == expected


@pytest.mark.parametrize("default", ["models", "UPPER/Case", "https://r.example.com", 1, ""])
def test_a_default_that_is_no_registry_is_refused(tmp_path: Path, default: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"registries": {"default": default}}))
    with pytest.raises(UsageError, match="cannot use the configuration"):
        read_settings(path)


def test_short_names_are_pushed_pulled_and_listed(
    aimage: Callable[..., Aimage], tiny: Path, repository: str
) -> None:
    here, there = aimage(), aimage("there")
    here("create", "-q", "x", tiny, "--whole-files")
    config = here.home / "short.json"
    host, _, team = repository.partition("/")
    config.write_text(json.dumps({"registries": {"default": repository, host: {"jobs": 2}}}))
    here.environment["AIMAGE_CONFIG"] = there.environment["AIMAGE_CONFIG"] = str(config)
    digest = here("push", "x", "-q").line
    assert here("resolve", f"{repository}/x:latest").line == digest
    assert here("tags", "x").line == "latest"
    assert there("pull", "x", "-q").line == digest
    assert there("show", "x", "--json").value["reference"] == "x:latest"
    assert here("copy", "x", "x:v2", "-q").line == digest
    assert here("tag", "--remote", "x", "v3").line == f"{host}/{team}/x:v3 {digest}"
    assert here("tags", "x").out.split() == ["latest", "v2", "v3"]
    assert "not found at" in there("pull", "absent", code=3).err
    shown = here("config", "show").out
    assert "registries.default" in shown and repository in shown


def test_without_a_default_a_registry_host_is_required(aimage: Callable[[], Aimage]) -> None:
    assert "has no registry host" in aimage()("pull", "x", code=2).err
