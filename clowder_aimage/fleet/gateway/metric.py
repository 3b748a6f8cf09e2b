"""The metrics of a gateway (Prometheus, "Metric naming")."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram, generate_latest

from clowder_aimage.engine.metric import new_registry
from clowder_aimage.errors import AImageError
from clowder_aimage.fleet.name import PRIORITIES
from clowder_aimage.http.api_error import ApiError, convert_error

# Outcomes of jobs. "refused" by the worker: the request is invalid; "unavailable": try again later.
DONE, REFUSED, FAILED, CANCELLED = "done", "refused", "failed", "cancelled"
GIVEN_UP, EXPIRED, UNAVAILABLE = "given_up", "expired", "unavailable"
OUTCOMES = (DONE, REFUSED, FAILED, CANCELLED, GIVEN_UP, EXPIRED, UNAVAILABLE)
# Kinds of messages of workers.
REJECTED = STATUS, RESPONSE, ANSWER = "status", "response", "answer"
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """The metrics of one gateway, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        name = "aimage_fleet"
        self.requests = Counter(
            "aimage_http_requests", "HTTP requests.", ["route", "code"], registry=registry
        )
        text = "Time from the arrival of a job to its response, by outcome."
        self.jobs = Histogram(
            f"{name}_job_duration_seconds",
            text,
            ["priority", "outcome"],
            buckets=_LONG,
            registry=registry,
        )
        # A counter that starts at 1 shows no increase.
        for priority in PRIORITIES:
            for outcome in OUTCOMES:
                self.jobs.labels(priority, outcome)
        self.deliveries = Counter(
            f"{name}_deliveries", "Attempts of workers to serve a job.", registry=registry
        )
        self.retries = Counter(
            f"{name}_retries", "Attempts after the first one of a job.", registry=registry
        )
        self.waiting = Gauge(
            f"{name}_waiting", "Jobs that wait in this gateway.", registry=registry
        )
        self.workers = Gauge(f"{name}_workers", "Workers that take jobs.", registry=registry)
        self.rejected = Counter(
            f"{name}_rejected",
            "Messages of workers that are not valid, by kind.",
            ["kind"],
            registry=registry,
        )
        for kind in REJECTED:
            self.rejected.labels(kind)
        self.connected = Gauge(
            f"{name}_connected", "Whether the fleet on NATS can be used.", registry=registry
        )
        self.depth = Gauge(f"{name}_queue_depth", "Jobs on the queue.", registry=registry)
        self.running = Gauge(
            f"{name}_running", "Jobs on the queue that a worker serves.", registry=registry
        )
        self.age = Gauge(
            f"{name}_queue_age_seconds",
            "Age of the oldest job of this gateway that no worker has begun.",
            ["priority"],
            registry=registry,
        )
        self.dead = Gauge(f"{name}_given_up", "Jobs that were given up.", registry=registry)

    def format_text(self) -> bytes:
        """Format all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    @contextlib.contextmanager
    def observe_job(self, priority: str) -> Iterator[list[int]]:
        """Observe a job: its outcome is that of the status in the list, or of an error.

        Without either its client has disconnected.
        """
        start, statuses, code = time.monotonic(), list[int](), None
        try:
            yield statuses
        except AImageError as error:
            response_error: ApiError = convert_error(error)
            statuses, code = [response_error.status], response_error.code
            raise
        finally:
            outcome = classify_outcome(statuses[-1], code) if statuses else CANCELLED
            self.jobs.labels(priority, outcome).observe(time.monotonic() - start)


def classify_outcome(status: int, code: str | None) -> str:
    """Return the outcome of a job by the status and the code of its response."""
    if code == "job_given_up":
        return GIVEN_UP
    if status < 400:
        return DONE
    if status < 500:
        return REFUSED
    return {503: UNAVAILABLE, 504: EXPIRED}.get(status, FAILED)
