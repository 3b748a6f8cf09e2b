"""The streams and the bucket of a fleet: their creation, and the check of their configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from clowder_aimage.fleet.name import FleetNames
from clowder_aimage.fleet.signature import SKEW, VALID

# Seconds after its last report that a worker counts as gone.
STATUS_TTL = 15.0
# Seconds in which a frame that is published twice is one frame.
REPEATED = 120.0
# Seconds that marks are kept at least: as long as a signed job could be stored again.
MIN_KEEP = VALID + 2 * SKEW
# Bytes of the stream of marks at least.
MIN_MARKS = 16 << 20
_HOUR, _DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class FleetShape:
    """The choices of an operator: copies of each message, bytes, seconds that results are kept."""

    replicas: int = 1
    keep: float = 3600.0
    max_bytes: int = 8 << 30
    keep_jobs: float = _DAY
    keep_dead: float = 7 * _DAY
    # Somewhat longer than their records.
    keep_files: float = 32 * _DAY

    def build_streams(self, names: FleetNames) -> list[api.StreamConfig]:
        """Return the configurations of the streams.

        A full stream refuses messages (``discard``): nothing is lost silently.
        """

        def stream(
            name: str,
            *subjects: str,
            retention: api.RetentionPolicy = api.RetentionPolicy.LIMITS,
            **options: Any,
        ) -> api.StreamConfig:
            return api.StreamConfig(
                name=name,
                subjects=list(subjects),
                storage=api.StorageType.FILE,
                retention=retention,
                discard=api.DiscardPolicy.NEW,
                num_replicas=self.replicas,
                **options,
            )

        fleet = names.fleet
        jobs = stream(
            names.jobs,
            f"{fleet}.job.>",
            retention=api.RetentionPolicy.WORK_QUEUE,
            max_bytes=self.max_bytes // 4,
            max_age=self.keep_jobs,
            # Jobs with an idempotency key are repeated within this time.
            duplicate_window=min(_HOUR, self.keep),
        )
        logs = stream(
            names.logs,
            f"{fleet}.log.*.*",
            max_bytes=self.max_bytes,
            max_age=self.keep,
            duplicate_window=min(REPEATED, self.keep),
        )
        # Apart from responses and bodies, which may fill their streams: a job can always end.
        marks = stream(
            names.marks,
            f"{fleet}.mark.*.*",
            max_bytes=max(self.max_bytes // 16, MIN_MARKS),
            max_age=self.keep,
            duplicate_window=min(REPEATED, self.keep),
            allow_direct=True,
        )
        bodies = stream(
            names.bodies,
            f"{fleet}.body.*.*",
            max_bytes=self.max_bytes // 4,
            max_age=self.keep_jobs,
            allow_direct=True,
        )
        dead = stream(
            names.dead,
            f"{fleet}.dead.*.*",
            max_bytes=64 << 20,
            max_age=self.keep_dead,
        )
        files = stream(
            names.files,
            f"{fleet}.file.*",
            max_bytes=self.max_bytes // 4,
            max_age=self.keep_files,
        )
        return [jobs, bodies, logs, marks, dead, files]

    async def make(self, js: JetStreamContext, names: FleetNames) -> list[str]:
        """Make or change the streams; return the names of those that were made."""
        created = []
        for config in self.build_streams(names):
            assert config.name is not None  # noqa: S101
            try:
                await js.stream_info(config.name)
            except NotFoundError:
                await js.add_stream(config)
                created.append(config.name)
            else:
                await js.update_stream(config)
        buckets = (names.workers, STATUS_TTL), (names.keys, None), (names.batches, None)
        for bucket, ttl in buckets:
            try:
                await js.key_value(bucket)
            except NotFoundError:
                await js.create_key_value(
                    bucket=bucket,
                    history=1,
                    ttl=ttl,
                    storage=api.StorageType.FILE,
                    replicas=self.replicas,
                    # Workers may read no other way.
                    direct=True,
                )
                created.append(bucket)
            else:
                config = (await js.stream_info(f"KV_{bucket}")).config
                expected = config.evolve(num_replicas=self.replicas, allow_direct=True)
                if config != expected:
                    await js.update_stream(expected)
        return created


def describe_differences(names: FleetNames, config: api.StreamConfig) -> str:
    """Return the faults of a stream of a fleet as a text, empty if there are none."""
    expected = {stream.name: stream for stream in FleetShape().build_streams(names)}.get(
        config.name
    )
    if config.allow_direct is False and config.name in (names.marks, names.bodies):
        return "it cannot be read directly"
    if expected is None:  # a bucket
        is_wrong = config.name == f"KV_{names.workers}" and not config.max_age
        return "entries do not expire" if is_wrong else ""
    faults = []
    if set(config.subjects or ()) != set(expected.subjects or ()):
        faults.append(f"its subjects are {', '.join(config.subjects or ())}")
    if config.retention != expected.retention:
        faults.append(f"its retention is {config.retention}")
    if config.discard != expected.discard:
        faults.append("it drops old messages when it is full")
    return "; ".join(faults)
