"""The pipelines of docs/platform.md match their schemas, and their commands work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.abridged import abridge
from tests.docs.document import ROOT, Document
from tests.process import PROGRAM, Aimage, run
from tests.program import find_program
from tests.real_registry import PASSWORD, USER, RealRegistry

PAGE = Document(ROOT / "docs" / "platform.md")
GITHUB, GITLAB = [block.text for block in PAGE.blocks if block.language == "yaml"]
FUNCTION = f'aimage() {{ {shlex.join(PROGRAM)} "$@"; }}\n'


@pytest.mark.parametrize(
    ("text", "schema"),
    [(GITHUB, "vendor.github-workflows"), (GITLAB, "vendor.gitlab-ci")],
    ids=["github", "gitlab"],
)
def test_a_pipeline_matches_its_schema(text: str, schema: str, tmp_path: Path) -> None:
    program = find_program("check-jsonschema")
    file = tmp_path / "pipeline.yml"
    file.write_text(text)
    done = run([program, "--builtin-schema", schema, file], text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def commands(text: str) -> list[str]:
    """Return the commands of a pipeline after the installation."""
    pipeline: dict[str, Any] = yaml.safe_load(text)
    job = pipeline.get("jobs", pipeline)["model"]
    steps: list[str] = job.get("script") or [one["run"] for one in job["steps"] if "run" in one]
    assert re.match(r"pipx? install 'clowder-aimage @ git\+https://", steps[0])
    return steps[1:]


@pytest.mark.integration
@pytest.mark.parametrize("forge", ["github", "gitlab"])
def test_the_commands_of_a_pipeline_push_the_model(
    forge: str, aimage: Callable[..., Aimage], private_registry: RealRegistry, tiny: Path
) -> None:
    here, host, commit = aimage(), private_registry.host, "12" * 20
    abridge(tiny, here.home / "model")
    here.environment |= {"GITHUB_ACTOR": USER, "GITHUB_REPOSITORY": "github/team"}
    here.environment |= {"CI_REGISTRY": host, "CI_REGISTRY_IMAGE": f"{host}/gitlab/team"}
    here.environment |= {"CI_REGISTRY_USER": USER, "CI_REGISTRY_PASSWORD": PASSWORD}
    here.environment |= {"GITHUB_SHA": commit, "CI_COMMIT_SHA": commit, "TOKEN": PASSWORD}
    script = "\n".join(commands(GITHUB if forge == "github" else GITLAB)).replace("ghcr.io", host)
    done = run(["bash", "-ec", FUNCTION + script], env=here.env(), cwd=here.home, text=True)
    assert done.returncode == 0, done.stderr
    name = f"{host}/{forge}/team/model:{commit}"
    assert here("resolve", name).line == done.stdout.splitlines()[-1]
