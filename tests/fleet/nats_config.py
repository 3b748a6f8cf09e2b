"""Configurations of NATS servers: accounts, TLS, nkeys, and operators with JSON Web Tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]

from tests.fleet.shipped_nats import SHIPPED, format_shipped_account, format_shipped_worker

_PREFIXES = {
    "operator": nkeys.PREFIX_BYTE_OPERATOR,
    "account": nkeys.PREFIX_BYTE_ACCOUNT,
    "user": nkeys.PREFIX_BYTE_USER,
}


def shipped(place: Path, *more: str) -> str:
    """Return the shipped configuration, in a directory of the test; ``more`` are other accounts."""
    text = SHIPPED.read_text()
    assert text.count("accounts {\n") == 1
    for old, new in (
        ('"/var/lib/nats"', f'"{place}"'),
        ("listen:", "# listen:"),
        ("20GB", "1GB"),
        ("accounts {\n", "accounts {\n" + "".join(more)),
    ):
        text = text.replace(old, new)
    return text


def account(name: str) -> str:
    """Return the shipped accounts for another tenant, whose users are NAME-KIND."""
    accounts = (
        *format_shipped_account(name, f"{name}-"),
        *format_shipped_worker("worker-1", account=name, prefix=f"{name}-"),
    )
    return "".join(f"  {line}\n" for line in accounts)


def worker_account(name: str) -> str:
    """Return the account of another worker of the shipped fleet."""
    return "".join(f"  {line}\n" for line in format_shipped_worker(name))


@dataclass
class Key:
    """A pair of keys of a kind: "operator", "account" or "user"."""

    kind: str
    seed: bytes = b""
    public: str = ""
    _pair: Any = field(init=False)

    def __post_init__(self) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), _PREFIXES[self.kind])
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def claim(self, subject: Key, facts: dict[str, Any], **more: Any) -> str:
        """Return a token about another key, signed by this one (nats-io/jwt, version 2)."""
        body = {"iss": self.public, "sub": subject.public, "iat": 1, "name": subject.kind, **more}
        body["nats"] = {"type": subject.kind, "version": 2, **facts}
        digest = hashlib.sha256(json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(_part(json.dumps(one).encode()) for one in (head, body))
        return f"{signed}.{_part(self._pair.sign(signed.encode()))}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def creds_file(path: Path, token: str, user: Key) -> Path:
    """Write a file of credentials, as ``nsc`` does."""
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return path
