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
from clowder_aimage.cli.console.signer_option import (
    FORMATS,
    file_path,
    read_certificates,
    read_small,
)
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
    "--timestamp-command",
    metavar="COMMAND",
    help="Stamp the time with this command, so that the signature counts after the end of its "
    "certificate: it reads a request (RFC 3161) on stdin, and writes the response.",
)
@click.option(
    "--keyless",
    is_flag=True,
    help="Sign with an identity token instead of a key. The identity and the digest become public.",
)
@click.option(
    "--signing-config",
    metavar="FILE",
    type=file_path,
    help="With --keyless: the addresses of an instance of sigstore (signing_config.json), with "
    "--trusted-root. [default: the public one]",
)
@click.option(
    "--trusted-root",
    metavar="FILE",
    type=file_path,
    help="With --signing-config: the keys of the instance (trusted_root.json).",
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
    timestamp_command: str | None,
    keyless: bool,
    signing_config: Path | None,
    trusted_root: Path | None,
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
    if timestamp_command is not None and certificate is None:
        raise UsageError("--timestamp-command requires --certificate")
    if bool(signing_config) != bool(trusted_root) or (signing_config and not keyless):
        raise UsageError("--keyless, --signing-config and --trusted-root require each other")
    layout = get_settings().layout
    if keyless:
        signer, sign_statement = None, _build_keyless(signing_config, trusted_root)
    else:
        signer = _read_signer(key, key_command, certificate, timestamp_command)
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
    if file is not None and kind != "oms":
        raise UsageError("--output requires --as oms")


def _read_signer(
    key: Path | None, command: str | None, certificate: Path | None, stamp_command: str | None
) -> Signer:
    import os

    from clowder_aimage.trust.certificate import check_key
    from clowder_aimage.trust.key import PublicKey, load_private_key
    from clowder_aimage.trust.signer import CommandSigner, KeySigner
    from clowder_aimage.trust.timestamp import StampCommand

    assert key is not None  # noqa: S101 - as checked
    data, chain = read_small(key), read_certificates(certificate)
    stamp = None if stamp_command is None else StampCommand(stamp_command).stamp
    signer: Signer
    if command is not None:
        signer = CommandSigner(command, PublicKey.parse(data, str(key)), chain, stamp)
    else:
        password = os.environ.get("AIMAGE_KEY_PASSWORD")
        private_key = load_private_key(data, password.encode() if password else None, str(key))
        signer = KeySigner(private_key, str(key), chain, stamp)
    if chain:
        check_key(chain[0], signer.public_key, str(certificate))
    return signer


def _build_keyless(signing_config: Path | None, trusted_root: Path | None) -> SignStatement:
    import os

    from clowder_aimage.trust.keyless import Instance, sign_keyless

    token = os.environ.get("SIGSTORE_ID_TOKEN", "").strip() or None
    instance = Instance(signing_config, trusted_root) if signing_config and trusted_root else None
    return lambda statement: sign_keyless(statement, token, instance)


def _write(path: Path, data: bytes) -> None:
    from clowder_aimage.content.atomic_file import open_atomic, write_all

    try:
        with open_atomic(path) as opened:
            write_all(opened.fileno(), memoryview(data))
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from None
