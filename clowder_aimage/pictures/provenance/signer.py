"""The signer of pictures: a key and its certificates, with C2PA's library.

The key is read by this process, and given to that library alone; or it stays with a command. Errors
name files, and never contain what is in them.
"""

from __future__ import annotations

import io
import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import ModelError, NetworkError, UsageError, needs
from clowder_aimage.pictures.file_parts import read_parts
from clowder_aimage.pictures.provenance.claim import build_claim, describe_ingredient
from clowder_aimage.pictures.provenance.marked_input import MarkedInput
from clowder_aimage.pictures.provenance.signing_settings import SigningSettings

if TYPE_CHECKING:
    from c2pa import Signer

    from clowder_aimage.model.picture_mark import PictureMark

# Seconds for a time stamp, and without asking the server again after it has failed
STAMP_DEADLINE, _PAUSE = 5.0, 60.0
# Seconds for a command
_COMMAND_DEADLINE = 10.0
# Bytes of a key, or of a chain of certificates
_MAX_FILE = 1 << 20
# Nothing of a picture, and no certificate, makes the library send a request
_OFFLINE = {"remote_manifest_fetch": False, "ocsp_fetch": False}
_SETTINGS = {
    "core": {"allowed_network_hosts": [], "decode_identity_assertions": False},
    "builder": {"thumbnail": {"enabled": False}},
    "verify": {**_OFFLINE, "verify_after_sign": False, "verify_trust": False},
}
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}

Warn = Callable[[str], object]


@dataclass(slots=True, eq=False)
class PictureSigner:
    """A signer whose key and certificates were read and fit each other. Thread-safe.

    ``name`` is that in its certificate. ``warn`` is called about missing time stamps.
    """

    name: str
    _settings: SigningSettings
    _algorithm: str
    _chain: bytes = field(repr=False)
    _key: bytes = field(repr=False)
    _warn: Warn = field(repr=False)
    # The time until which the time stamp server is not asked
    _paused_until: float = 0.0

    @classmethod
    def open(cls, settings: SigningSettings, warn: Warn) -> PictureSigner:
        """Read the certificates and the key.

        Raises UsageError: C2PA's library is not installed, or a file cannot be used.
        """
        with needs("signing pictures", "c2pa"):
            import c2pa  # noqa: F401 (its first error is the best)
            from cryptography import x509
        chain = _read(settings.chain, "certificates")
        try:
            certificate = x509.load_pem_x509_certificates(chain)[0]
            public = certificate.public_key()
        except Exception:
            # cryptography has no common class for the errors of damaged certificates
            raise UsageError(f"{settings.chain} has no certificates in PEM") from None
        key = b"" if settings.key is None else _read_key(settings.key, public)
        name = _get_name(certificate)
        return cls(name, settings, _choose_algorithm(public), chain, key, warn)

    def check(self) -> None:
        """Sign a picture of one pixel, without a time stamp. Raises UsageError: it fails."""
        from clowder_aimage.model.picture_mark import GENERATED, PictureMark

        try:
            self._sign(_PIXEL, "png", build_claim(PictureMark(GENERATED), (), None), (), None)
        except ModelError as error:
            raise UsageError(error.message, hint=error.hint) from None

    def sign(
        self,
        data: bytes,
        kind: str,
        mark: PictureMark,
        inputs: Sequence[MarkedInput],
        facts: dict[str, Any] | None,
    ) -> bytes:
        """Return a picture file with a manifest; ``facts`` are None to state none. Blocks.

        kind: png, jpeg or webp.

        Raises:
            ModelError: The certificates cannot sign pictures, or the command fails.
            NetworkError: There is no time stamp, and the settings need one.
        """
        claim = build_claim(mark, inputs, facts)
        if self._settings.timestamp is not None and time.monotonic() >= self._paused_until:
            stamped = self._sign_stamped(data, kind, claim, inputs, self._settings.timestamp)
            if stamped is not None:
                return stamped
            self._paused_until = time.monotonic() + _PAUSE
        if self._settings.timestamp is not None and self._settings.needs_timestamp:
            raise NetworkError(f"no time stamp from {self._settings.timestamp}")
        return self._sign(data, kind, claim, inputs, None)

    def _sign_stamped(
        self,
        data: bytes,
        kind: str,
        claim: dict[str, Any],
        inputs: Sequence[MarkedInput],
        server: str,
    ) -> bytes | None:
        """Return a file with a time stamp, or None if there is none within the deadline.

        The library has no deadline of its own: a thread waits for it, and ends when its request
        does.
        """
        results = list[bytes]()

        def work() -> None:
            # Signed again without a time stamp, which tells other errors
            with suppress(Exception):
                results.append(self._sign(data, kind, claim, inputs, server))

        thread = threading.Thread(target=work, name="aimage-time-stamp", daemon=True)
        thread.start()
        thread.join(STAMP_DEADLINE)
        if results:
            return results[0]
        failure = "does not answer" if thread.is_alive() else "gives no time stamp"
        self._warn(f"{server} {failure}: it is asked again in {_PAUSE:g} seconds")
        return None

    def _sign(
        self,
        data: bytes,
        kind: str,
        claim: dict[str, Any],
        inputs: Sequence[MarkedInput],
        server: str | None,
    ) -> bytes:
        from c2pa import Builder, C2paError, Context

        failures, target = list[ModelError](), io.BytesIO()
        try:
            with (
                closing(Context.from_dict(_SETTINGS)) as context,
                closing(Builder(json.dumps(claim), context=context)) as builder,
                closing(self._create_signer(server, failures)) as signer,
            ):
                for index, entry in enumerate(inputs):
                    definition = json.dumps(describe_ingredient(index, entry))
                    content, media_type = _read_input(entry)
                    builder.add_ingredient(definition, media_type, io.BytesIO(content))
                builder.sign(signer, f"image/{kind}", io.BytesIO(data), target)
        except C2paError as error:
            if failures:
                raise failures[0] from None
            raise ModelError(
                f"{self._settings.chain} cannot sign pictures: {str(error)[:200]}",
                hint="a certificate for signing has the extended key usage emailProtection or "
                "documentSigning, and is not its own issuer",
            ) from None
        return target.getvalue()

    def _create_signer(self, server: str | None, failures: list[ModelError]) -> Signer:
        """Return a signer of the library, which serves one thread."""
        from c2pa import C2paSignerInfo, C2paSigningAlg, Signer

        algorithm = C2paSigningAlg[self._algorithm]
        if self._key:
            return Signer.from_info(C2paSignerInfo(algorithm, self._chain, self._key, server))

        def run(claim: bytes) -> bytes:
            try:
                return self._run_command(claim)
            except ModelError as error:
                # The library logs what a callback raises
                failures.append(error)
                return b""

        return Signer.from_callback(run, algorithm, self._chain.decode(), server)

    def _run_command(self, data: bytes) -> bytes:
        """Return the signature that the command writes. Raises ModelError."""
        program = self._settings.command[0]
        try:
            done = subprocess.run(
                self._settings.command,
                input=data,
                capture_output=True,
                timeout=_COMMAND_DEADLINE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reason = f"takes more than {_COMMAND_DEADLINE:g} seconds"
        except OSError as error:
            reason = f"cannot be started: {error.strerror or error}"
        else:
            if done.returncode == 0 and done.stdout:
                return done.stdout
            reason = f"fails with the exit code {done.returncode}"
            reason = reason if done.returncode else "writes no signature"
        raise ModelError(f"the command {program}, which signs pictures, {reason}")


# A PNG file of one pixel
_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000"
    "00020001487edd8d0000000049454e44ae426082"
)


def _read(name: str, content: str) -> bytes:
    """Return a file of the settings. Raises UsageError."""
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read the {content} in {name}: {reason}") from None
    if len(data) > _MAX_FILE:
        raise UsageError(f"{name} is too large for {content}")
    return data


def _read_key(name: str, public: object) -> bytes:
    """Return a private key as PKCS #8, in PEM. Raises UsageError: it is not that of ``public``."""
    from cryptography.hazmat.primitives import serialization as form

    try:
        key = form.load_pem_private_key(_read(name, "key"), None)
    except UsageError:
        raise
    except Exception:
        # cryptography has no common class for the errors of damaged or encrypted keys
        hint = "use a private key in PEM that is not encrypted, or a command"
        raise UsageError(f"{name} is not a private key that can be used", hint=hint) from None
    if key.public_key() != public:
        raise UsageError(f"the key in {name} is not that of the first certificate of the chain")
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _choose_algorithm(public: Any) -> str:
    """Return the algorithm of C2PA (13.2.1) for a public key. Raises UsageError."""
    curve = getattr(getattr(public, "curve", None), "name", "")
    by_kind = {"RSAPublicKey": "PS256", "Ed25519PublicKey": "ED25519"}
    kind = type(public).__name__
    algorithm = _CURVES.get(curve) or by_kind.get(kind)
    if algorithm is None:
        raise UsageError(f"pictures are not signed with a key of the kind {curve or kind}")
    return algorithm


def _get_name(certificate: Any) -> str:
    """Return the common name in a certificate, else its organisation; empty without both."""
    from cryptography.x509.oid import NameOID

    for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME):
        for attribute in certificate.subject.get_attributes_for_oid(kind):
            return str(attribute.value)
    return ""


def _read_input(entry: MarkedInput) -> tuple[bytes, str]:
    """Return the file of an ingredient and its type; without a manifest that cannot be kept."""
    from clowder_aimage.model.picture_metadata import detect_kind

    data = entry.path.read_bytes()
    media_type = f"image/{detect_kind(data)}"
    return data if entry.keeps_manifest else read_parts(data, entry.role).pixels, media_type
