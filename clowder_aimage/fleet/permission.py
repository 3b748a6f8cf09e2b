"""The permissions of the programs of a fleet on its NATS server.

They keep programs to their part of a fleet. Alone they do not stop a worker: the server sends its
responses to any subject that a client names. Therefore workers act on signed messages only
(``signature``), and the permissions limit what else a worker can do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from clowder_aimage.fleet.key import GATEWAY, OPERATOR
from clowder_aimage.fleet.name import GATEWAYS, FleetNames

WORKER = "worker"
ROLES = (OPERATOR, GATEWAY, WORKER)
# In the place of the name of a worker: the user of workers that trust each other.
ANY_WORKER = "*"
_WORKER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WIDTH = 100


def is_worker_name(name: str) -> bool:
    """Return True for a name that a worker may have: it is a part of subjects."""
    return _WORKER_NAME.fullmatch(name) is not None and name != GATEWAYS


def build_inbox_prefix(role: str, worker: str = "") -> str:
    """Return the beginning of the subjects for replies to a program; only a worker has a name."""
    return f"_INBOX_{role}.{worker}" if worker else f"_INBOX_{role}"


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


def build_permissions(names: FleetNames, role: str, worker: str = ANY_WORKER) -> Permissions:
    """Return the permissions of a role in a fleet; ``worker`` is the name of a worker."""
    if role == WORKER:
        return _build_worker_permissions(names, worker)
    return _build_gateway_permissions(names) if role == GATEWAY else _build_operator(names)


def _build_worker_permissions(names: FleetNames, worker: str) -> Permissions:
    jobs, buckets = names.jobs, (_bucket(names.workers), _bucket(names.keys))
    return Permissions(
        publish=(
            names.build_log_subject(worker, "*"),
            names.build_mark_subject(worker, "*"),
            names.build_dead_letter_subject(worker, "*"),
            _key(names.workers, worker),
            f"$JS.ACK.{jobs}.>",
            f"{build_inbox_prefix(GATEWAY)}.>",
            f"{build_inbox_prefix(OPERATOR)}.>",
            *_api("STREAM.INFO", jobs, names.logs, names.marks, names.dead, *buckets),
            *_api("CONSUMER.MSG.NEXT", f"{jobs}.>"),
            *_api("CONSUMER.INFO", f"{jobs}.>"),
            *_api("DIRECT.GET", names.marks, f"{names.bodies}.{names.fleet}.body.>"),
            *_api("DIRECT.GET", _entries(names.workers), _entries(names.keys)),
        ),
        subscribe=(
            f"{build_inbox_prefix(WORKER, worker)}.>",
            names.announcements,
            names.build_cancel_subject("*"),
            names.build_call_subject(worker),
            names.build_control_subject(worker),
            _key(names.workers, "*"),
            _key(names.keys, "*"),
        ),
    )


def _build_gateway_permissions(names: FleetNames) -> Permissions:
    jobs, batches = names.jobs, _bucket(names.batches)
    buckets = _bucket(names.workers), _bucket(names.keys), batches
    stored = names.logs, names.marks, jobs, names.files
    return Permissions(
        publish=(
            f"{names.fleet}.job.>",
            f"{names.fleet}.body.>",
            names.build_mark_subject(GATEWAYS, "*"),
            names.announcements,
            names.build_cancel_subject("*"),
            names.build_call_subject("*"),
            names.build_file_subject("*"),
            _key(names.batches, ">"),
            *_api("STREAM.INFO", *stored, names.bodies, names.dead, *buckets),
            *_api("STREAM.MSG.GET", *stored, *buckets),
            *_api("STREAM.MSG.DELETE", jobs),
            *_api("STREAM.PURGE", names.files, names.bodies, names.logs),
            *_api("CONSUMER.LIST", jobs),
            *_api("CONSUMER.INFO", f"{jobs}.>"),
            *_api("CONSUMER.DURABLE.CREATE", f"{jobs}.>"),
            *_api("CONSUMER.CREATE", f"{jobs}.>"),
            *_api("DIRECT.GET", *map(_entries, (names.workers, names.keys, names.batches))),
            # The list of the keys of a bucket
            *_api("CONSUMER.CREATE", batches, f"{batches}.>"),
            *_api("CONSUMER.INFO", f"{batches}.>"),
            *_api("CONSUMER.DELETE", f"{batches}.>"),
            f"$JS.FC.{batches}.>",
        ),
        subscribe=(
            f"{build_inbox_prefix(GATEWAY)}.>",
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
            "$JS.API.>",
            "$KV.>",
            names.build_control_subject("*"),
        ),
        subscribe=(f"{build_inbox_prefix(OPERATOR)}.>",),
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
    return (f"$JS.API.{call}.{name}" for name in objects)


def _format_list(name: str, subjects: tuple[str, ...]) -> list[str]:
    """Return lines of a list in the configuration of NATS, as few as fit."""
    lines, line = [f"  {name}: ["], ""
    for number, subject in enumerate(subjects):
        text = json.dumps(subject) + ("," if number + 1 < len(subjects) else "")
        if line and len(line) + 1 + len(text) > _WIDTH - 16:
            lines.append(f"    {line}")
            line = ""
        line = f"{line} {text}" if line else text
    return [*lines, f"    {line}", "  ]"]


def format_user(login: Iterable[str], permissions: Permissions) -> list[str]:
    """Return the block of a user in the configuration of NATS; ``login`` are its first lines."""
    lines = [*login, *permissions.format_lines()]
    return ["{", *(f"  {line}" for line in lines), "}"]
