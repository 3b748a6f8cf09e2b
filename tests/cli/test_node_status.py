"""``aimage node status``, against nodes that do as they are told."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from clowder_aimage.cli.verbs.node_status import (
    DEFAULT_NODE,
    ago,
    clean,
    lines,
    node,
    state_of,
    status,
)
from clowder_aimage.errors import (
    FormatError,
    NetworkError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
)
from tests.cli.test_startup import HEAVY
from tests.scripted_worker import Says, ScriptedWorker, says

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
DIGEST = "sha256:" + "ab" * 32
MOVED = "sha256:" + "cd" * 32
NODE = {
    "id": "3f2a91c0",
    "started": "2026-01-31T10:00:00Z",
    "ready": True,
    "reasons": [],
    "desired": {
        "directory": "/etc/aimage/desired.d",
        "valid": True,
        "error": None,
        "loaded": "2026-01-31T11:57:00+00:00",
        "files": 2,
    },
    "disk": {"total": 10**12, "free": 57 * 10**10, "used": 0.43, "high": 0.85, "low": 0.80},
    "neighbours": [],
    "models": [],
}


def after(seconds):
    return (NOW + timedelta(seconds=seconds)).isoformat()


def model(ref="h.io/a:v1", state="present", **said):
    return {
        "ref": ref,
        "digest": DIGEST,
        "origin": "models.yaml",
        "priority": 0,
        "pin": False,
        "pullPolicy": "IfNotPresent",
        "refresh": 300.0,
        "state": state,
        "reason": None,
        "code": None,
        "next": None,
        "completed": 0,
        "total": 0,
        "rate": 0,
        "sources": {"registry": 0, "mirror": 0, "neighbour": 0, "cache": 0},
        "changed": after(-240),
        "drift": None,
        **said,
    }


def shown(*models, **facts):
    """What people see, line by line."""
    return lines(NODE | {"models": list(models)} | facts, NOW)


def cells(row):
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def run(answer, *arguments, host=None, **environment):
    """The verb's result, and what the node was asked."""
    script = answer if callable(answer) else lambda asked: says(answer)
    with ScriptedWorker(script).running() as worker:
        said = CliRunner().invoke(
            status, arguments, env={"AIMAGE_HOST": host or worker.host, **environment}
        )
    return said, worker.asked


# -- what is asked


def test_one_question_is_asked_with_the_token():
    said, (asked,) = run(NODE, AIMAGE_TOKEN="open-sesame")
    assert (said.exit_code, asked.method, asked.path) == (0, "GET", "/v1/node")
    assert asked.headers["Authorization"] == "Bearer open-sesame"


def test_json_is_what_the_node_said():
    answer = NODE | {"models": [model()], "x-later": [1]}
    said, _ = run(answer, "--json")
    assert json.loads(said.stdout) == answer


def test_an_address_on_the_command_line_wins():
    with ScriptedWorker(lambda asked: says(NODE)).running() as worker:
        arguments = ("--addr", worker.host)
        said = CliRunner().invoke(status, arguments, env={"AIMAGE_HOST": "127.0.0.1:1"})
    assert (said.exit_code, len(worker.asked)) == (0, 1)


@pytest.mark.parametrize(
    ("addr", "host", "place"),
    [
        (None, "", f"http://{DEFAULT_NODE}"),
        (None, "other:11434", "http://other:11434"),
        (None, "unix:///run/node.sock", "unix:///run/node.sock"),
        ("node7", "other:1", "http://node7:8050"),
        ("http://node7/", "", "http://node7:8050"),
        ("node7:9", "", "http://node7:9"),
        ("http://node7:9", "", "http://node7:9"),
        ("[::1]", "", "http://[::1]:8050"),
        ("[::1]:9", "", "http://[::1]:9"),
        ("https://node7", "", "https://node7:443"),
        ("unix:///run/node.sock", "", "unix:///run/node.sock"),
    ],
)
def test_where_a_node_is_looked_for(monkeypatch, addr, host, place):
    monkeypatch.setenv("AIMAGE_HOST", host)
    monkeypatch.delenv("AIMAGE_TOKEN", raising=False)
    found, token = node(addr)
    assert (str(found), token) == (place, None)


@pytest.mark.parametrize("addr", ["node7:x", "node 7", "http://", "ftp://node7", "me:secret@node7"])
def test_an_odd_address_is_a_mistake_of_usage(addr):
    with pytest.raises(UsageError):
        node(addr)


def test_options_about_this_machine_are_refused(tmp_path):
    said, asked = run(NODE, "--store", str(tmp_path))
    assert isinstance(said.exception, UsageError)
    assert asked == []


# -- what does not work


def test_no_node_at_all(tmp_path):
    said, _ = run(NODE, host=f"unix://{tmp_path}/none.sock")
    assert isinstance(said.exception, NetworkError)
    assert said.exception.exit_code == 1
    assert "aimage node" in said.exception.hint


def test_a_worker_that_is_no_node():
    said, _ = run(lambda asked: says({"error": {"message": "no such route"}}, 404))
    assert isinstance(said.exception, NotFoundError)
    assert said.exception.exit_code == 3
    assert "is no node" in said.exception.message
    assert "aimage serve --node" in said.exception.hint


def test_a_token_that_does_not_do():
    said, _ = run(lambda asked: says({"error": {"message": "who are you"}}, 401))
    assert isinstance(said.exception, UnauthorizedError)
    assert said.exception.exit_code == 4


@pytest.mark.parametrize(
    "answer",
    [
        *([], 7, None, {}, {"models": None}, {"models": {}}, {"models": [7]}, {"models": [{}]}),
        {"models": [{"ref": "h.io/a"}]},
        {"models": [{"ref": 7, "state": "present"}]},
    ],
    ids=str,
)
def test_what_is_no_node_s_answer_is_refused(answer):
    said, _ = run(lambda asked: says(answer))
    assert isinstance(said.exception, FormatError)
    assert said.exception.exit_code == 5


def test_an_answer_that_breaks_off():
    said, _ = run(lambda asked: Says([b'{"models": ['], is_cut=True))
    assert isinstance(said.exception, NetworkError)


# -- what is shown of the models


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"state": "present"}, "present"),
        ({"state": "present", "drift": MOVED}, "present; the tag means cdcdcdcdcdcd now"),
        (
            {"state": "pulling", "completed": 43, "total": 100, "rate": 210 * 2**20},
            "pulling 43 % at 210 MiB/s",
        ),
        ({"state": "pulling", "completed": 999, "total": 1000, "rate": 0}, "pulling 99 %"),
        ({"state": "pulling", "completed": 0, "total": 5, "rate": 2048}, "pulling 0 % at 2 KiB/s"),
        ({"state": "pulling"}, "pulling"),
        (
            {"state": "waiting", "reason": "the registry is gone", "next": after(12)},
            "waiting: the registry is gone; next try in 12 s",
        ),
        ({"state": "waiting", "next": after(125)}, "waiting: next try in 2 min"),
        ({"state": "waiting", "next": after(-5)}, "waiting: next try now"),
        ({"state": "waiting"}, "waiting"),
        ({"state": "failed", "reason": "the disk is full"}, "failed: the disk is full"),
        ({"state": "failed", "code": "not_found"}, "failed: not_found"),
        ({"state": "failed"}, "failed"),
        ({"state": "unknown"}, "unknown"),
        ({"state": "resting", "reason": "a word of 2027"}, "resting: a word of 2027"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_state_in_words(said, words):
    assert state_of(model(**said), NOW) == words


def test_models_are_a_table():
    one = model("h.io/b:v1", "pulling", completed=1, total=2, sources={"neighbour": 5})
    other = model("h.io/a:v1", digest=None, changed=None, state="unknown")
    *_, empty, titles, first, second = shown(one, other)
    assert empty == ""
    assert cells(titles) == ["NAME", "DIGEST", "SOURCE", "CHANGED", "STATE"]
    assert cells(first) == ["h.io/a:v1", "-", "-", "-", "unknown"]
    assert cells(second) == ["h.io/b:v1", "abababababab", "neighbour", "4 min ago", "pulling 50 %"]
    assert titles.index("STATE") == first.index("unknown") == second.index("pulling")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({}, "-"),
        ({"registry": 0, "cache": 0}, "-"),
        ({"registry": 7}, "registry"),
        ({"registry": 20, "neighbour": 80}, "neighbour 80 %, registry 20 %"),
        ({"mirror": 1, "neighbour": 10**12}, "neighbour 99 %, mirror 1 %"),
        ({"registry": "many", "mirror": -1, "cache": True, "other": 5}, "-"),
        (None, "-"),
    ],
    ids=str,
)
def test_where_the_bytes_came_from(sources, words):
    (*_, row) = shown(model(sources=sources))
    assert cells(row)[2] == words


def test_nothing_wanted_is_said():
    assert shown()[-1] == "nothing is wanted here"


# -- what is shown of the node


def test_a_node_that_is_well():
    assert shown(neighbours=[{"url": "http://10.0.0.2:8050", "id": "ab", "state": "live"}])[:4] == [
        "node        3f2a91c0, ready, began 2 h ago",
        "desired     /etc/aimage/desired.d, 2 files, loaded 3 min ago",
        "disk        570 GB free of 1 TB, 43 % used; models are removed from 85 % on, down to 80 %",
        "neighbours  1 live",
    ]


def test_a_node_that_is_not_ready_says_why():
    reasons = [{"reason": "model missing", "model": "h.io/a:v1"}, {"reason": "draining"}, 7, None]
    assert shown(ready=False, reasons=reasons)[0].endswith(
        "not ready: model missing (h.io/a:v1); draining, began 2 h ago"
    )


def test_files_that_are_invalid_are_loud():
    wrong = {"valid": False, "error": "a.yaml, line 3: must be a list"}
    text = shown(desired=NODE["desired"] | wrong)[1]
    assert text.endswith("INVALID (what it said last holds): a.yaml, line 3: must be a list")
    text = shown(desired=NODE["desired"] | wrong | {"loaded": None})[1]
    assert text.endswith("INVALID: a.yaml, line 3: must be a list")


def test_a_node_without_files():
    assert shown(desired=NODE["desired"] | {"directory": None, "files": 0, "loaded": None})[1] == (
        "desired  no directory, 0 files"
    )


def test_neighbours_that_are_of_no_use_are_named():
    neighbours = [
        {"url": "http://10.0.0.2:8050", "id": "ab", "state": "live", "reason": None},
        {"url": "http://10.0.0.3:8050", "id": None, "state": "silent", "reason": None},
        {"url": "http://10.0.0.4:8050", "id": "cd", "state": "banned", "reason": "wrong bytes"},
    ]
    assert shown(neighbours=neighbours)[3:6] == [
        "neighbours  1 banned, 1 live, 1 silent",
        "            http://10.0.0.3:8050 is silent",
        "            http://10.0.0.4:8050 is banned: wrong bytes",
    ]


@pytest.mark.parametrize("key", [key for key in NODE if key != "models"])
@pytest.mark.parametrize("value", [None, 7, -1, 1e300, True, "x", [7], [{}], {}, {"total": "x"}])
def test_what_is_odd_in_an_answer_is_passed_over(key, value):
    assert shown(model(), **{key: value})[-1].endswith("present")


@pytest.mark.parametrize("key", [key for key in model() if key not in ("ref", "state")])
@pytest.mark.parametrize("value", [None, 7, -1, 10**300, 1e300, True, "x", [7], {"registry": {}}])
def test_what_is_odd_in_a_model_is_passed_over(key, value):
    for state in ("present", "pulling", "waiting", "failed"):
        assert state in shown(model(state=state, **{key: value}))[-1]


# -- words


def test_no_control_character_comes_through():
    evil = "a\x1b[2J\x9b\u202e\r\nready"
    answer = NODE | {
        "id": evil,
        "ready": False,
        "reasons": [{"reason": evil, "model": evil}],
        "desired": {"directory": evil, "valid": False, "error": evil, "files": 1},
        "neighbours": [{"url": evil, "state": evil, "reason": evil}],
        "models": [
            model(ref=evil, digest=f"sha256:{evil}", state=evil, reason=evil),
            model(state="failed", reason=evil, drift=evil, code=evil),
            model(drift=evil),
        ],
    }
    said, _ = run(answer)
    assert said.exit_code == 0
    assert not [c for c in said.stdout if not c.isprintable() and c != "\n"]
    # neither does what a node says begin a line of its own
    assert len(said.stdout.splitlines()) == len(lines(answer, NOW))
    assert not [line for line in said.stdout.splitlines() if line.startswith("ready")]


def test_a_text_is_on_one_line_and_ends():
    assert clean("a\nb") == "a b"
    assert clean("x" * 10**6) == "x" * 300 + "..."
    assert clean(None) == clean(7) == clean(["x"]) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "just now"), (-90, "just now"), (1, "1 s ago"), (59.9, "59 s ago")),
        *((60, "1 min ago"), (3599, "59 min ago"), (3600, "1 h ago"), (86399, "23 h ago")),
        *((86400, "1 d ago"), (400 * 86400, "400 d ago")),
    ],
)
def test_how_long_ago(seconds, words):
    assert ago(after(-seconds), NOW) == words


@pytest.mark.parametrize("text", [None, 7, "", "yesterday", "2026-13-01", [], "9" * 1000])
def test_what_is_no_moment_is_not_guessed(text):
    assert ago(text, NOW) == "?"


def test_moments_of_other_zones_and_of_none():
    assert ago("2026-01-31T12:59:00+01:00", NOW) == "1 min ago"
    assert ago("2026-01-31T11:59:00", NOW) == "1 min ago"
    assert ago("9999-12-31T23:59:59-23:59", NOW) == "just now"
    assert ago("0001-01-01T00:00:00+23:59", NOW).endswith("d ago")


def test_the_verb_starts_fast():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import clowder_aimage.cli.verbs.node_status"],
        capture_output=True,
        text=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "clowder_aimage.cli.verbs.node_status" in modules
    assert not {module for module in modules if module.partition(".")[0] in {*HEAVY, "yaml"}}
