"""``aimage node status``, against scripted nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from clowder_aimage.cli.verbs.node import (
    DEFAULT_NODE,
    describe_state,
    format_status,
    resolve_endpoint,
    status,
)
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
)
from tests.cli.test_startup import HEAVY
from tests.process import run
from tests.scripted_worker import Asked, Says, ScriptedWorker, says

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
DIGEST, MOVED = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
NODE: dict[str, Any] = {
    "id": "3f2a91c0",
    "started": "2026-01-31T10:00:00+00:00",
    "ready": True,
    "reasons": [],
    "warnings": [],
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


def after(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).isoformat()


def model(ref: str = "h.io/a:v1", state: str = "present", **facts: Any) -> dict[Any, Any]:
    return {
        "ref": ref,
        "digest": DIGEST,
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
        **facts,
    }


def shown(*models: Any, **facts: Any) -> list[str]:
    return format_status(NODE | {"models": list(models)} | facts, NOW)


def cells(row: str) -> list[Any]:
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def ask_status(
    answer: dict[Any, Any] | Callable[[Any], Says],
    *arguments: str,
    host: str | None = None,
    **environment: str,
) -> tuple[Result, list[Asked]]:
    """Return the verb's result, and the requests that the node received."""
    script = answer if callable(answer) else lambda asked: says(answer)
    with ScriptedWorker(script).running() as worker:
        done = CliRunner().invoke(
            status, arguments, env={"AIMAGE_HOST": host or worker.host, **environment}
        )
    return done, worker.asked


# -- the request


def test_one_request_is_sent_with_the_token() -> None:
    done, (asked,) = ask_status(NODE, AIMAGE_TOKEN="open-sesame")
    assert (done.exit_code, asked.method, asked.path) == (0, "GET", "/v1/node")
    assert asked.headers["Authorization"] == "Bearer open-sesame"


def test_json_is_the_answer_of_the_node() -> None:
    answer = NODE | {"models": [model()], "x-later": [1]}
    done, _ = ask_status(answer, "--json")
    assert json.loads(done.stdout) == answer


@pytest.mark.parametrize(
    ("addr", "host", "place"),
    [
        (None, "", f"http://{DEFAULT_NODE}"),
        (None, "other:11434", "http://other:11434"),
        ("node7", "other:1", "http://node7:8050"),
        ("http://node7/", "", "http://node7:8050"),
        ("[::1]:9", "", "http://[::1]:9"),
        ("https://node7", "", "https://node7:443"),
    ],
)
def test_the_address_of_the_node(
    monkeypatch: pytest.MonkeyPatch, addr: str | None, host: str, place: str
) -> None:
    monkeypatch.setenv("AIMAGE_HOST", host)
    assert str(resolve_endpoint(addr)) == place


def test_an_invalid_address_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        resolve_endpoint("ftp://node7")


def test_options_of_this_machine_are_refused(tmp_path: Path) -> None:
    done, asked = ask_status(NODE, "--store", str(tmp_path))
    assert isinstance(done.exception, UsageError) and asked == []


# -- failures


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (says({"error": {"message": "no such route"}}, 404), NotFoundError, "is not a node"),
        (says({"error": {"message": "who are you"}}, 401), UnauthorizedError, ""),
        (says({"status": "ok"}), FormatError, "is not a node"),
        (says(NODE | {"models": [{"ref": 5}]}), FormatError, "cannot be read"),
        (Says([b'{"models": ['], is_cut=True), NetworkError, ""),
    ],
)
def test_answers_that_are_not_a_status(answer: Says, error: type[AImageError], text: str) -> None:
    done, _ = ask_status(lambda asked: answer)
    assert isinstance(done.exception, error) and text in done.exception.message


def test_an_unreachable_node_fails(tmp_path: Path) -> None:
    done, _ = ask_status(NODE, host=f"unix://{tmp_path}/none.sock")
    assert isinstance(done.exception, NetworkError)
    assert "aimage node" in (done.exception.hint or "")


# -- models


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "present"),
        ({"drift": MOVED}, "present; the tag now refers to cdcdcdcdcdcd"),
        (
            {"reason": "no such tag", "next": after(125)},
            "present; no such tag; next try in 2 min",
        ),
        (
            {"state": "pulling", "completed": 43, "total": 100, "rate": 210 * 2**20},
            "pulling 43 % at 210 MiB/s",
        ),
        ({"state": "pulling", "rate": 2048}, "pulling at 2 KiB/s"),
        (
            {"state": "waiting", "reason": "the registry is gone", "next": after(-5)},
            "waiting: the registry is gone; next try now",
        ),
        ({"state": "unknown"}, "unknown"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_states_are_printed_as_words(facts: dict[str, Any], words: str) -> None:
    assert describe_state(model(**facts), NOW) == words


def test_models_are_a_table() -> None:
    one = model("h.io/b:v1", "pulling", completed=1, total=2, sources={"neighbour": 5})
    other = model("h.io/a:v1", "unknown", digest=None)
    *_, empty, titles, first, second = shown(one, other)
    assert empty == ""
    assert cells(titles) == ["NAME", "DIGEST", "SOURCE", "CHANGED", "STATE"]
    assert cells(first) == ["h.io/a:v1", "-", "-", "4 min ago", "unknown"]
    assert cells(second) == ["h.io/b:v1", "abababababab", "neighbour", "4 min ago", "pulling 50 %"]
    assert titles.index("STATE") == first.index("unknown") == second.index("pulling")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"registry": 0, "cache": 0}, "-"),
        ({"registry": 20, "neighbour": 80}, "neighbour 80 %, registry 20 %"),
        ({"mirror": 1, "neighbour": 10**12}, "neighbour 99 %, mirror 1 %"),
    ],
)
def test_the_sources_of_a_model_are_printed(sources: dict[str, int], words: str) -> None:
    assert cells(shown(model(sources=sources))[-1])[2] == words


# -- the node


def test_a_ready_node_is_printed() -> None:
    neighbour = {"url": "http://10.0.0.2:8050", "id": "ab", "state": "live"}
    assert shown(neighbours=[neighbour]) == [
        "node        3f2a91c0, ready, started 2 h ago",
        "desired     /etc/aimage/desired.d, 2 files, loaded 3 min ago",
        "disk        570 GB free of 1 TB, 43 % used; models are evicted at 85 %, down to 80 %",
        "neighbours  1 live",
        "",
        "no models are specified",
    ]


def test_a_node_that_is_not_ready_is_printed_with_reasons() -> None:
    reasons = [{"reason": "model missing", "model": "h.io/a:v1"}, {"reason": "store not writable"}]
    assert shown(ready=False, reasons=reasons)[0].endswith(
        "not ready: model missing (h.io/a:v1); store not writable, started 2 h ago"
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"valid": False, "error": "a.yaml, line 3: must be a list"},
            "/etc/aimage/desired.d, 2 files, loaded 3 min ago, "
            "INVALID (the last valid state is used): a.yaml, line 3: must be a list",
        ),
        (
            {"valid": False, "error": "must be a list", "loaded": None},
            "/etc/aimage/desired.d, 2 files, INVALID: must be a list",
        ),
        ({"directory": None, "files": 0, "loaded": None}, "no directory, 0 files"),
    ],
)
def test_the_desired_state_is_printed(facts: dict[str, Any], words: str) -> None:
    assert shown(desired=NODE["desired"] | facts)[1] == f"desired     {words}"


def test_a_disk_without_measurements_is_omitted() -> None:
    disk = {"total": None, "free": None, "used": None, "high": 0.85, "low": 0.8}
    assert not any(line.startswith("disk") for line in shown(disk=disk))


def test_unreachable_peers_are_listed() -> None:
    neighbours = [
        {"url": "http://10.0.0.2:8050", "id": "ab", "state": "live", "reason": None},
        {"url": "http://10.0.0.3:8050", "id": None, "state": "silent", "reason": None},
        {"url": "http://10.0.0.4:8050", "id": "cd", "state": "silent", "reason": "no answer"},
    ]
    assert shown(neighbours=neighbours)[3:6] == [
        "neighbours  1 live, 2 silent",
        "            http://10.0.0.3:8050 is silent",
        "            http://10.0.0.4:8050 is silent: no answer",
    ]


@pytest.mark.parametrize("is_json", [False, True])
def test_warnings_are_on_stderr(is_json: bool) -> None:
    done, _ = ask_status(NODE | {"warnings": ["desired state invalid"]}, *["--json"] * is_json)
    assert ("warning: desired state invalid" in done.stderr) is not is_json


# -- formatting


def test_control_characters_are_not_printed() -> None:
    evil = "a\x1b[2J\x9b\u202e\r\nready"
    answer = NODE | {
        "warnings": [evil],
        "desired": NODE["desired"] | {"valid": False, "error": evil},
        "models": [model(reason=evil, state="failed"), model(reason=evil)],
    }
    done, _ = ask_status(answer)
    assert done.exit_code == 0
    assert not [c for c in done.output if not c.isprintable() and c != "\n"]
    assert not [line for line in done.output.splitlines() if line.startswith("ready")]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((-90, "just now"), (59.9, "59 s ago"), (60, "1 min ago")),
        *((86399, "23 h ago"), (400 * 86400, "400 d ago")),
    ],
)
def test_times_are_relative(seconds: float, words: str) -> None:
    assert cells(shown(model(changed=after(-seconds)))[-1])[3] == words


def test_the_verb_starts_fast() -> None:
    done = run(
        [sys.executable, "-X", "importtime", "-c", "import clowder_aimage.cli.verbs.node"],
        text=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "clowder_aimage.cli.verbs.node" in modules
    assert not {module for module in modules if module.partition(".")[0] in {*HEAVY, "yaml"}}
