"""Time stamps of signatures (RFC 3161): an authority states that a signature existed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from clowder_aimage.errors import needs
from clowder_aimage.trust.command import Command

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

# Bytes of a stamp
_MAX_STAMP = 64 * 1024
# Stamps of a signature
MAX_STAMPS = 16


def find_stamped_time(
    stamps: Sequence[bytes], signature: bytes, roots: Sequence[bytes]
) -> datetime | None:
    """Return the earliest time at which an expected authority has stamped a signature.

    ``stamps`` are responses of authorities in DER, and ``roots`` the expected root certificates.
    The certificates of an authority must be valid at the time that it states. None if no stamp is
    by an expected authority, and of this signature.
    """
    if not (stamps and roots):
        return None
    with needs("a time stamp", "trust"):
        from cryptography.x509 import load_der_x509_certificate
    certificates = list(map(load_der_x509_certificate, roots))
    times = [_verify(stamp, signature, certificates) for stamp in stamps]
    return min((time for time in times if time is not None), default=None)


class StampCommand:
    """A command that reads a request on stdin and writes the response, both in DER."""

    def __init__(self, text: str) -> None:
        self._command = Command(text, "stamped the time", _MAX_STAMP)

    def stamp(self, signature: bytes) -> bytes:
        """Return the stamp of a signature. Raises UsageError, UnauthorizedError."""
        with needs("a time stamp", "trust"):
            from rfc3161_client import TimestampRequestBuilder, decode_timestamp_response
        request = TimestampRequestBuilder().data(signature).build()
        raw = self._command.run(request.as_bytes())
        try:
            info = decode_timestamp_response(raw).tst_info
        except ValueError as error:
            raise self._command.build_error(f"its answer is no time stamp: {error}") from None
        if info.message_imprint.message != request.message_imprint.message:
            raise self._command.build_error("its answer is the stamp of something else")
        return raw


def _verify(stamp: bytes, signature: bytes, roots: list[Certificate]) -> datetime | None:
    with needs("a time stamp", "trust"):
        from rfc3161_client import VerifierBuilder, decode_timestamp_response
    try:
        response = decode_timestamp_response(stamp)
        # It adds to the lists that it is given
        VerifierBuilder(roots=list(roots)).build().verify_message(response, signature)
        time: datetime = response.tst_info.gen_time
    # Malformed stamps raise the errors of several parsers
    except Exception:
        return None
    return time
