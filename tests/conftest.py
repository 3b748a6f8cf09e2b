"""Shared fixtures: a real registry, the embedded model, the command line."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import resource
import secrets
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.tensor import blas
from tests import program
from tests.process import Aimage, reaped, restore_signals
from tests.program import find_program
from tests.quarantine import QUARANTINE
from tests.real_registry import RealRegistry, find_registry

# Before numpy or MLX is imported, also by another conftest: each worker computes with one thread,
# because several spinning thread pools take three times as long
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

ROOT = Path(__file__).parent.parent
TINY = ROOT / "examples" / "tiny"
# These have tests of many seconds: if one began last, the other cores would wait for it
_LONG = (
    *("tests/docs/test_docs_commands", "tests/shapes/test_shapes_model"),
    *("tests/cli/test_run_torch", "tests/worker/test_openapi", "tests/e2e/test_main_job"),
    "tests/test_picture_memory",
)
# Fixtures that start another program: their tests are run by make test-all
PROGRAMS = {"registry", "private_registry", "skopeo", "launch"}
# What measure_slowness computes, on a machine that is not busy
LOOP_SECONDS = 0.002
# Of glibc
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_resident = 0  # bytes in memory after the last call of it
_INTEGRATION = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(integration|slow)\b", re.M)


class _Sys:
    """``sys`` as threading uses it; ``settrace`` is retried while another thread is inside it.

    CPython 3.11 raises RuntimeError then, so a thread started under coverage ends at once, and
    threads that wait for it block forever.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    @staticmethod
    def settrace(function: Any) -> None:
        while True:
            try:
                return sys.settrace(function)
            except RuntimeError:
                time.sleep(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of runs in which other tests are repeated in other surroundings."""
    parser.addoption("--gateway", action="store_true", help="put a gateway before workers")
    parser.addoption("--hostile", action="store_true", help="let a hostile worker attack fleets")


def pytest_configure() -> None:
    """Prepare the process before a test module imports MLX.

    BLAS is loaded as the program loads it: pictures of this process equal those of others. The
    dimensions of the parity models are drawn once per run, for all workers.
    """
    restore_signals()
    if sys.version_info < (3, 12):
        threading._sys = _Sys()  # type: ignore[attr-defined]
    blas.preload()
    for name in ("fsync", "fdatasync"):  # no power failure is tested in this process
        if hasattr(os, name):
            setattr(os, name, os.fstat)  # which fails too if the descriptor is closed
    os.environ.setdefault("AIMAGE_PARITY_SEED", str(secrets.randbits(24)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what a gateway does otherwise than a worker, with the reason."""
    is_marked = any(map(item.get_closest_marker, ("integration", "slow")))
    # With a gateway each test needs NATS
    program.is_fast = not (is_marked or item.config.getoption("--gateway"))
    marked = item.get_closest_marker("worker_only")
    if marked is not None and item.config.getoption("--gateway"):
        pytest.skip(f"at a gateway: {marked.args[0]}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules whose tests are all deselected: importing torch takes ten seconds."""
    if collection_path.suffix != ".py":
        return None
    if "not integration" not in config.option.markexpr:
        return None
    return True if _INTEGRATION.search(collection_path.read_text("utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep Python's collector of garbage away from the collected tests.

    They are a million objects, which live until the end: each full collection would take a second.
    """
    gc.disable()
    _rotate(session.config)
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _rotate(config: pytest.Config) -> None:
    """Begin a whole collection with another directory in each worker.

    The first import of a test module compiles it: workers in step would all compile all modules.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    entries = [
        path
        for path in sorted((ROOT / "tests").iterdir())
        if path.name.startswith("test_") or (path.is_dir() and path.name[0] not in "._")
    ]
    begin = int(worker["workerid"].removeprefix("gw")) * len(entries) // worker["workercount"]
    config.args = [str(path) for path in (*entries[begin:], *entries[:begin])]


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of other programs and quarantined tests, and begin with long ones."""
    for item in items:
        if PROGRAMS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
        if reason := QUARANTINE.get(item.nodeid.partition("[")[0]):
            item.add_marker(pytest.mark.quarantine(reason))
    # Workers collect in different orders, and must agree on one.
    items.sort(key=lambda item: (not item.nodeid.startswith(_LONG), item.path))


def pytest_report_header() -> str:
    """Report the seed, so that the run can be repeated."""
    return f"AIMAGE_PARITY_SEED={os.environ['AIMAGE_PARITY_SEED']}"


@pytest.fixture(scope="module", autouse=True)
def trimmed() -> Iterator[None]:
    """Return the memory that modules no longer use to the system, after each 64 MiB.

    Each thread has an arena, and threads that wait keep what they freed: without this, a worker
    has several hundred megabytes more.
    """
    global _resident
    yield
    if _trim is not None and _read_resident() > _resident + (64 << 20):
        _trim(0)
        _resident = _read_resident()


def _read_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(autouse=True)
def children() -> Iterator[None]:
    """Kill the children of a test when it ends. Wider fixtures kill their own."""
    with reaped():
        yield


def measure_slowness() -> float:
    """Return how many times longer than on the machine of the limits a computation takes now."""
    spans = list[float]()
    for _ in range(3):
        began = time.thread_time()
        for _ in range(100_000):
            pass
        spans.append(time.thread_time() - began)
    return max(1.0, min(spans) / LOOP_SECONDS)


class _Blocks(logging.Handler):
    """Records the steps that blocked an event loop.

    The time of Python's garbage collection is left out: a test run has many objects. The limits
    are those of a machine on which a loop takes LOOP_SECONDS.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._here = threading.local()

    def collected(self, phase: str, _: object) -> None:
        """Record the time of a collection in this thread."""
        now = time.thread_time()
        if phase == "start":
            self._here.began = now
        elif (began := getattr(self._here, "began", None)) is not None:  # after the start
            self._here.all = [*getattr(self._here, "all", [])[-100:], (began, now)]

    def emit(self, record: logging.LogRecord) -> None:
        work, seconds = record.__dict__["work"], record.__dict__["seconds"]
        begun = time.thread_time() - seconds - 0.001  # it is rounded
        spans = getattr(self._here, "all", [])
        seconds -= sum(end - start for start, end in spans if start >= begun)
        coverage = sys.modules.get("coverage")
        is_traced = coverage is not None and coverage.Coverage.current() is not None
        # Twice: two steps of 0.10 and 0.14 s were seen on a machine with four times its load.
        limit = record.__dict__["limit"] * (5 if is_traced else 2)
        if seconds > limit and seconds > limit * measure_slowness():
            self.found.append(f"{work}: {seconds:.3f} s")


@pytest.fixture(autouse=True)
def loop_blocks() -> Iterator[list[str]]:
    """Fail a test in which a server's event loop was blocked; return the steps that did."""
    blocks, log = _Blocks(), logging.getLogger("aimage.loop")
    log.addHandler(blocks)
    gc.callbacks.append(blocks.collected)
    yield blocks.found
    gc.callbacks.remove(blocks.collected)
    log.removeHandler(blocks)
    assert not blocks.found


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """Return a registry without credentials that accepts all distribution requests."""
    with find_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture(scope="session")
def private_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """Return a registry that requires the user ``operator`` and the password ``open sesame``."""
    with find_registry(tmp_path_factory.mktemp("private"), private=True) as found:
        yield found


@pytest.fixture
def repository(registry: RealRegistry, request: pytest.FixtureRequest) -> str:
    """Return a repository name, with host, that no other test uses."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower()).strip("-")
    return f"{registry.host}/tests/{'-'.join(filter(None, name.split('-')))}"


@pytest.fixture
def store(tmp_path: Path) -> ImageLayout:
    """Return an empty store."""
    return ImageLayout(tmp_path / "store")


@pytest.fixture
def aimage(tmp_path: Path) -> Callable[..., Aimage]:
    """Return ``aimage(store)``: the command line on the store of that name, in its own home."""

    def make(store: str = "store") -> Aimage:
        return Aimage(tmp_path, tmp_path / store)

    return make


@pytest.fixture(scope="session")
def flux2_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a small FLUX.2 as ``flux``. Copy it before writing."""
    from tests.model.random_flux2 import write_flux2  # imports MLX

    home = tmp_path_factory.mktemp("flux2")
    write_flux2(home / "model")
    Aimage(home, home / "store")("create", "flux", home / "model", "-q")
    return home / "store"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Return the embedded model's directory: a small Z-Image with random weights."""
    return TINY


@pytest.fixture(scope="session")
def skopeo() -> str:
    """Return the path of skopeo, an independent OCI tool."""
    return find_program("skopeo")
