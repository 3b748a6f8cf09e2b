"""Signed messages, keys and key sets of a fleet, without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from clowder_aimage.errors import AImageError, FormatError, UsageError, VerificationError
from clowder_aimage.fleet.job.envelope import StoredBody
from clowder_aimage.fleet.key import ROOT, SIGNER, FleetKey, KeySet, SignerKey, decode_public_key
from clowder_aimage.fleet.name import GATEWAY, OPERATOR
from clowder_aimage.fleet.server_clock import ServerClock
from clowder_aimage.fleet.signature import (
    SIGNED_AT,
    SKEW,
    VALID,
    MessageSigner,
    MessageVerifier,
    SignedMessage,
)

ROOT_KEY, GATEWAY_KEY, OPERATOR_KEY, OTHER = (
    FleetKey.generate(kind) for kind in (ROOT, SIGNER, SIGNER, SIGNER)
)
KEY_SET = KeySet(
    "f",
    1,
    (
        SignerKey("g", "gateway", GATEWAY_KEY.public),
        SignerKey("o", "operator", OPERATOR_KEY.public),
    ),
)
SUBJECT, DATA = "f.call.w", b'{"a":1}'


@dataclass
class Clock:
    time: float = 1000.0

    def __call__(self) -> float:
        return self.time


def sign(key: FleetKey = GATEWAY_KEY, fleet: str = "f", time: float = 1000.0) -> SignedMessage:
    signer = MessageSigner(fleet, key, lambda: time)
    return SignedMessage(SUBJECT, signer.sign(SUBJECT, DATA, {"Aimage-Job": "j"}), DATA)


def verifier(clock: Callable[[], float] = lambda: 1000.0) -> MessageVerifier:
    made = MessageVerifier("f", clock)
    made.key_set = KEY_SET
    return made


def with_headers(message: SignedMessage, **changed: str | None) -> SignedMessage:
    headers = dict(message.headers)
    for name, text in changed.items():
        header = name.replace("_", "-")
        headers.pop(header, None)
        if text is not None:
            headers[header] = text
    return replace(message, headers=headers)


GOOD = sign()
REFUSED = {
    "no signature": (replace(GOOD, headers={}), "not signed"),
    "another subject": (replace(GOOD, subject="f.call.v"), "signature"),
    "other data": (replace(GOOD, data=b"{}"), "signature"),
    "another header": (with_headers(GOOD, Aimage_Job="k"), "signature"),
    "one header more": (with_headers(GOOD, Aimage_Body="x"), "signature"),
    "an id of the message": (with_headers(GOOD, Nats_Msg_Id="x"), "signature"),
    "one header less": (with_headers(GOOD, Aimage_Job=None), "signature"),
    "another time": (with_headers(GOOD, Aimage_Signed_At="1001.000"), "signature"),
    "no time": (with_headers(GOOD, Aimage_Signed_At=None), "signature"),
    "a time that is no number": (with_headers(GOOD, Aimage_Signed_At="x"), "signature"),
    "no nonce": (with_headers(GOOD, Aimage_Nonce=None), "signature"),
    "another nonce": (with_headers(GOOD, Aimage_Nonce="x"), "signature"),
    "another signer": (with_headers(GOOD, Aimage_Signer=OPERATOR_KEY.public), "not a gateway"),
    "no base64": (with_headers(GOOD, Aimage_Signature="!"), "signature"),
    "a short signature": (with_headers(GOOD, Aimage_Signature="AAAA"), "signature"),
    "a key of nobody": (sign(OTHER), "not a gateway"),
    "a key of an operator": (sign(OPERATOR_KEY), "not a gateway"),
    "another fleet": (sign(fleet="g"), "signature"),
    "too old": (sign(time=1000 - VALID - SKEW - 1), "91 seconds ago"),
    "from the future": (sign(time=1000 + SKEW + 1), "31 seconds from now"),
    "not a time": (sign(time=float("nan")), "signed"),
    "an endless time": (sign(time=float("inf")), "signed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_is_not_as_it_was_signed_is_refused(name: str) -> None:
    message, reason = REFUSED[name]
    with pytest.raises(VerificationError, match=reason):
        verifier().check_once(message, GATEWAY)


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_is_not_as_it_was_signed_is_refused(name: str) -> None:
    message, reason = REFUSED[name]
    with pytest.raises(VerificationError, match=reason.partition(" seconds")[0]):
        verifier().check_job(message, GATEWAY, 1000.0)


def test_a_request_is_accepted_once() -> None:
    clock = Clock()
    checked = verifier(clock)
    for time in (1000 - VALID - SKEW, 1000.0, 1000 + SKEW):
        message = sign(time=time)
        checked.check_once(message, GATEWAY)
        for later in (0.0, SKEW, VALID + SKEW, VALID + 2 * SKEW, 1e6):
            clock.time = 1000.0 + later
            with pytest.raises(VerificationError):
                checked.check_once(message, GATEWAY)
        clock.time = 1000.0
    # What is too old to be repeated is forgotten.
    clock.time = 1e7
    checked.check_once(sign(time=1e7), GATEWAY)
    assert len(checked._accepted) == 1


def test_a_job_may_be_delivered_again_and_an_order_is_that_of_an_operator() -> None:
    checked = verifier()
    assert checked.check_job(GOOD, GATEWAY, 1000.5) == checked.check_job(GOOD, GATEWAY, 1000.5)
    checked.check_once(sign(OPERATOR_KEY), OPERATOR)
    with pytest.raises(VerificationError):
        checked.check_once(GOOD, OPERATOR)


def test_without_a_key_set_nothing_is_accepted() -> None:
    with pytest.raises(VerificationError, match="key set"):
        MessageVerifier("f").check_once(GOOD, GATEWAY)


# -- keys


def test_a_key_is_read_as_it_was_written() -> None:
    for kind in ROOT, SIGNER:
        key = FleetKey.generate(kind)
        assert FleetKey.parse(f"{key.seed}\n".encode(), kind).public == key.public
        assert bytes(decode_public_key(key.public, kind))


def test_another_text_is_not_a_key() -> None:
    seed, public = GATEWAY_KEY.seed, GATEWAY_KEY.public
    flipped = seed[:-1] + ("A" if seed[-1] != "A" else "B")
    for wrong in (b"", b"S", b"\xff", ROOT_KEY.seed.encode(), public.encode(), flipped.encode()):
        with pytest.raises(UsageError, match="seed"):
            FleetKey.parse(wrong, SIGNER)
    for text in ("", "U", ROOT_KEY.public, seed, public.lower(), public + "A", "é" * 56):
        with pytest.raises(FormatError, match="public key"):
            decode_public_key(text, SIGNER)


def test_a_key_set_is_read_as_it_was_signed() -> None:
    assert KeySet.decode(KEY_SET.encode(ROOT_KEY), ROOT_KEY.public, "f") == KEY_SET


def test_a_key_set_that_the_root_did_not_sign_is_refused() -> None:
    raw = KEY_SET.encode(ROOT_KEY)
    envelope = json.loads(raw)
    other = FleetKey.generate(ROOT)
    wrong = [
        KEY_SET.encode(other),
        replace(KEY_SET, fleet="g").encode(ROOT_KEY),
        replace(KEY_SET, version=0).encode(ROOT_KEY),
        json.dumps(envelope | {"signature": "AAAA"}).encode(),
        json.dumps(envelope | {"signature": "!"}).encode(),
        json.dumps(envelope | {"keySet": envelope["keySet"].replace("way", "xxx")}).encode(),
        b"{}",
        b"[]",
        b"",
        b"x" * (1 << 20),
        json.dumps(envelope | {"keySet": "\ud800"}).encode(),
    ]
    for text in wrong:
        with pytest.raises(AImageError):
            KeySet.decode(text, ROOT_KEY.public, "f")


def test_a_description_of_a_body_is_valid_or_refused() -> None:
    body = StoredBody.of(b"x" * 600_000, "0" * 32)
    assert StoredBody.parse(body.encode()) == body and body.chunks == 3
    digest, upload = "0" * 64, "0" * 32
    sizes = (f"{digest} {size} {upload}" for size in ("-1", "9999999999", "1_0", ""))
    for wrong in ("", digest, f"{digest} 1 x", *sizes):
        with pytest.raises(FormatError):
            StoredBody.parse(wrong)


# -- the clock


@pytest.mark.parametrize(
    ("stored", "now"),
    [(1000.0, 1000.0), (990.0, 1000.0), (986.0, 1000.0), (1003.0, 1000.0)],
)
def test_a_clock_that_may_be_right_is_right(stored: float, now: float) -> None:
    clock = ServerClock(lambda: now)
    clock.observe(stored)
    assert clock.now() == now


def test_a_clock_that_is_wrong_is_corrected(caplog: pytest.LogCaptureFixture) -> None:
    for offset in (3600.0, -3600.0):
        caplog.clear()
        clock = ServerClock(lambda: 1e6)
        for age in (0.0, 7.0, 14.0):
            clock.observe(1e6 + offset - age)
            assert abs(clock.now() - (1e6 + offset)) <= 15
        assert len(caplog.records) == 1


def test_the_time_of_a_signature_is_a_number() -> None:
    assert float(GOOD.headers[SIGNED_AT]) == 1000.0
