"""The connection of a gateway or a worker to a fleet on a NATS server.

It is opened in the background and reopened when it is lost. The client of NATS ends for good at an
error of the protocol; it is replaced then, and listens to the same subjects. ``check`` raises the
reason while there is no connection, or the streams of the fleet are missing or wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]
import tenacity
from nacl.signing import VerifyKey
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    UnauthorizedError,
    UsageError,
    VerificationError,
)
from clowder_aimage.fleet.connection_report import ConnectionReport, describe_network_error
from clowder_aimage.fleet.frame import Frame
from clowder_aimage.fleet.key import FleetKey, KeySet
from clowder_aimage.fleet.name import GATEWAY, KEY_SET, OPERATOR, WORKER, FleetNames
from clowder_aimage.fleet.server_clock import ServerClock
from clowder_aimage.fleet.signature import MessageSigner, MessageVerifier
from clowder_aimage.fleet.stream import FleetShape, describe_differences
from clowder_aimage.fleet.ticket import Admission, JobTicket
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.background import end_tasks
from clowder_aimage.oci import read_json

# The first version of the server with direct reads of streams.
MIN_VERSION = (2, 9)
# The first version whose count of used space is right after a purge of one subject. An older one
# stops to store anything once that count has reached max_file_store.
PURGE_VERSION = (2, 9, 15)
# Bytes of a message that the server must accept; its default.
MIN_PAYLOAD = 1 << 20
# Seconds between two checks that the streams exist.
CHECK = 5.0
# Seconds in which a server accepts a connection.
CONNECT = 2
# Seconds between two looks at the state of the connection.
_LOOK = 0.25
# Seconds between two attempts, and in Retry-After.
LATER = 2
# Seconds between two attempts of a call.
PAUSE = 0.2
# Seconds before a client that was closed is replaced, at first and at most.
_REPLACED, _MAX_REPLACED = 0.25, 10.0
# Seconds that a publication may take, over all attempts.
PATIENCE = 30.0
# The header by which a stream recognises a repetition.
MESSAGE_ID = "Nats-Msg-Id"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
# The disk of JetStream, or of an account, has no room for a stream.
_SMALL = (10023, 10047)
# The API of JetStream in an account that has it
_API = "$JS.API"
# Error codes of JetStream.
FULL = (10077, 10122)
_WRONG_LAST, _NO_LEADER, _FEW_SERVERS = 10071, 10008, 10005
# A cluster that elects a leader.
_UNSETTLED = (10004, _FEW_SERVERS, _NO_LEADER, 10009)
_log = logging.getLogger("aimage.fleet")
LOST = (NatsError, TimeoutError, OSError)
# Reasons that waiting does not remove.
_LASTING = (UsageError, UnauthorizedError, VerificationError)


@dataclass(frozen=True, slots=True)
class FleetAccess:
    """The servers of a fleet, and the credentials of this program.

    ``creds`` is a file of NATS credentials (a JWT and a seed), ``nkey`` one with a seed alone.
    ``ca_file`` has the certificates that are trusted, ``certificate`` and its key those of this
    program.

    ``root`` is the public root key of the fleet, ``signer`` the key by which this program signs.
    """

    servers: tuple[str, ...]
    names: FleetNames = field(default_factory=FleetNames)
    root: str = ""
    signer: FleetKey | None = None
    creds: Path | None = None
    nkey: Path | None = None
    ca_file: Path | None = None
    certificate: tuple[Path, Path] | None = None

    def build_options(self) -> dict[str, Any]:
        """Return the options of the client. Raises UsageError."""
        arguments: dict[str, Any] = {"servers": list(self.servers)}
        for path in filter(None, (self.creds, self.nkey, self.ca_file)):
            if not path.is_file():
                raise UsageError(f"file not found: {path}")
        if self.creds is not None:
            _check_creds(self.creds)
            arguments["user_credentials"] = str(self.creds)
        if self.nkey is not None:
            _check_seed(self.nkey)
            arguments["nkeys_seed"] = str(self.nkey)
        if self.ca_file is not None or self.certificate is not None:
            try:
                context = ssl.create_default_context(cafile=self.ca_file)
                if self.certificate is not None:
                    context.load_cert_chain(*self.certificate)
            except (OSError, ssl.SSLError) as error:
                raise UsageError(f"cannot use the certificates for NATS: {error}") from None
            arguments["tls"] = context
        return arguments


def _check_seed(path: Path) -> None:
    """Raise UsageError unless a file has the seed of a user's nkey."""
    try:
        nkeys.from_seed(bytearray(path.read_bytes().strip()))
    except (OSError, ValueError, TypeError, nkeys.NkeysError):
        raise UsageError(f"{path} is not a file with the seed of an nkey (SU...)") from None


def _check_creds(path: Path) -> None:
    """Raise UsageError unless a file has credentials of NATS."""
    try:
        text = path.read_text("ascii")
    except (OSError, ValueError):
        text = ""
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise UsageError(f"{path} is not a file of NATS credentials") from None


# The part of a stream that new jobs leave to those that are there.
RESERVE = 10


class NotFirstError(AImageError):
    """A subject has a message already."""


class FullStoreError(AImageError):
    """A stream of the fleet has no more room."""


def build_unavailable_error(message: str, **advice: Any) -> ApiError:
    """Return the response while the fleet cannot be used."""
    headers = {"Retry-After": str(LATER)}
    return ApiError(503, message, code="fleet_unavailable", headers=headers, **advice)


@dataclass(eq=False, slots=True)
class _Listener:
    """A callback for the messages of a subject, and its subscription of the current client."""

    subject: str
    callback: Callable[[Msg], Awaitable[None]]
    subscription: Subscription | None = None


class FleetLink:
    """The connection to one fleet.

    ``kind`` is GATEWAY, WORKER or OPERATOR: each has separate subjects for replies, so that
    permissions can tell them apart. ``name`` is that of a worker. ``on_ready`` are called each
    time the fleet becomes usable. ``verifier`` has the key set of the fleet, as it is now.
    """

    def __init__(self, access: FleetAccess, kind: str, name: str = "") -> None:
        self.names, self._access = access.names, access
        self._kind, self._name = kind, f"aimage-{kind}-{name}"
        self._inbox = f"_INBOX_{kind}"
        self._clock = ServerClock()
        self.verifier = MessageVerifier(self.names.fleet, self._clock.now)
        self._signer: MessageSigner | None = None
        if access.signer is not None:
            self._signer = MessageSigner(self.names.fleet, access.signer, self._clock.now)
        self._options = access.build_options()
        self._client = Client()
        # The subjects of the API of JetStream begin with it.
        self.api = _API
        self._js = JetStreamContext(self._client)
        self._reason: AImageError | None = None
        # An attempt failed, or has lasted for long.
        self._has_failed = False
        self._ready = asyncio.Event()
        # The bytes that streams may still take before their reserve.
        self._space: dict[str, int] = {}
        # When the streams are looked at again.
        self._due = 0.0
        self.on_ready: list[Callable[[], object]] = []
        self._listeners: list[_Listener] = []

    # -- the connection

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Connect in the background, also to a server that is not there yet; close at the end."""
        self._reason = self._build_network_error()
        tasks = asyncio.create_task(self._connect()), asyncio.create_task(self._report())
        try:
            yield
        finally:
            await end_tasks(*tasks)
            self._ready.clear()
            with contextlib.suppress(*LOST):
                await self._client.close()

    @property
    def clock_offset(self) -> float:
        """The seconds by which the server's clock is ahead; 0 if this machine's may be right."""
        return self._clock.offset

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait until the fleet can be used. Raises the reason if it cannot in time."""
        end = asyncio.get_running_loop().time() + timeout
        while not self._ready.is_set():
            is_late = asyncio.get_running_loop().time() >= end
            if self._reason is not None and (is_late or isinstance(self._reason, _LASTING)):
                raise self._reason
            await asyncio.sleep(0.02)

    async def wait_until_connected(self, timeout: float) -> None:
        """Wait until the server has accepted this program. Raises NetworkError, UsageError."""
        try:
            async with asyncio.timeout(timeout):
                while not self._client.is_connected:
                    if isinstance(self._reason, _LASTING):
                        raise self._reason
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise self._reason or self._build_network_error() from None

    async def make(self, shape: FleetShape, timeout: float) -> list[str]:
        """Make or change the streams; return the names of those that were made.

        Raises NetworkError, UsageError.
        """
        end = asyncio.get_running_loop().time() + timeout
        await self.wait_until_connected(timeout)
        self._check_server()
        left = end - asyncio.get_running_loop().time()
        retryer = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_is_early),
            wait=tenacity.wait_fixed(PAUSE),
            stop=tenacity.stop_after_delay(left),
            reraise=True,
        )
        try:
            return await retryer(shape.make, self._js, self.names)
        except (APIError, TimeoutError) as error:
            raise self._convert_stream_error(error) from None

    def _convert_stream_error(self, error: APIError | TimeoutError) -> AImageError:
        if not isinstance(error, APIError) or error.err_code == _NO_LEADER:
            return NetworkError(f"NATS at {self._addresses} is not ready")
        if isinstance(error, ServiceUnavailableError):
            message = f"NATS at {self._addresses} has no JetStream"
            return UsageError(message, hint="enable it in the configuration of the server")
        hint = "choose a smaller size, or raise max_file_store of the server"
        message = f"NATS refuses the streams: {error.description}"
        return UsageError(message, hint=hint if error.err_code in _SMALL else None)

    @property
    def _addresses(self) -> str:
        return ", ".join(
            server.rpartition("@")[2].removeprefix("nats://") for server in self._access.servers
        )

    @property
    def url(self) -> str:
        """The URLs of the servers, without credentials."""
        parts = (server.partition("://") for server in self._access.servers)
        return ",".join(f"{scheme}://{rest.rpartition('@')[2]}" for scheme, _, rest in parts)

    def _build_network_error(self, reason: str = "") -> NetworkError:
        text = f"the NATS server at {self._addresses} does not answer"
        return NetworkError(f"{text}: {reason}" if reason else text, remedy="nats_server")

    async def _report(self) -> None:
        """Log that the fleet cannot be used, and that it can again, for ever."""
        clock = asyncio.get_running_loop().time
        report = ConnectionReport(self.url, self.names.fleet, clock)
        begun, was_ready = clock(), False
        while True:
            if self.is_ready != was_ready and self.is_ready:
                report.observe(None)
            elif not self.is_ready and (self._has_failed or clock() - begun > CONNECT):
                report.observe(self._reason or self._build_network_error())
            was_ready = self.is_ready
            await asyncio.sleep(_LOOK)

    @property
    def is_ready(self) -> bool:
        """Return True if the fleet can be used."""
        return self._ready.is_set() and self._client.is_connected

    def check(self) -> None:
        """Raise ApiError (503) with the reason if the fleet cannot be used."""
        if self.is_ready:
            return
        reason = self._reason
        if reason is None or isinstance(reason, NetworkError):
            raise build_unavailable_error("the gateway has no connection to NATS; try again later")
        raise build_unavailable_error(
            reason.message, remedy=reason.remedy, hint=reason.hint, **reason.facts
        )

    def list_reasons(self) -> list[dict[str, str]]:
        """Return the reason why the fleet cannot be used, if there is one."""
        if self.is_ready:
            return []
        reason = self._reason or self._build_network_error()
        text = "no connection to NATS" if isinstance(reason, NetworkError) else "fleet not usable"
        return [{"reason": text, "detail": reason.message}]

    def check_lasting(self) -> None:
        """Raise ApiError (503) if the fleet cannot be used until its configuration changes."""
        if isinstance(self._reason, _LASTING):
            self.check()

    def is_almost_full(self, stream: str) -> bool:
        """Return True if a stream has only its reserve of space."""
        return self._space.get(stream, 1) <= 0

    def check_space(self) -> None:
        """Raise ApiError (503) while a stream of jobs and their responses has only its reserve."""
        for name in sorted(self._space.keys() - {self.names.files, self.names.dead}):
            self._check_space(name, 1)

    @contextlib.contextmanager
    def hold_space(self, size: int) -> Iterator[None]:
        """Count the bytes of a job's body, which the end of the job removes.

        Raises ApiError (503) if there are too few before the reserve of a stream that it needs.
        """
        bodies = self.names.bodies
        for name in sorted(self._space.keys() - {bodies, self.names.files, self.names.dead}):
            self._check_space(name, 1)
        if size and bodies in self._space:
            self._check_space(bodies, size)
        self._add_space(-size)
        try:
            yield
        finally:
            self._add_space(size)

    def _add_space(self, size: int) -> None:
        if self.names.bodies in self._space:
            self._space[self.names.bodies] += size

    def _check_space(self, stream: str, size: int) -> None:
        if self._space[stream] < size:
            message = f"the stream {stream} of the fleet is almost full; try again later"
            raise build_unavailable_error(message)

    async def _connect(self) -> None:
        """Keep the connection; replace a client that was closed, ever later if it ends soon."""
        clock, pause = asyncio.get_running_loop().time, _REPLACED
        while True:
            await self._open_client()
            begun = clock()
            while not self._client.is_closed:
                if self._client.is_connected and clock() >= self._due:
                    await self._verify()
                await asyncio.sleep(0.25 if self._reason is None else LATER / 4)
            await self._on_disconnected()
            pause = _REPLACED if clock() - begun > _MAX_REPLACED else min(2 * pause, _MAX_REPLACED)
            await asyncio.sleep(pause)
            self._client = Client()
            self._use_api(_API)

    async def _open_client(self) -> None:
        await self._client.connect(
            **self._options,
            name=self._name,
            # Permissions of the server tell the kinds apart by their inboxes.
            inbox_prefix=self._inbox,
            # For ever: workers and gateways outlive a server.
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]
            connect_timeout=CONNECT,
            ping_interval=5,
            max_outstanding_pings=2,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
        )
        # It may be closed meanwhile.
        with contextlib.suppress(*LOST):
            for listener in [*self._listeners]:
                await self._subscribe(listener)

    async def _verify(self) -> None:
        try:
            self._check_server()
            await self._find_api()
            self._space = await check_streams(self._js, self.names, is_worker=self._kind == WORKER)
            await self._read_clock()
            self._take_key_set(await self._read_key_set())
        except AImageError as error:
            self._reason, self._has_failed = error, True
            self._ready.clear()
            return
        except LOST as error:
            if not self._ready.is_set():
                self._reason = self._build_network_error(describe_network_error(error))
            return
        self._reason, self._due = None, asyncio.get_running_loop().time() + CHECK
        if self._ready.is_set():
            return
        self._has_failed = False
        self._ready.set()
        for callback in self.on_ready:
            callback()

    async def _find_api(self) -> None:
        """Use the API of JetStream by the name that it has in the account of this program.

        A worker has an account of its own without JetStream, which imports calls of the fleet's.
        """
        if self._kind != WORKER or self.api != _API:
            return
        try:
            await self._js.stream_info(self.names.jobs)
        except ServiceUnavailableError:
            self._use_api(self.names.api)
        except APIError:
            # The check of the streams says more.
            return

    def _use_api(self, prefix: str) -> None:
        self.api, self._js = prefix, JetStreamContext(self._client, prefix=prefix)

    async def _read_clock(self) -> None:
        """Compare the clock of this machine with the server's. Raises APIError, TimeoutError."""
        subject = f"{self.api}.STREAM.INFO.KV_{self.names.workers}"
        message = await self._client.request(subject, timeout=2.0)
        state = read_json(message.data, "the state of a stream").get("state") or {}
        # Reports of workers expire: there is none that is older.
        if state.get("messages"):
            self._clock.observe(_parse_time(state["last_ts"]))

    async def _read_key_set(self) -> bytes:
        """Return the key set of the fleet. Raises UsageError, APIError, TimeoutError."""
        bucket = self.names.keys
        subject = f"$KV.{bucket}.{KEY_SET}"
        try:
            message = await self._js.get_msg(f"KV_{bucket}", subject=subject, direct=True)
        except NotFoundError:
            text = f"the fleet {self.names.fleet!r} has no key set"
            raise UsageError(text, remedy="fleet_init", fleet=self.names.fleet) from None
        return message.data or b""

    def _take_key_set(self, raw: bytes) -> None:
        """Use a key set. Raises ContentError: it is not usable, or lacks the key of this program.

        An older one is not used: a removed key stays removed. One that is not usable does not
        replace another, as any program of a fleet may be able to make the server store it.
        """
        root, signer = self._access.root, self._access.signer
        if not root and self._kind == OPERATOR:
            # It may still read the status of the fleet.
            return
        try:
            self.verifier.key_set = self._decode_key_set(raw, root)
        except (FormatError, VerificationError) as error:
            if self.verifier.key_set is None:
                raise
            _log.error("the key set of the fleet was refused", extra={"reason": error.message})
        key_set = self.verifier.key_set
        if signer is not None and key_set.find(signer.public, self._kind) is None:
            message = f"the key set of the fleet does not have the key of this {self._kind}"
            facts = {"role": self._kind, "public": signer.public}
            raise UsageError(message, remedy="add_signing_key", **facts)

    def _decode_key_set(self, raw: bytes, root: str) -> KeySet:
        """Return a key set. Raises FormatError, VerificationError: also one that is older."""
        key_set, current = KeySet.decode(raw, root, self.names.fleet), self.verifier.key_set
        if current is not None and key_set.version < current.version:
            message = f"the key set of the fleet has version {key_set.version}"
            raise VerificationError(f"{message}, which is older than {current.version}")
        return key_set

    def _check_server(self) -> None:
        """Raise UsageError if the server is too old, or accepts only short messages."""
        version, max_payload = self._client.connected_server_version, self._client.max_payload
        if (version.major, version.minor) < MIN_VERSION:
            needed = ".".join(map(str, MIN_VERSION))
            raise UsageError(f"the NATS server has version {version}; {needed} is needed")
        if max_payload < MIN_PAYLOAD:
            message = (
                f"the NATS server accepts messages of {max_payload} bytes; set max_payload in its "
            )
            raise UsageError(f"{message}configuration to {MIN_PAYLOAD} or more")

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if "authorization" in text.lower() or "authentication" in text.lower():
            self._reason = UnauthorizedError(f"NATS at {self._addresses} refuses the credentials")
        elif isinstance(self._reason, NetworkError):
            self._reason = self._build_network_error(describe_network_error(error))
        self._has_failed = self._has_failed or not self.is_ready
        _log.debug("NATS", extra={"reason": text})

    async def _on_disconnected(self) -> None:
        self._has_failed = self._has_failed or self._ready.is_set()
        self._ready.clear()
        self._reason, self._due = self._build_network_error(), 0.0
        # The server may have another configuration when it is back.
        self._use_api(_API)

    # -- messages

    def listen(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> None:
        """Call ``callback`` with the messages of a subject, once connected. Call it before."""
        self._listeners.append(_Listener(subject, callback))

    @contextlib.asynccontextmanager
    async def listening(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Call ``callback`` with the messages of a subject from now on.

        Raises NatsError if there is no connection.
        """
        listener = _Listener(subject, callback)
        self._listeners.append(listener)
        try:
            await self._subscribe(listener)
            yield
        finally:
            self._listeners.remove(listener)
            await _unsubscribe(listener)

    async def _subscribe(self, listener: _Listener) -> None:
        listener.subscription = await self._client.subscribe(listener.subject, cb=listener.callback)
        # It was not awaited to the end.
        if listener not in self._listeners:
            await _unsubscribe(listener)

    def build_answer_subject(self) -> str:
        """Return a new subject for the answers of one worker."""
        return self.names.build_answer_subject(self._kind, secrets.token_hex(16))

    @property
    def client(self) -> Client:
        """The client of NATS."""
        return self._client

    @property
    def streams(self) -> JetStreamContext:
        """The client of JetStream."""
        return self._js

    def now(self) -> float:
        """Return the time of the NATS server in seconds of the epoch."""
        return self._clock.now()

    def sign(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the headers of a message with the signature of this program."""
        assert self._signer is not None  # noqa: S101 - workers do not sign
        return self._signer.sign(subject, data, headers or {})

    def list_gateways(self) -> list[VerifyKey]:
        """Return the keys of the gateways of the fleet."""
        key_set = self.verifier.key_set
        return key_set.list_keys(GATEWAY) if key_set is not None else []

    def open_ticket(self, job: str, admission: Admission) -> JobTicket | None:
        """Return the ticket in an admission; None if it is not for the key of this program."""
        signer = self._access.signer
        return admission.open(job, signer) if signer is not None else None

    async def publish(
        self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        """Publish a message that may be lost."""
        with contextlib.suppress(*LOST):
            await self._client.publish(subject, data, headers=headers)

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        patience: float = PATIENCE,
        is_first: bool = False,
    ) -> int:
        """Publish a message into its stream, and return its number there.

        It is published again until the server has acknowledged it: the stream recognises a
        repetition by the id in ``headers``.

        Raises:
            NotFirstError: The message should be the first of its subject, and is not. It may be
                that one: it may be stored though its acknowledgement was lost.
            FullStoreError: The stream has no room.
            NetworkError: The server did not acknowledge it in ``patience`` seconds.
            ApiError: The fleet cannot be used until its configuration changes.
        """
        expected = {_EXPECTED: "0"} if is_first else {}
        retryer = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(LOST),
            wait=tenacity.wait_fixed(PAUSE),
            stop=tenacity.stop_after_delay(patience),
            reraise=True,
        )
        try:
            return await retryer(self._publish, subject, data, {**(headers or {}), **expected})
        except LOST as error:
            reason = str(error) or "no answer"
            raise NetworkError(f"NATS did not store a message: {reason}") from None

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        try:
            acknowledgement = await self._js.publish(subject, data, timeout=2.0, headers=headers)
        except APIError as error:
            raise _convert_error(error) from None
        except LOST:
            # The stream may be missing.
            self._due = 0.0
            self.check_lasting()
            raise
        return acknowledgement.seq

    async def store_later(self, subject: str, frame: Frame) -> asyncio.Future[api.PubAck]:
        """Publish a frame without waiting; the future is the acknowledgement."""
        try:
            return await self._js.publish_async(subject, frame.data, headers=frame.headers)
        except LOST as error:
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def remove(self, stream: str, subject: str) -> None:
        """Remove the messages of a subject from a stream. Raises NatsError, TimeoutError."""
        version = self._client.connected_server_version
        if (version.major, version.minor, version.patch) >= PURGE_VERSION:
            await self._js.purge_stream(stream, subject=subject)
            return
        async for number, _ in self.read_messages(subject, 0, stream):
            # Another gateway may have removed it.
            with contextlib.suppress(APIError):
                await self._js.delete_msg(stream, number)

    async def read_marks(self, job: str, after: int = 0) -> list[tuple[int, Frame]]:
        """Return the marks of a job after a number of the stream, with their numbers.

        Raises NatsError, TimeoutError, FormatError.
        """
        subject = self.names.build_mark_subject("*", job)
        marks = []
        async for number, message in self.read_messages(subject, after, self.names.marks):
            # What cannot be read does not count.
            with contextlib.suppress(FormatError):
                frame = Frame.parse(message.subject, message.headers, message.data)
                marks.append((number, frame))
        return marks

    async def read_messages(
        self, subject: str, after: int, stream: str = ""
    ) -> AsyncIterator[tuple[int, Msg | Any]]:
        """Yield the messages of a subject after a number of the stream, with their numbers.

        Raises NatsError, TimeoutError.
        """
        while True:
            try:
                message = await self._js.get_msg(
                    stream or self.names.logs,
                    seq=after + 1,
                    subject=subject,
                    next=True,
                    # The form that the permissions of workers allow.
                    direct=self._kind == WORKER,
                )
            except NotFoundError:
                return
            after = message.seq or after + 1
            yield after, message


async def _unsubscribe(listener: _Listener) -> None:
    if listener.subscription is not None:
        with contextlib.suppress(*LOST):
            await listener.subscription.unsubscribe()


def _is_early(error: BaseException) -> bool:
    """Return True if a cluster that has just been started has no leader, or too few servers."""
    is_electing = isinstance(error, APIError) and error.err_code in (_NO_LEADER, _FEW_SERVERS)
    return is_electing or isinstance(error, TimeoutError)


def _convert_error(error: APIError) -> AImageError:
    if error.err_code == _WRONG_LAST:
        return NotFirstError("the subject has a message already")
    if error.err_code in FULL:
        return FullStoreError("the fleet's store on NATS is full")
    return NetworkError(f"NATS refused a message: {error.description or error}")


def _parse_time(text: str) -> float:
    """Return the seconds of a time of NATS, which has nanoseconds."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}+00:00").timestamp() + float(f"0.{fraction or 0}")


async def check_streams(
    js: JetStreamContext, names: FleetNames, *, is_worker: bool = False
) -> dict[str, int]:
    """Return the bytes that each stream of a fleet may still take before its reserve.

    A worker may not ask for those that only gateways use. Raises UsageError unless they exist and
    are configured correctly.
    """
    space = {}
    advice = {"remedy": "fleet_init", "fleet": names.fleet}
    buckets = f"KV_{names.workers}", f"KV_{names.keys}"
    others = () if is_worker else (names.bodies, names.files, f"KV_{names.batches}")
    for name in (names.jobs, names.logs, names.marks, names.dead, *buckets, *others):
        try:
            stream = await js.stream_info(name)
        except NotFoundError:
            message = f"the NATS server has no fleet {names.fleet!r}: no stream {name}"
            raise UsageError(message, **advice) from None
        except APIError as error:
            if error.err_code in _UNSETTLED:
                raise TimeoutError from None
            message = f"the NATS server refuses access to the stream {name}: {error.description}"
            raise UsageError(message) from None
        wrong = describe_differences(names, stream.config)
        if wrong:
            raise UsageError(f"the stream {name} is configured otherwise: {wrong}", **advice)
        limit = stream.config.max_bytes or 0
        if limit > 0:
            space[name] = limit - limit // RESERVE - stream.state.bytes
    return space
