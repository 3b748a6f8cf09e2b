"""Options for the expected signers of an AImage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.option import in_section
from clowder_aimage.errors import StoreError, UsageError

if TYPE_CHECKING:
    from clowder_aimage.trust.acceptance import Signers

SECTION = "Signatures"
FORMATS = ("bundle", "cosign-tag", "oms")
file_path = click.Path(exists=True, dir_okay=False, path_type=Path)

signer_options = in_section(
    SECTION,
    click.option(
        "--key",
        "keys",
        metavar="FILE",
        type=file_path,
        multiple=True,
        help="Accept signatures by this public key (PEM). May be repeated.",
    ),
    click.option(
        "--identity",
        "identities",
        metavar="PATTERN",
        multiple=True,
        help="Accept signatures of this identity, such as an address or the URL of a workflow; * "
        "stands for any text. May be repeated.",
    ),
    click.option(
        "--issuer", metavar="URL", help="The issuer of the identity, for keyless signatures."
    ),
    click.option(
        "--authority",
        metavar="FILE",
        type=file_path,
        help="The root certificates (PEM) of the identity, for signatures with a certificate.",
    ),
    click.option(
        "--timestamp-authority",
        metavar="FILE",
        type=file_path,
        help="The root certificates (PEM) of those who stamp times: a certificate counts after its "
        "end if the signature was stamped before.",
    ),
    click.option(
        "--trusted-root",
        metavar="FILE",
        type=file_path,
        help="The keys of sigstore (trusted_root.json), for keyless signatures. [default: those of "
        "its public instance]",
    ),
    click.option(
        "--form",
        "forms",
        type=click.Choice(FORMATS),
        multiple=True,
        help="Accept this form of signatures only. May be repeated.",
    ),
    click.option(
        "--offline", is_flag=True, help="Use the store only, neither the registry nor sigstore."
    ),
)


def read_signers(
    *,
    keys: tuple[Path, ...],
    identities: tuple[str, ...],
    issuer: str | None,
    authority: Path | None,
    timestamp_authority: Path | None,
    trusted_root: Path | None,
    forms: tuple[str, ...],
    offline: bool,
) -> Signers:
    """Return the expected signers of the options. Raises UsageError, StoreError."""
    from clowder_aimage.trust.acceptance import Format, Signers
    from clowder_aimage.trust.certificate import Identity
    from clowder_aimage.trust.key import PublicKey

    if not keys and not identities:
        raise UsageError(
            "missing option --key or --identity",
            hint="a signature counts only if its signer is expected",
        )
    if identities and bool(issuer) == bool(authority):
        raise UsageError(
            "--identity requires either --issuer or --authority",
            hint="an identity is what an issuer of tokens or an authority states",
        )
    if not identities and (issuer or authority or trusted_root):
        raise UsageError("--issuer, --authority and --trusted-root require --identity")
    if timestamp_authority is not None and authority is None:
        raise UsageError("--timestamp-authority requires --authority")
    return Signers(
        tuple(PublicKey.parse(read_small(path), str(path)) for path in keys),
        read_certificates(authority),
        tuple(Identity(identity, issuer or "") for identity in identities),
        trusted_root,
        offline,
        frozenset(map(Format, forms)) or frozenset(Format),
        read_certificates(timestamp_authority),
    )


def read_certificates(path: Path | None) -> tuple[bytes, ...]:
    """Return the certificates of a file in DER, none without one. Raises StoreError, UsageError."""
    from clowder_aimage.trust.certificate import parse_certificates

    return () if path is None else parse_certificates(read_small(path), str(path))


def read_small(path: Path) -> bytes:
    """Return the bytes of a file with keys or certificates. Raises StoreError, UsageError."""
    from clowder_aimage.trust.key import MAX_FILE

    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE:
        raise UsageError(f"{path} has more than {MAX_FILE} bytes: it is not a file of keys")
    return data
