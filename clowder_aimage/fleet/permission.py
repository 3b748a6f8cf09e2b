"""The permissions of the programs of a fleet on its NATS server.

Gateways and operators are users of the account of the fleet, which has its streams. A worker has an
account of its own, which imports the subjects that the worker may use. Permissions of a user would
not limit a worker: the server sends its responses to any subject that a client names, past the
permissions of that client, also to the API of JetStream. In an account of its own, these subjects
lead nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from clowder_aimage.fleet.field import is_id
from clowder_aimage.fleet.name import DEFAULT_FLEET, GATEWAY, OPERATOR, WORKER, FleetNames

ROLES = (OPERATOR, GATEWAY, WORKER)
# In the place of the name of a worker: the user of workers that trust each other.
ANY_WORKER = "*"
_API = "$JS.API"
# Characters of a line
_WIDTH = 84


def is_worker_name(name: str) -> bool:
    """Return True for a name that a worker may have: it is a part of subjects."""
    return is_id(name) and name != GATEWAY


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects to which a user may publish and subscribe."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def format_lines(self) -> list[str]:
        """Return the lines of a configuration of NATS."""
        return [
            "permissions {",
            *_format_list("publish", self.publish),
            *_format_list("subscribe", self.subscribe),
            "}",
        ]


@dataclass(frozen=True, slots=True)
class Imports:
    """The subjects of a fleet that a worker may use.

    It publishes to ``services``, and hears ``streams``.
    """

    services: tuple[str, ...]
    streams: tuple[str, ...]

    def format_lines(self, names: FleetNames, account: str) -> list[str]:
        """Return the lines of the account of a worker, in the configuration of NATS."""
        lines = [
            f"{{ {kind}: {{ account: {account}, subject: {json.dumps(subject)} }}"
            f"{_format_alias(names, subject)} }}"
            for kind, subject in self._list_all()
        ]
        return ["imports = [", *(f"  {line}" for line in lines), "]"]

    def format_exports(self) -> list[str]:
        """Return the lines of the account of the fleet."""
        lines = [f"{{ {kind}: {json.dumps(subject)} }}" for kind, subject in self._list_all()]
        return ["exports = [", *(f"  {line}" for line in lines), "]"]

    def _list_all(self) -> list[tuple[str, str]]:
        services = [("service", subject) for subject in self.services]
        return [*services, *(("stream", subject) for subject in self.streams)]


def _format_alias(names: FleetNames, subject: str) -> str:
    """Return the name of a call of JetStream in the account of a worker.

    The server reserves the usual one.
    """
    if not subject.startswith(_API):
        return ""
    return f", to: {json.dumps(names.api + subject.removeprefix(_API))}"


def build_imports(names: FleetNames, worker: str = ANY_WORKER) -> Imports:
    """Return the imports of the account of a worker; those of ANY_WORKER are what is exported."""
    jobs, buckets = names.jobs, (_bucket(names.workers), _bucket(names.keys))
    return Imports(
        services=(
            names.build_log_subject(worker, "*"),
            names.build_mark_subject(worker, "*"),
            names.build_dead_letter_subject(worker, "*"),
            _key(names.workers, worker),
            f"$JS.ACK.{jobs}.>",
            names.build_answer_subject(GATEWAY, ">"),
            names.build_answer_subject(OPERATOR, ">"),
            *_api("STREAM.INFO", jobs, names.logs, names.marks, names.dead, *buckets),
            *_api("CONSUMER.MSG.NEXT", f"{jobs}.>"),
            *_api("CONSUMER.INFO", f"{jobs}.>"),
            *_api("DIRECT.GET", names.marks, f"{names.bodies}.{names.fleet}.body.>"),
            *_api("DIRECT.GET", _entries(names.workers), _entries(names.keys)),
        ),
        streams=(
            names.announcements,
            names.build_cancel_subject("*"),
            names.build_call_subject(worker),
            names.build_control_subject(worker),
            _key(names.workers, "*"),
            _key(names.keys, "*"),
        ),
    )


def build_permissions(names: FleetNames, role: str) -> Permissions:
    """Return the permissions of a gateway or an operator, in the account of the fleet."""
    return _build_gateway_permissions(names) if role == GATEWAY else _build_operator(names)


def _build_gateway_permissions(names: FleetNames) -> Permissions:
    jobs, batches = names.jobs, _bucket(names.batches)
    buckets = _bucket(names.workers), _bucket(names.keys), batches
    stored = names.logs, names.marks, jobs, names.files, names.bodies
    removed = names.files, names.bodies, names.logs, batches
    return Permissions(
        publish=(
            f"{names.fleet}.job.>",
            f"{names.fleet}.body.>",
            names.build_mark_subject(GATEWAY, "*"),
            names.announcements,
            names.build_cancel_subject("*"),
            names.build_call_subject("*"),
            names.build_file_subject("*"),
            _key(names.batches, ">"),
            names.build_load_subject("*"),
            *_api("STREAM.INFO", *stored, names.dead, *buckets),
            *_api("STREAM.MSG.GET", *stored, *buckets),
            *_api("STREAM.MSG.DELETE", jobs, *removed),
            *_api("STREAM.PURGE", *removed),
            *_api("CONSUMER.LIST", jobs),
            *_api("CONSUMER.INFO", f"{jobs}.>"),
            *_api("CONSUMER.DURABLE.CREATE", f"{jobs}.>"),
            *_api("CONSUMER.CREATE", f"{jobs}.>"),
            *_api("DIRECT.GET", *map(_entries, (names.workers, names.keys, names.batches))),
        ),
        subscribe=(
            f"_INBOX_{GATEWAY}.>",
            names.build_log_subject("*", "*"),
            names.build_mark_subject("*", "*"),
            _key(names.workers, "*"),
            _key(names.keys, "*"),
        ),
    )


def _build_operator(names: FleetNames) -> Permissions:
    return Permissions(
        publish=(
            # All fleets of the account
            f"{_API}.>",
            "$KV.>",
            names.build_control_subject("*"),
        ),
        subscribe=(f"_INBOX_{OPERATOR}.>",),
    )


def _bucket(name: str) -> str:
    """Return the stream of a bucket."""
    return f"KV_{name}"


def _key(bucket: str, key: str) -> str:
    """Return the subject of the entry of a bucket."""
    return f"$KV.{bucket}.{key}"


def _entries(bucket: str) -> str:
    """Return the end of the subject of direct reads of a bucket."""
    return f"{_bucket(bucket)}.{_key(bucket, '>')}"


def _api(call: str, *objects: str) -> Iterable[str]:
    """Yield the subjects of a call of the API of JetStream, for each of its objects."""
    return (f"{_API}.{call}.{name}" for name in objects)


def _format_list(name: str, subjects: tuple[str, ...]) -> list[str]:
    """Return lines of a list in the configuration of NATS, as few as fit."""
    lines, line = [f"  {name}: ["], ""
    for number, subject in enumerate(subjects):
        text = json.dumps(subject) + ("," if number + 1 < len(subjects) else "")
        if line and len(line) + 1 + len(text) > _WIDTH:
            lines.append(f"    {line}")
            line = ""
        line = f"{line} {text}" if line else text
    return [*lines, f"    {line}", "  ]"]


def format_user(login: Iterable[str], permissions: Permissions) -> list[str]:
    """Return the block of a gateway or an operator; ``login`` are its first lines."""
    lines = [*login, *permissions.format_lines()]
    return ["{", *(f"  {line}" for line in lines), "}"]


def format_worker_account(
    login: str, names: FleetNames, worker: str, account: str = DEFAULT_FLEET
) -> list[str]:
    """Return the account of a worker with its user; ``account`` is that of the fleet."""
    words = (account, *([] if names.fleet == account else [names.fleet]))
    name = "-".join((*words, "workers" if worker == ANY_WORKER else worker))
    lines = [f"users = [{{ {login} }}]", *build_imports(names, worker).format_lines(names, account)]
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]
