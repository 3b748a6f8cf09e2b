"""The subjects that each role of a fleet may publish to and hear, and a table in words.

``python -m tests.fleet.role_matrix`` writes ``role_matrix.txt`` and the tables in the guides.
``test_role_matrix.py`` compares them with what a real server refuses.
"""

from __future__ import annotations

import json
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from clowder_aimage.fleet.name import GATEWAY, INTERACTIVE, KEY_SET, OPERATOR, WORKER, FleetNames
from tests.conftest import ROOT
from tests.fleet.fleet_run import Nats
from tests.fleet.nats_config import shipped

NAMES = FleetNames()
MATRIX = Path(__file__).with_name("role_matrix.txt")
PAGES = (ROOT / "docs" / "fleet.md", ROOT / "docs" / "security.md")
BEGIN, END = "<!-- roles: written by python -m tests.fleet.role_matrix -->", "<!-- end of roles -->"
# The user of each column; the worker is "worker-1".
USERS = {WORKER: "worker-1", GATEWAY: "gateway", OPERATOR: "operator"}
# A user of the account of the fleet who may do everything
_AUDITOR = "auditor"
_API = "$JS.API"
_WORKERS = ("worker-1", "worker-2")
_CONSUMER = NAMES.build_consumer_name(INTERACTIVE, "digest")
_JOB = NAMES.build_job_subject(INTERACTIVE, "digest", "caller")
_STREAMS = (
    *(NAMES.jobs, NAMES.bodies, NAMES.logs, NAMES.marks, NAMES.dead, NAMES.files),
    *(f"KV_{bucket}" for bucket in (NAMES.workers, NAMES.keys, NAMES.batches)),
)
_BUCKETS = (NAMES.workers, NAMES.keys, NAMES.batches)
# nats-server, "server/jetstream_api.go": all calls of 2.9 to 2.11 that name a stream ...
_STREAM_CALLS = (
    *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.INFO", "STREAM.DELETE", "STREAM.PURGE"),
    *("STREAM.SNAPSHOT", "STREAM.RESTORE", "STREAM.MSG.GET", "STREAM.MSG.DELETE"),
    *("STREAM.PEER.REMOVE", "STREAM.LEADER.STEPDOWN", "CONSUMER.NAMES", "CONSUMER.LIST"),
    *("DIRECT.GET", "CONSUMER.CREATE"),
)
# ... those that name a consumer of it ...
_CONSUMER_CALLS = (
    *("CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE", "CONSUMER.INFO"),
    *("CONSUMER.MSG.NEXT", "CONSUMER.PAUSE", "CONSUMER.LEADER.STEPDOWN", "CONSUMER.UNPIN"),
)
# ... and the others.
_CALLS = (
    *("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "SERVER.REMOVE"),
    *("ACCOUNT.PURGE.aimage", "ACCOUNT.STREAM.MOVE.aimage.s", "STREAM.TEMPLATE.CREATE.x"),
)


def _list_messages() -> Iterator[str]:
    """Yield the subjects of the messages of a fleet: for workers those of each."""
    yield _JOB
    yield NAMES.announcements
    yield NAMES.build_body_subject("upload", 0)
    yield NAMES.build_file_subject("file")
    yield NAMES.build_cancel_subject("job")
    for worker in (*_WORKERS, GATEWAY):
        yield NAMES.build_log_subject(worker, "job")
        yield NAMES.build_mark_subject(worker, "job")
        yield NAMES.build_dead_letter_subject(worker, "job")
    for worker in _WORKERS:
        yield NAMES.build_call_subject(worker)
        yield NAMES.build_control_subject(worker)
        yield f"$KV.{NAMES.workers}.{worker}"
        yield f"$KV.{NAMES.keys}.{KEY_SET}"
    yield f"$KV.{NAMES.batches}.batch"
    for role in (GATEWAY, OPERATOR):
        yield NAMES.build_answer_subject(role, "call")
        yield f"_INBOX_{role}.inbox.1"


def _list_own(worker: str) -> tuple[str, ...]:
    """Return subjects to which only a worker publishes."""
    return (
        NAMES.build_log_subject(worker, "job"),
        NAMES.build_mark_subject(worker, "job"),
        NAMES.build_dead_letter_subject(worker, "job"),
        f"$KV.{NAMES.workers}.{worker}",
    )


def list_heard() -> list[str]:
    """Return the subjects that a program may wish to hear."""
    return [*_list_messages(), "$JS.API.INFO", f"$JS.ACK.{NAMES.jobs}.x", "$JS.EVENT.ADVISORY.x"]


def list_published() -> list[str]:
    """Return subjects that a program may wish to publish to: messages, and calls of JetStream."""
    calls = [f"{call}.{stream}" for call in _STREAM_CALLS for stream in _STREAMS]
    calls += [f"{call}.{stream}.{_CONSUMER}" for call in _CONSUMER_CALLS for stream in _STREAMS]
    calls += [f"CONSUMER.CREATE.{NAMES.jobs}.{_CONSUMER}.{_JOB}"]
    calls += [f"DIRECT.GET.KV_{bucket}.$KV.{bucket}.key" for bucket in _BUCKETS]
    calls += [f"DIRECT.GET.{NAMES.bodies}.{NAMES.build_body_subject('upload', 0)}"]
    calls += [f"DIRECT.GET.{NAMES.marks}.{NAMES.build_mark_subject('worker-1', 'job')}"]
    calls += [f"DIRECT.GET.{NAMES.jobs}.{_JOB}"]
    ends = [f"{stream}.{_CONSUMER}.1.1.1.1.0" for stream in _STREAMS]
    return [
        *_list_messages(),
        "_INBOX.inbox.1",
        *(f"$JS.ACK.{end}" for end in ends),
        *(f"$JS.FC.{stream}.{_CONSUMER}.1" for stream in _STREAMS),
        *(f"{_API}.{call}" for call in (*_CALLS, *calls)),
    ]


class Program:
    """A connection in the protocol of NATS itself, which counts what reaches others."""

    def __init__(self, port: int, user: str, password: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        login = {"user": user, "pass": password, "verbose": False, "pedantic": False}
        self._send(f"CONNECT {json.dumps(login)}")
        self.synchronise()

    def _send(self, *lines: str) -> None:
        self._socket.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def synchronise(self) -> str:
        """Return what has arrived when the server has done all that was sent."""
        self._send("PING")
        received = b""
        while b"PONG\r\n" not in received:
            chunk = self._socket.recv(1 << 16)
            assert chunk, received
            received += chunk
        return received.decode()

    def publish(self, subjects: Iterable[str]) -> None:
        """Publish an empty message to each subject, without a reply."""
        self._send(*(f"PUB {subject} 0\r\n" for subject in subjects))
        self.synchronise()

    def subscribe(self, subjects: Iterable[str]) -> None:
        """Subscribe to each subject."""
        self._send(*(f"SUB {subject} {number + 1}" for number, subject in enumerate(subjects)))
        self.synchronise()

    def read_subjects(self) -> set[str]:
        """Return the subjects of the messages that have arrived."""
        return set(re.findall(r"^MSG (\S+) ", self.synchronise(), re.MULTILINE))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def measure_role(port: int, role: str, password: str) -> tuple[set[str], set[str]]:
    """Return the subjects that a role reaches in the account of the fleet, and those it hears.

    There are no streams, and nobody answers.
    """
    auditor = Program(port, _AUDITOR, _AUDITOR)
    program = Program(port, USERS[role], password)
    auditor.subscribe([">"])
    program.publish(list_published())
    if role == WORKER:
        # Its account has the calls by another name.
        program.publish(_rename_calls(list_published()))
    reached = auditor.read_subjects()
    program.subscribe([*list_heard(), ">", f"{NAMES.fleet}.>", "$JS.>", "$KV.>"])
    auditor.publish(list_heard())
    heard = program.read_subjects()
    for each in (auditor, program):
        each.close()
    return reached, heard


def _rename_calls(subjects: Iterable[str]) -> list[str]:
    return [NAMES.api + subject.removeprefix(_API) for subject in subjects if _API in subject]


def format_matrix(measured: Mapping[str, tuple[set[str], set[str]]]) -> str:
    """Return the subjects, each with the letters of the roles that may use it."""
    lines = [
        "# Written by python -m tests.fleet.role_matrix: w is the worker worker-1, g a gateway,",
        "# o an operator. Publishing:",
        *_format_rows(list_published(), {role: sets[0] for role, sets in measured.items()}),
        "# Hearing:",
        *_format_rows(list_heard(), {role: sets[1] for role, sets in measured.items()}),
    ]
    return "\n".join(lines) + "\n"


def _format_rows(subjects: Iterable[str], allowed: Mapping[str, set[str]]) -> Iterator[str]:
    for subject in subjects:
        letters = (role[0] if subject in allowed[role] else "-" for role in USERS)
        yield f"{''.join(letters)} {subject}"


# -- the table in words

_ADMINISTRATION = ("STREAM.CREATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE")
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("put a job on the queue, and its body", (_JOB, NAMES.build_body_subject("upload", 0))),
    ("cancel a job", (NAMES.build_cancel_subject("job"),)),
    ("send a request to a worker", tuple(map(NAMES.build_call_subject, _WORKERS))),
    ("give a worker an order (`drain`)", tuple(map(NAMES.build_control_subject, _WORKERS))),
    ("publish a key set", (f"$KV.{NAMES.keys}.{KEY_SET}",)),
    (
        "take and acknowledge a job",
        (
            f"$JS.API.CONSUMER.MSG.NEXT.{NAMES.jobs}.{_CONSUMER}",
            f"$JS.ACK.{NAMES.jobs}.{_CONSUMER}.1.1.1.1.0",
        ),
    ),
    ("decide which workers get which jobs", (f"$JS.API.CONSUMER.CREATE.{NAMES.jobs}.{_CONSUMER}",)),
    ("respond and report in the name of `worker-1`", _list_own("worker-1")),
    ("respond and report in the name of another worker", _list_own("worker-2")),
    ("answer to a gateway", (NAMES.build_answer_subject(GATEWAY, "call"),)),
    ("read responses of others", (f"$JS.API.STREAM.MSG.GET.{NAMES.logs}",)),
    ("read jobs without taking them", (f"$JS.API.STREAM.MSG.GET.{NAMES.jobs}",)),
    (
        "read and write files and batches",
        (f"$KV.{NAMES.batches}.batch", NAMES.build_file_subject("file")),
    ),
    ("remove a job", (f"$JS.API.STREAM.MSG.DELETE.{NAMES.jobs}",)),
    (
        "make, change and delete streams",
        tuple(f"$JS.API.{call}.{NAMES.jobs}" for call in _ADMINISTRATION),
    ),
)


def format_words() -> str:
    """Return the table for the documentation, of the checked-in matrix."""
    lines = MATRIX.read_text().partition("# Hearing:")[0].splitlines()
    allowed = {subject: letters for letters, _, subject in (line.partition(" ") for line in lines)}
    rows = ["| | `worker-1` | gateway | operator |", "|---|---|---|---|"]
    for words, subjects in _WORDS:
        cells = [
            "yes" if all(role[0] in allowed[subject] for subject in subjects) else "no"
            for role in USERS
        ]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(rows)


def replace_table(text: str) -> str:
    """Return a page of the documentation with the table in its place."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{format_words()}\n\n{END}{rest.partition(END)[2]}"


def measure() -> dict[str, tuple[set[str], set[str]]]:
    """Return what each role reaches and hears on a server with the shipped configuration."""
    passwords = {f"NATS_{role.upper()}_PASSWORD": role for role in USERS}
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for name, text in passwords.items():
            patch.setenv(name, text)
        place = Path(directory)
        auditor = f"users = [\n{{ user: {_AUDITOR}, password: {_AUDITOR} }}\n"
        text = shipped(place / "js").replace("users = [\n", auditor, 1)
        (place / "nats.conf").write_text(text)
        server = Nats(place / "server", arguments=("-c", str(place / "nats.conf"))).start()
        try:
            return {role: measure_role(server.port, role, role) for role in USERS}
        finally:
            server.kill()


def main() -> None:
    """Write the matrix and the tables."""
    MATRIX.write_text(format_matrix(measure()))
    for page in PAGES:
        page.write_text(replace_table(page.read_text()))


if __name__ == "__main__":
    main()
