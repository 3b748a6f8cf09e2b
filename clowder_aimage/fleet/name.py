"""The names of a fleet on a NATS server: its subjects, streams, consumers and bucket.

A subject begins with the name of the fleet, so that one server has several fleets, and the
permissions of an account or a user limit it to one (deploy/nats).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from clowder_aimage.errors import FormatError

INTERACTIVE, BATCH = "interactive", "batch"
# The first is served first.
PRIORITIES = (INTERACTIVE, BATCH)
DEFAULT_FLEET = "aimage"
_MAX_WORKER = 64
# The digest of a job becomes part of names of consumers.
_ENCODED = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
# The roles of programs. The first is in the place of a worker in the subjects of the marks of
# gateways: no worker has this name.
GATEWAY, WORKER, OPERATOR = "gateway", "worker", "operator"
# The key of the key set in its bucket
KEY_SET = "keys"
# An id, a digest, or the name of a chunk
_PART = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True)
class FleetNames:
    """The names of one fleet. Raises ValueError for a name that is no part of a subject."""

    fleet: str = DEFAULT_FLEET

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.fleet) is None:
            raise ValueError("the name of a fleet has 1 to 32 letters, digits, '-' and '_'")

    @property
    def jobs(self) -> str:
        """The stream of jobs: a work queue. A finished job is removed."""
        return f"{self.fleet}-jobs"

    @property
    def logs(self) -> str:
        """The stream of the responses to jobs."""
        return f"{self.fleet}-logs"

    @property
    def marks(self) -> str:
        """The stream of the marks that begin and end the attempts at jobs."""
        return f"{self.fleet}-marks"

    @property
    def bodies(self) -> str:
        """The stream of the large bodies of jobs."""
        return f"{self.fleet}-bodies"

    @property
    def dead(self) -> str:
        """The stream of jobs that were given up."""
        return f"{self.fleet}-dead"

    @property
    def workers(self) -> str:
        """The key-value bucket of workers."""
        return f"{self.fleet}-workers"

    @property
    def keys(self) -> str:
        """The key-value bucket of the signed key set."""
        return f"{self.fleet}-keys"

    @property
    def files(self) -> str:
        """The stream of the chunks of files."""
        return f"{self.fleet}-files"

    @property
    def batches(self) -> str:
        """The key-value bucket of files and batches."""
        return f"{self.fleet}-batches"

    @property
    def api(self) -> str:
        """The beginning of the calls of JetStream in the account of a worker."""
        return f"{self.fleet}.api"

    @property
    def announcements(self) -> str:
        """The subject of announcements of new jobs."""
        return f"{self.fleet}.news"

    def _join(self, kind: str, *parts: object) -> str:
        """Return a subject; ``*`` is any part.

        Raises FormatError: a text is not a part of a subject. NATS would end the connection.
        """
        for part in map(str, parts):
            if part != "*" and _PART.fullmatch(part) is None:
                raise FormatError(f"not a part of a subject: {part[:60]!a}")
        return ".".join((self.fleet, kind, *map(str, parts)))

    def build_load_subject(self, gateway: str) -> str:
        """Return the subject of the load of a gateway, an entry of the bucket of workers."""
        return f"$KV.{self.workers}.gateway.{gateway}"

    def build_job_subject(self, priority: str, digest: str, caller: str = "*") -> str:
        """Return the subject of jobs for a manifest; ``digest`` is its hexadecimal part."""
        return self._join("job", priority, digest, caller)

    def build_log_subject(self, worker: str, job: str) -> str:
        """Return the subject of the frames of a worker for a job; ``*`` is any worker."""
        return self._join("log", worker, job)

    def build_mark_subject(self, writer: str, job: str) -> str:
        """Return the subject of the marks of a worker, or of gateways, for a job.

        ``*`` is any writer, GATEWAY all gateways.
        """
        return self._join("mark", writer, job)

    def is_mark(self, subject: str) -> bool:
        """Return True if a subject is that of a mark."""
        return subject.startswith(f"{self.fleet}.mark.")

    def build_body_subject(self, upload: str, chunk: int | str) -> str:
        """Return the subject of a chunk of a large body."""
        return self._join("body", upload, chunk)

    def build_file_subject(self, chunk: str) -> str:
        """Return the subject of a chunk of a file."""
        return self._join("file", chunk)

    def build_dead_letter_subject(self, worker: str, job: str) -> str:
        """Return the subject of the entry of a worker for a job that was given up."""
        return self._join("dead", worker, job)

    def build_cancel_subject(self, job: str) -> str:
        """Return the subject of the cancellation of a job."""
        return self._join("cancel", job)

    def build_call_subject(self, worker: str) -> str:
        """Return the subject of requests to one worker. They are not queued."""
        return self._join("call", worker)

    def build_control_subject(self, worker: str) -> str:
        """Return the subject of orders to one worker."""
        return self._join("control", worker)

    @staticmethod
    def build_answer_subject(role: str, call: str) -> str:
        """Return the subject of the answers of a worker to a gateway or an operator.

        ``call`` is random, so that no other worker knows the subject. Answers of NATS have others.
        """
        return f"_INBOX_{role}.call.{call}"

    @staticmethod
    def build_consumer_name(priority: str, digest: str) -> str:
        """Return the name of the consumer of jobs for a manifest."""
        return f"{priority}-{digest[:32]}"

    def parse_job_subject(self, subject: str) -> tuple[str, str] | None:
        """Return the priority and the digest of the subject of a job; None for another."""
        parts = subject.split(".")
        is_job = len(parts) == 5 and parts[:2] == [self.fleet, "job"] and parts[2] in PRIORITIES
        return (parts[2], parts[3]) if is_job and _ENCODED.fullmatch(parts[3]) else None


def make_worker_name(machine: str, port: str) -> str:
    """Return the id of a worker by its machine and port: at most 64 letters, digits, "-" and "_".

    Machines have different names, also those whose long names begin alike.
    """
    name = f"{re.sub('[^A-Za-z0-9_-]+', '-', machine).strip('-') or 'worker'}-{port}"
    if len(name) <= _MAX_WORKER:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _MAX_WORKER - len(port) - len(digest) - 2]}-{digest}-{port}"
