"""The verb ``sign``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    get_settings,
    reference_argument,
    transfer_options,
    verb,
)
from clowder_aimage.cli.console.output import print_result, remark
from clowder_aimage.cli.console.signer_option import FORMATS, file_path, read_small
from clowder_aimage.errors import NotFoundError, StoreError, UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.sign import SignStatement
    from clowder_aimage.trust.signer import Signer


@examples(
    f"aimage sign {NAME} --key signer.pem",
    "aimage sign shapes --local --key signer.pem --as oms",
    "aimage sign shapes --local --key signer.pub --key-command 'openssl dgst -sign signer.pem'",
)
@verb
@reference_argument
@click.option(
    "--key",
    metavar="FILE",
    type=file_path,
    help="Sign with this ECDSA key (PEM); AIMAGE_KEY_PASSWORD is its password. With "
    "--key-command, the public key.",
)
@click.option(
    "--key-command",
    metavar="COMMAND",
    help="Sign with this command, for keys in hardware or in a service: it reads the message on "
    "stdin, and writes the signature.",
)
@click.option(
    "--certificate",
    metavar="FILE",
    type=file_path,
    help="Add the certificates of the key (PEM), its own first, up to one below the root.",
)
@click.option(
    "--keyless",
    is_flag=True,
    help="Sign with an identity token instead of a key. The identity and the digest become public.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(FORMATS),
    default="bundle",
    show_default=True,
    help="The form: a bundle of cosign 3, a tag that older cosign reads, or OpenSSF Model Signing "
    "over the files.",
)
@click.option("--local", is_flag=True, help="Sign the AImage in the store, not in its registry.")
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --as oms: write the signature to FILE, and attach nothing.",
)
@transfer_options
def sign(
    reference: Reference,
    key: Path | None,
    key_command: str | None,
    certificate: Path | None,
    keyless: bool,
    form: str,
    local: bool,
    file: Path | None,
) -> None:
    """Sign REF in its registry; print the digest of the signature.

    The signature is attached to the manifest, which does not change. All manifests of an index are
    signed. With --as oms, the files are signed as 'aimage export' writes them: the store must have
    them.
    """
    from clowder_aimage.sign import build_files_bundle, sign_tag, sign_with
    from clowder_aimage.sign import sign as sign_artifact
    from clowder_aimage.trust.acceptance import Format

    kind = Format(form)
    _check(key, key_command, certificate, keyless, kind, file)
    layout = get_settings().layout
    if keyless:
        signer, sign_statement = None, _build_keyless()
    else:
        signer = _read_signer(key, key_command, certificate)
        sign_statement = sign_with(signer, kind)
    if file is not None:
        _write(file, build_files_bundle(layout, reference, sign_statement))
        print_result({"reference": str(reference), "file": str(file)}, str(file))
        return
    connection = None if local else get_settings().build_client_options()
    if kind is Format.COSIGN_TAG and signer is not None:
        signatures = sign_tag(layout, reference, connection, signer)
    else:
        signatures = sign_artifact(layout, reference, connection, sign_statement, kind)
    if not signatures:
        raise NotFoundError(f"{reference} has no manifest that can be signed in this form")
    for signature in signatures:
        remark(f"signed {signature.subject.digest}")
    entries = [
        {"digest": str(entry.subject.digest), "signature": str(entry.manifest.digest)}
        for entry in signatures
    ]
    value = {"reference": str(reference), "form": form, "signatures": entries}
    print_result(value, [str(entry.manifest.digest) for entry in signatures])


def _check(
    key: Path | None,
    key_command: str | None,
    certificate: Path | None,
    keyless: bool,
    kind: str,
    file: Path | None,
) -> None:
    """Raise UsageError for options that contradict each other."""
    if keyless and (key or key_command or certificate):
        raise UsageError("--keyless cannot be combined with --key, --key-command or --certificate")
    if keyless and kind == "cosign-tag":
        raise UsageError("--keyless cannot be combined with --as cosign-tag")
    if not keyless and key is None:
        raise UsageError("missing option --key or --keyless")
    if certificate is not None and kind == "cosign-tag":
        raise UsageError("--certificate cannot be combined with --as cosign-tag")
    if certificate is not None and key_command is not None:
        raise UsageError("--certificate cannot be combined with --key-command")
    if file is not None and kind != "oms":
        raise UsageError("--output requires --as oms")


def _read_signer(key: Path | None, command: str | None, certificate: Path | None) -> Signer:
    import os

    from clowder_aimage.trust.certificate import parse_certificates
    from clowder_aimage.trust.key import PublicKey, load_private_key
    from clowder_aimage.trust.signer import CommandSigner, KeySigner

    assert key is not None  # noqa: S101 - as checked
    data = read_small(key)
    if command is not None:
        return CommandSigner(command, PublicKey.parse(data, str(key)))
    password = os.environ.get("AIMAGE_KEY_PASSWORD")
    private_key = load_private_key(data, password.encode() if password else None, str(key))
    chain = (
        () if certificate is None else parse_certificates(read_small(certificate), str(certificate))
    )
    return KeySigner(private_key, str(key), chain)


def _build_keyless() -> SignStatement:
    import os

    from clowder_aimage.trust.keyless import sign_keyless

    token = os.environ.get("SIGSTORE_ID_TOKEN", "").strip() or None
    return lambda statement: sign_keyless(statement, token)


def _write(path: Path, data: bytes) -> None:
    from clowder_aimage.content.atomic_file import open_atomic, write_all

    try:
        with open_atomic(path) as opened:
            write_all(opened.fileno(), memoryview(data))
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from None
