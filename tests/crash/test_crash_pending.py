"""SIGKILL between the record of a name, the list of changes and a large index; other writers."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.verify import verify
from tests.crash.scene import KILLED, Place, Places, check_sound, fill, names, side_by_side
from tests.process import run, spawn

ROOT = Path(__file__).parent.parent.parent
FEW = 3  # kills per command
HOUR = 3600.0
# A command, and the seconds after which it writes a large index
COMMANDS = {
    "tag": (("tag", "keep:v1", "new:v1"), HOUR),
    "move": (("tag", "keep:v1", "old:v1"), HOUR),
    "rm": (("rm", "old:v1"), HOUR),
    "tag and index": (("tag", "keep:v1", "new:v1"), 0.0),
    "rm and index": (("rm", "old:v1"), 0.0),
    "index": (("index",), HOUR),
}


def prepare(place: Place) -> dict[str, str]:
    """Write a large index, and then changes that it lacks; return the names."""
    for argv in (
        ("tag", "keep:v1", "first:v1"),
        ("index",),
        ("tag", "old:v1", "second:v1"),
        ("tag", "old:v1", "twice:v1"),
        ("rm", "first:v1"),
    ):
        assert place.run(*argv, large=HOUR).code == 0
    assert list((place.store / ".aimage" / "pending").iterdir())
    found = place.names()
    assert found.keys() == {"keep:v1", "old:v1", "second:v1", "twice:v1"}
    return found


def expect(before: dict[str, str], verb: str) -> dict[str, str]:
    change = {"new:v1": before["keep:v1"]} if verb.startswith("tag") else {}
    change |= {"old:v1": before["keep:v1"]} if verb == "move" else {}
    gone = {"old:v1"} if verb.startswith("rm") else set()
    return {name: digest for name, digest in (before | change).items() if name not in gone}


def rewrite(place: Place) -> None:
    """Write the index as another tool does, with a name of its own."""
    path = place.store / "index.json"
    value = json.loads(path.read_bytes())
    entry = json.loads(json.dumps(value["manifests"][0]))
    entry["annotations"] = {"org.opencontainers.image.ref.name": "theirs:v1"}
    value["manifests"] = [*value["manifests"], entry]
    path.write_text(json.dumps(value))


def break_off(places: Places, template: Path, verb: str, number: int, *, is_other: bool) -> int:
    """Kill a command before a call; return its exit code."""
    place = places.new(template)
    before = prepare(place)
    wanted = expect(before, verb)
    argv, interval = COMMANDS[verb]
    done = place.run(*argv, kill=number, torn=number % 2 == 1, large=interval)
    assert done.code in (KILLED, 0), done.err
    try:
        found = check_sound(place.store, keeps={})
        assert found == wanted if done.code == 0 else found in (before, wanted)
        if is_other:
            theirs = json.loads((place.store / "index.json").read_bytes())["manifests"][0]
            rewrite(place)
            found["theirs:v1"] = theirs["digest"]
            assert names(place.store) == found
            wanted["theirs:v1"] = theirs["digest"]
        again = place.run(*argv, large=interval)
        assert again.code == 0 or (verb.startswith("rm") and again.code == 3), again.err
        assert check_sound(place.store, keeps={}) == wanted
        assert place.run("index", large=HOUR).code == 0
        assert check_sound(place.store, keeps={}) == wanted
        assert read_written(place.store) == wanted
    except AssertionError as error:
        error.add_note(f"{verb}, killed before call {number}, {is_other=}, {place.directory}")
        raise
    places.drop(place)
    return done.code


def read_written(store: Path) -> dict[str, str]:
    """Return the names that other tools see."""
    entries = json.loads((store / "index.json").read_bytes())["manifests"]
    name = "org.opencontainers.image.ref.name"
    return {entry["annotations"][name]: entry["digest"] for entry in entries}


def count_calls(places: Places, template: Path, verb: str) -> int:
    place = places.new(template)
    prepare(place)
    argv, interval = COMMANDS[verb]
    log = place.directory / "log"
    assert place.run(*argv, log=log, large=interval).code == 0
    return len(log.read_text().splitlines())


@pytest.mark.integration
@pytest.mark.parametrize("verb", COMMANDS)
def test_kills_at_sampled_calls(places: Places, template: Path, verb: str) -> None:
    calls = count_calls(places, template, verb)
    stride = max(1, calls // FEW)
    numbers = range(random.randrange(stride), calls, stride)
    side_by_side(
        [partial(break_off, places, template, verb, n, is_other=n % 4 > 1) for n in numbers]
    )


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("is_other", [False, True])
def test_kills_at_every_call(places: Places, template: Path, verb: str, is_other: bool) -> None:
    calls = count_calls(places, template, verb)
    side_by_side(
        [partial(break_off, places, template, verb, n, is_other=is_other) for n in range(calls)]
    )


# -- several processes

WRITER = """
import json, random, sys
from pathlib import Path
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.verify import verify
from tests.crash.recorder import make_large

root, who, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
make_large(0.05)
draw, layout = random.Random(seed), ImageLayout(Path(root))
contents = [layout.resolve(Reference.parse(name)) for name in ("keep:v1", "old:v1")]
present = {name for name, _ in layout.list_tags() if name.startswith(who)}
for _ in range(count):
    name = f"{who}:v{draw.randrange(8)}"
    content = None if name in present and draw.random() < 0.4 else draw.choice(contents)
    print(json.dumps([name, None if content is None else str(content.digest), False]), flush=True)
    if content is None:
        layout.untag(Reference.parse(name))
        present.discard(name)
    else:
        layout.tag(content, Reference.parse(name))
        present.add(name)
    print(json.dumps([name, None if content is None else str(content.digest), True]), flush=True)
"""


def kill_after(child: subprocess.Popen[str], count: int) -> tuple[list[str], str]:
    """Kill a child once it has written some lines; return all its lines, and its errors."""
    assert child.stdout is not None and child.stderr is not None
    lines = [child.stdout.readline() for _ in range(count)]
    child.kill()
    # ``communicate`` would lose the lines that were read ahead
    lines += child.stdout.readlines()
    said = child.stderr.read()
    child.wait(120)
    return lines, said


def live(root: Path, who: str, seed: int, kills: int, count: int) -> dict[str, set[str | None]]:
    """Run a writer several times, most times until it is killed; return what its names may be."""
    draw, states = random.Random(seed), dict[str, set[str | None]]()
    for number in range(kills + 1):
        argv: list[Any] = [sys.executable, "-c", WRITER, root, who, seed + number, count]
        child = spawn(
            [str(word) for word in argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        if number < kills:
            lines, said = kill_after(child, draw.randrange(1, count))
        else:
            text, said = child.communicate(timeout=120)
            lines = text.splitlines(keepends=True)
        assert child.returncode in ((0, KILLED) if number < kills else (0,)), said
        for line in lines:
            if line.endswith("\n"):
                name, digest, is_done = json.loads(line)
                earlier = states.get(name, {None})
                states[name] = {digest} if is_done else {*earlier, digest}
    return states


def stress(places: Places, kills: int, count: int) -> None:
    place, seed = places.new(), secrets.randbits(30)
    fill(place.store)
    program = shutil.which("skopeo")
    states: dict[str, set[str | None]] = {}
    others = list[str]()

    def write_otherwise() -> None:
        """Copy names into the store by a tool that takes no lock."""
        source = f"oci:{place.store}:keep:v1"
        for number in range(kills * 2 if program else 0):
            name = f"theirs{number}:v1"
            if run([program, "copy", "-q", source, f"oci:{place.store}:{name}"]).returncode == 0:
                others.append(name)
            time.sleep(0.05)

    calls = [partial(live, place.store, f"w{n}", seed + 1000 * n, kills, count) for n in range(4)]
    with ThreadPoolExecutor(5) as pool:
        other = pool.submit(write_otherwise)
        for future in [pool.submit(call) for call in calls]:
            states |= future.result()
        other.result()
    # Another tool writes blobs with write permission
    problems = verify(ImageLayout(place.store)).problems
    assert [problem for problem in problems if problem.kind != "writable"] == []
    found = names(place.store)
    keep = found["keep:v1"]
    for name, allowed in states.items():
        assert found.pop(name, None) in allowed, f"{name}, seed {seed}, {place.directory}"
    # Another tool may lose its own names, and none is invented
    left = {name: digest for name, digest in found.items() if name.startswith("theirs")}
    assert left.keys() <= set(others) and set(left.values()) <= {keep}
    assert found.keys() - left.keys() == {"keep:v1", "old:v1", "twice:v1"}
    layout = ImageLayout(place.store)
    layout.tag(layout.resolve(Reference.parse("keep:v1")), Reference.parse("last:v1"))
    layout.write_index()
    assert read_written(place.store) == names(place.store)


def test_all_lines_of_a_killed_process_are_read() -> None:
    program = "import time; print('a\\nb\\nc\\n', end='', flush=True); time.sleep(60)"
    child = spawn(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert kill_after(child, 1) == (["a\n", "b\n", "c\n"], "")
    assert child.returncode == KILLED


@pytest.mark.integration
def test_four_processes_are_killed_while_another_tool_writes(places: Places) -> None:
    stress(places, 3, 12)


@pytest.mark.slow
def test_four_processes_are_killed_often_while_another_tool_writes(places: Places) -> None:
    stress(places, 25, 40)
