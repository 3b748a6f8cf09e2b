"""A store for crash tests, and the commands that are interrupted on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.scene import (
    BIG,
    SMALL,
    Job,
    Machines,
    Places,
    fill,
    measured,
    put_in,
)
from tests.importer.conftest import Model
from tests.real_registry import RealRegistry

VERBS = "tag retag rm pin gc forget pull create".split()  # in a store of ours
NEW = "pull-new create-new".split()  # ... without a store
FOREIGN = "tag-foreign pin-foreign".split()  # ... in a store of another tool


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines"))
    yield made
    made.close()


@pytest.fixture
def places(tmp_path: Path, machines: Machines) -> Places:
    return Places(tmp_path, machines)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store to copy."""
    store = tmp_path_factory.mktemp("template") / "store"
    fill(store)
    return store


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return Model(directory / "model", directory).fill().directory


@pytest.fixture(scope="session")
def remote(registry: RealRegistry, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of an artifact in a registry: a large blob and small ones."""
    docker = tmp_path_factory.mktemp("docker")
    return put_in(registry.host, "crash/remote:v1", docker, BIG, *SMALL)


@pytest.fixture(scope="session")
def make_job(
    request: pytest.FixtureRequest,
    template: Path,
    machines: Machines,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Job]:
    """Return ``make_job(verb)``: a command with a record of its undisturbed run."""
    made: dict[str, Job] = {}
    places = Places(tmp_path_factory.mktemp("measured"), machines)
    foreign = places.new(template).store
    shutil.rmtree(foreign / ".aimage")

    def plan(verb: str) -> Job:
        if verb.startswith("pull"):
            argv = ["-q", "pull", request.getfixturevalue("remote"), "--jobs", "3"]
        elif verb.startswith("create"):
            argv = ["-q", "create", "made:v1", str(request.getfixturevalue("model_directory"))]
        else:
            argv = {
                "tag": ["tag", "keep:v1", "new:v1"],
                "retag": ["tag", "keep:v1", "old:v1"],
                "rm": ["rm", "old:v1"],
                "pin": ["pin", "keep:v1"],
                "gc": ["gc", "--grace", "0"],
                "forget": ["gc", "--grace", "0", "--max-size", "1", "--keep", "keep:*"],
            }[verb.removesuffix("-foreign")]
        base = {"new": None, "foreign": foreign}.get(verb.partition("-")[2], template)
        return Job(verb, tuple(argv), base)

    def make(verb: str) -> Job:
        if verb not in made:
            made[verb], place = measured(plan(verb), places)
            places.drop(place)
        return made[verb]

    return make


def sampled(verbs: list[str], *sample: str) -> list[Any]:
    """Return the verbs as parameters; those outside the sample are left to ``make test-all``."""
    rest = [verb for verb in verbs if verb not in sample]
    return [*sample, *(pytest.param(verb, marks=pytest.mark.integration) for verb in rest)]


@pytest.fixture(params=sampled([*VERBS, *NEW, *FOREIGN], "create"))
def job(request: pytest.FixtureRequest, make_job: Callable[[str], Job]) -> Job:
    """Return each of the commands."""
    return make_job(request.param)
