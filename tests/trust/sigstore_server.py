"""The services of an own sigstore on loopback: Fulcio, Rekor, an authority of stamps and an issuer.

Sources: sigstore/fulcio (fulcio.proto), sigstore/rekor (openapi.yaml), RFC 3161 over HTTP.
"""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from rfc3161_client import _rust

from tests.trust.key_files import Authority
from tests.trust.own_sigstore import IDENTITY, ISSUER, OwnSigstore
from tests.trust.own_timestamp import OwnTimestampAuthority

_SERVICE = {"majorApiVersion": 1, "validFor": {"start": "2020-01-01T00:00:00Z"}, "operator": "own"}


def create_token(**claims: Any) -> str:
    """Return an identity token; it is not signed by anybody whom a client knows."""
    now = int(datetime.now(UTC).timestamp())
    values = {"iss": ISSUER, "sub": IDENTITY, "aud": "sigstore", "iat": now, "exp": now + 60}
    return jwt.encode(values | claims, "k" * 32, algorithm="HS256")


def _encode_pem(authority: Authority | x509.Certificate) -> str:
    certificate = authority.certificate if isinstance(authority, Authority) else authority
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


class _Handler(http.server.BaseHTTPRequestHandler):
    own: OwnSigstore
    stamps: OwnTimestampAuthority
    seen: list[str]

    def do_GET(self) -> None:
        base = f"http://{self.headers['Host']}"
        endpoints = {"authorization_endpoint": f"{base}/auth", "token_endpoint": f"{base}/token"}
        self._answer(json.dumps(endpoints).encode())

    def do_POST(self) -> None:
        self.seen.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/v2/signingCert":
            self._answer(self._issue(json.loads(body)))
        elif self.path == "/api/v1/log/entries":
            self._answer(self._record(json.loads(body)))
        else:
            imprint = _rust.parse_timestamp_request(body).message_imprint
            self._answer(self.stamps.respond(imprint.message, datetime.now(UTC)))

    def _issue(self, request: dict[str, Any]) -> bytes:
        pem = base64.b64decode(request["certificateSigningRequest"])
        token = self.headers["Authorization"].removeprefix("Bearer ")
        claims = jwt.decode(token, options={"verify_signature": False})
        asked = x509.load_pem_x509_csr(pem)
        issued = self.own.issue(asked, claims["sub"], claims["iss"], _now())
        chain = [_encode_pem(issued), _encode_pem(self.own.fulcio)]
        return json.dumps(
            {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}
        ).encode()

    def _record(self, request: dict[str, Any]) -> bytes:
        proposed = request["spec"]["proposedContent"]
        envelope = json.loads(proposed["envelope"])
        verifier = x509.load_pem_x509_certificate(base64.b64decode(proposed["verifiers"][0]))
        entry = self.own.record(
            base64.b64decode(envelope["payload"]),
            base64.b64decode(envelope["signatures"][0]["sig"]),
            verifier,
            _now(),
        )
        proof = entry["inclusionProof"]
        value = {
            "body": entry["canonicalizedBody"],
            "integratedTime": int(entry["integratedTime"]),
            "logID": base64.b64decode(entry["logId"]["keyId"]).hex(),
            "logIndex": 0,
            "verification": {
                "signedEntryTimestamp": entry["inclusionPromise"]["signedEntryTimestamp"],
                "inclusionProof": {
                    "logIndex": 0,
                    "treeSize": 1,
                    "hashes": [],
                    "rootHash": base64.b64decode(proof["rootHash"]).hex(),
                    "checkpoint": proof["checkpoint"]["envelope"],
                },
            },
        }
        return json.dumps({"0" * 64: value}).encode()

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _now() -> datetime:
    # Certificates have seconds.
    return datetime.now(UTC).replace(microsecond=0)


class SigstoreServer:
    """The files of the instance, and the paths that were posted to."""

    def __init__(self, own: OwnSigstore, directory: Path, url: str, seen: list[str]) -> None:
        self.own, self.url, self.seen = own, url, seen
        self.stamps = OwnTimestampAuthority()
        self.trusted_root = own.write_root(directory / "trusted_root.json", self.stamps)
        self.signing_config = directory / "signing_config.json"
        self._directory = directory
        self.write_signing_config()

    def write_signing_config(self, *, has_stamps: bool = False) -> dict[str, Any]:
        """Write the addresses of the services, and return them."""
        own = [{"url": self.url} | _SERVICE]
        config = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": own,
            "oidcUrls": own,
            "rekorTlogUrls": own,
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaUrls": [{"url": f"{self.url}/stamp"} | _SERVICE] if has_stamps else [],
            "tsaConfig": {"selector": "ANY"},
        }
        self.signing_config.write_text(json.dumps(config))
        return config

    def write_trust_config(self) -> Path:
        """Write both files as one, as sigstore-python and model_signing read them."""
        path = self._directory / "trust_config.json"
        value = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": json.loads(self.trusted_root.read_text()),
            "signingConfig": self.write_signing_config(),
        }
        path.write_text(json.dumps(value))
        return path


@contextmanager
def serving_sigstore(directory: Path) -> Iterator[SigstoreServer]:
    """Serve an instance of sigstore."""
    own, seen = OwnSigstore(), list[str]()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    instance = SigstoreServer(own, directory, f"http://127.0.0.1:{server.server_port}", seen)
    server.RequestHandlerClass = type(
        "Handler", (_Handler,), {"own": own, "stamps": instance.stamps, "seen": seen}
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield instance
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
