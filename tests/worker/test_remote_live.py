"""The command line against a running worker."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY
from tests.process import Aimage
from tests.proxy import Passed, Proxy, Reply
from tests.real_registry import RealRegistry
from tests.store import copy_store
from tests.wait import until
from tests.worker.conftest import LocalWorker, Worker, begin

ADMIN, INFER = "a" * 32, "i" * 32


@pytest.fixture
def here(worker: LocalWorker, aimage: Callable[[], Aimage]) -> Aimage:
    """Return a command line with an empty store that uses the worker."""
    found = aimage()
    found.environment["AIMAGE_HOST"] = worker.url
    return found


@pytest.fixture
def local(worker: LocalWorker, here: Aimage) -> Aimage:
    """Return a command line that uses the worker's store directly."""
    return Aimage(here.home, worker.store)


def metric(worker: LocalWorker, name: str) -> float:
    text = worker.service.metrics.format_text().decode()
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_remote_run_makes_the_same_picture_as_local_run(here: Aimage, local: Aimage) -> None:
    wishes = ("--seed", 7, "--steps", 3, "--width", 48, "--height", 64)
    more = ("--guidance", 2.5, "--negative", "grey", "-n", 2, "--json")
    there = here("run", "tiny", "a red fox", *wishes, *more, "-o", "there.png")
    mine = local.process("run", "tiny", "a red fox", *wishes, *more, "-o", "mine.png").value
    for index in (1, 2):
        own, other = (pixels(here.home / f"{name}-{index}.png") for name in ("mine", "there"))
        assert own.shape == (64, 48, 3)
        assert np.array_equal(own, other)
    same = mine.keys() - {"pictures", "reference"}
    assert {key: there.value[key] for key in same} == {key: mine[key] for key in same}
    assert [each["seed"] for each in there.value["pictures"]] == [7, 8]
    events = [json.loads(text) for text in there.err.splitlines()]
    assert {"event": "plan", "level": "info", "task": "rendering", "steps": 6} in events
    assert not here.store.exists()


def test_a_picture_of_a_worker_can_be_replayed(here: Aimage, local: Aimage) -> None:
    path = here.home / here("run", "tiny", "a red fox", "--steps", 2).line
    assert local.process("replay", path).line == "equal"


def test_ps_lists_a_model_until_it_is_stopped(here: Aimage) -> None:
    here("run", "tiny", "a red fox", "--steps", 1)
    (row,) = here("ps", "--json").value
    assert row["reference"] == "tiny:latest"
    assert row["digest"] == here("ls", "--remote", "--json").value[0]["digest"]
    assert row["device"].startswith(("cpu", "gpu", "metal"))
    assert row["size"] > 1_000_000
    assert here("sleep", "tiny").line == "tiny:latest"
    assert here("ps", "--json").value == []
    assert here("wake", "tiny").line == "tiny:latest"
    assert len(here("ps", "--json").value) == 1
    assert here("stop", "tiny").line == "tiny:latest"
    assert here("ps", "--json").value == []
    assert here("stop", "tiny").line == "tiny:latest"  # stopping again succeeds
    here("stop", "nothing-there", code=3)


@pytest.mark.integration
def test_an_interrupt_cancels_generation_in_the_worker(here: Aimage, worker: LocalWorker) -> None:
    here("run", "tiny", "a red fox", "--steps", 1, "-o", "warm.png")
    before = metric(worker, "aimage_generation_step_seconds_count")
    cancelled = metric(worker, "aimage_generation_cancelled_total")
    process = here.start("run", "tiny", "a", "--steps", 1000, "--width", 256, "--height", 256)
    while metric(worker, "aimage_generation_step_seconds_count") == before:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    here("run", "tiny", "a red fox", "--steps", 1, "-o", "next.png")  # it is not blocked
    assert metric(worker, "aimage_generation_cancelled_total") == cancelled + 1
    assert metric(worker, "aimage_generation_step_seconds_count") < before + 900
    assert not list(here.home.glob("tiny-*"))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "nothing-there", "a fox"), 3),
        (("run", "tiny", "a fox", "--width", 100, "--height", 64), 2),
        (("run", "tiny", "a fox", "--steps", 0), 2),
        (("rm", "--remote", "nothing-there"), 3),
        (("pull", "--remote", "tiny"), 2),
        (("pull", "--remote", "127.0.0.1:1/x"), 1),
    ],
)
def test_refusals_of_a_worker_map_to_exit_codes(
    here: Aimage, arguments: tuple[str | int, ...], code: int
) -> None:
    said = here(*arguments, code=code)
    assert "aimage: " in said.err
    assert said.out == ""


def test_models_are_pulled_listed_and_removed_remotely(
    here: Aimage, local: Aimage, repository: str
) -> None:
    digest = local("create", "-q", repository, TINY, "--whole-files").line
    assert local("push", repository).line == digest
    assert here("rm", "--remote", repository).line.startswith(repository)
    assert repository not in here("ls", "--remote").out
    assert here("pull", "--remote", repository).line == digest
    assert repository in here("ls", "--remote").out
    here("rm", "--remote", repository)
    assert here("pull", "--remote", f"{repository}@{digest}", "--json").value["digest"] == digest
    assert here("pull", "--remote", f"{repository}-not", code=3).out == ""


@contextmanager
def running(worker: LocalWorker | Worker) -> Iterator[None]:
    try:
        yield
    finally:
        worker.end()


def spoiled_blobs(passed: Passed, reply: Reply) -> None:
    if passed.is_blob and reply.body:
        reply.put(bytes(len(reply.body)))


def full_of_errors(passed: Passed, reply: Reply) -> None:
    reply.status = 405


@pytest.mark.parametrize(("change", "code"), [(spoiled_blobs, 5), (full_of_errors, 1)])
def test_a_failed_remote_pull_has_the_exit_code_of_a_local_one(
    here: Aimage,
    local: Aimage,
    registry: RealRegistry,
    repository: str,
    change: Callable[[Passed, Reply], None],
    code: int,
) -> None:
    local("create", repository, TINY, "--whole-files")
    local("push", repository)
    local("rm", repository)
    mine, its = (Aimage(here.home, here.home / name) for name in ("mine", "its"))
    there = LocalWorker(its)  # its store lacks the blobs
    here.environment["AIMAGE_HOST"] = there.url
    with Proxy(registry.host, change=change).running() as proxy, running(there):
        name = repository.replace(registry.host, proxy.host)
        assert mine("pull", name, code=code).out == ""
        said = here("pull", "--remote", name, code=code)
    assert (said.out, said.err[:8]) == ("", "aimage: ")
    assert its("ls", "--json").value == []


def test_a_remote_pull_without_credentials_has_exit_code_4(
    here: Aimage, private_registry: RealRegistry
) -> None:
    name = f"{private_registry.host}/tests/private:v1"
    elsewhere = Aimage(here.home, here.home / "another")
    assert elsewhere("pull", name, code=4).out == ""
    said = here("pull", "--remote", name, code=4)
    assert private_registry.host in said.err
    assert "aimage login" in said.err  # the hint also applies to the worker's user
    assert here("run", name, "a fox", code=4).out == ""


def test_remote_run_pulls_a_missing_model(here: Aimage, local: Aimage, repository: str) -> None:
    local("tag", "tiny", repository)
    local("push", repository)
    here("rm", "--remote", repository)
    done = here("run", repository, "a red fox", "--seed", 3, "--steps", 1, "--json")
    tasks = [json.loads(text).get("task") for text in done.err.splitlines()]
    assert "rendering" in tasks
    assert repository in here("ls", "--remote").out
    here("rm", "--remote", repository)


def test_remote_run_does_not_fall_back_to_the_default_model(
    here: Aimage, worker: LocalWorker
) -> None:
    other = worker.start("--default-model", "tiny")
    here.environment["AIMAGE_HOST"] = other.url
    said = here("run", "nothing-there", "a fox", "--steps", 1, code=3)
    assert "tiny" in said.err
    assert not list(here.home.glob("*.png"))


def test_remote_run_accepts_a_digest(here: Aimage) -> None:
    listed = here("ls", "--remote", "--json").value
    digest = next(each["digest"] for each in listed if each["reference"] == "tiny:latest")
    done = here("run", f"tiny@{digest}", "a fox", "--steps", 1, "--seed", 1, "--json")
    assert done.value["digest"] == digest


def test_remote_verbs_work_over_a_unix_socket(here: Aimage, worker: LocalWorker) -> None:
    other = worker.start("--socket", here.home / "run" / "w.sock")
    assert other.url.startswith("unix:///")
    here.environment["AIMAGE_HOST"] = other.url
    assert here("run", "tiny", "a fox", "--steps", 1, "--seed", 1).line == "a-fox-1.png"
    assert "tiny:latest" in here("ps").out


@pytest.mark.integration
def test_a_worker_without_mlx_lists_models_and_refuses_generation(
    here: Aimage, stocked: Path
) -> None:
    """Simulate an installation with the extra [worker] but neither [mlx] nor [torch]."""
    blocked = ("mlx", "torch", "numpy", "PIL", "tokenizers", "jinja2")
    text = f"import sys; sys.modules.update(dict.fromkeys({blocked}))"
    (here.home / "sitecustomize.py").write_text(text)
    copy_store(stocked, here.home / "its")
    its = Aimage(here.home, here.home / "its")
    there = begin(its, PYTHONPATH=f"{here.home}{os.pathsep}{here.env()['PYTHONPATH']}")
    here.environment["AIMAGE_HOST"] = there.url
    with running(there):
        assert here("ls", "--remote", "--json").value[0]["reference"] == "tiny:latest"
        said = here("run", "tiny", "a fox", code=1)
        assert here("ps", "--json").value == []
    assert "needs the extra [mlx]" in said.err
    assert "Traceback" not in "".join(there.lines)


def test_remote_verbs_need_a_token_of_their_scope(here: Aimage, worker: LocalWorker) -> None:
    tokens = here.home / "tokens"
    tokens.write_text(f"admin {ADMIN}\ninfer {INFER}\n")
    other = worker.start("--token-file", tokens)
    here.environment["AIMAGE_HOST"] = other.url
    assert "AIMAGE_TOKEN" in here("ps", code=4).err
    here.environment["AIMAGE_TOKEN"] = "x" * 32
    assert here("run", "tiny", "a fox", code=4).out == ""
    here.environment["AIMAGE_TOKEN"] = INFER
    here("run", "tiny", "a fox", "--steps", 1)
    here("ls", "--remote")
    here("rm", "--remote", "tiny", code=4)
    here("pull", "--remote", "127.0.0.1:1/x", code=4)
    here.environment["AIMAGE_TOKEN"] = ADMIN
    here("pull", "--remote", "127.0.0.1:1/x", code=1)


@pytest.mark.integration
def test_stop_ends_a_running_generation(worker: LocalWorker, here: Aimage) -> None:
    drawing = here.start("run", "tiny", "a fox", "--steps", 1000, "--width", 256, "--height", 256)
    until(lambda: worker.get("/api/ps")["models"])
    steps = metric(worker, "aimage_generation_step_seconds_count")
    until(lambda: metric(worker, "aimage_generation_step_seconds_count") != steps)
    assert here("stop", "tiny").line == "tiny:latest"
    _, errors = drawing.communicate(timeout=30)
    assert drawing.returncode == 1
    assert "was stopped" in errors
    assert worker.get("/api/ps")["models"] == []
    here("stop", "absent", code=3)
