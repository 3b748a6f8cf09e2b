"""Nodes in separate processes, one of which is killed during a pull."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.oci import Reference
from tests.node.nodes import MIB, noise, push_model
from tests.process import spawn
from tests.proxy import Proxy
from tests.real_registry import RealRegistry

pytestmark = pytest.mark.integration

PROGRAM = """
import json, sys
from pathlib import Path
from clowder_aimage.oci import Reference
from tests.node.nodes import Node
node = Node(Path(sys.argv[1])).start()
print(json.dumps(node.address), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, list):
        node.addresses[:] = asked
        node.knows(*(each for each in asked if each != node.address))
        said = sorted(asked)
    else:
        root, came = node.pull(Reference.parse(asked))
        said = {"root": str(root.digest), **came}
    print(json.dumps(said), flush=True)
node.stop()
"""


class Child:
    """A node in a child process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = spawn(
            [sys.executable, "-c", PROGRAM, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )
        self.address = self.heard()

    def say(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the node has ended"
        return json.loads(line)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(60)
        with contextlib.suppress(OSError):
            self.process.communicate()

    def check(self) -> None:
        """Check that all blobs are intact and no ingests are left."""
        for path in self.root.glob("blobs/sha256/*"):
            with path.open("rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == path.name
        assert not list(self.root.glob(".aimage/ingest/*"))


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    found = [Child(tmp_path / f"node-{number}") for number in range(3)]
    yield found
    for child in found:
        child.end()


def acquaint(children: list[Child]) -> None:
    for child in children:
        child.say([each.address for each in children])
    for child in children:
        child.heard()


def test_a_node_killed_during_a_pull_does_not_affect_the_result(
    tmp_path: Path, registry: RealRegistry, repository: str, children: list[Child]
) -> None:
    pushed = push_model(tmp_path, repository, noise(50 * MIB), noise(20 * MIB, "b"))
    with Proxy(registry.host, hold=20 * MIB).running() as proxy:
        reference = Reference(proxy.host, pushed.repository, pushed.tag)
        acquaint(children)
        for child in children:
            child.say(str(reference))
        proxy.wait_until(lambda: proxy.held > 0)
        victim = children.pop()
        victim.end(signal.SIGKILL)
        proxy.release()
        roots = {child.heard()["root"] for child in children}
        assert len(roots) == 1
        children.append(Child(victim.root))
        acquaint(children)
        before = proxy.sent()
        children[-1].say(str(reference))
        assert {children[-1].heard()["root"]} == roots
        assert proxy.sent() - before < 1 * MIB, "its neighbours have it all"
    for child in children:
        child.check()
        assert not list(child.root.glob(".aimage/range/*"))
