"""transfer: an artifact from a registry to a registry, without a copy on disk."""

from __future__ import annotations

from collections.abc import Sequence

from clowder_aimage.content import OnEvent, copy
from clowder_aimage.content.copy_option import ignore
from clowder_aimage.errors import ManifestRefusedError, UsageError
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.registry import ClientOptions, MountOrigins, Repository


def transfer(
    source: Reference,
    target: Reference,
    connection: ClientOptions,
    *,
    on_event: OnEvent = ignore,
) -> Descriptor:
    """Copy what ``source`` names, byte for byte, to the name ``target``.

    Each blob is streamed; within one registry it is mounted instead, where that is allowed.

    Raises:
        UsageError: a name without a registry host, or a digest that is not the source's.
        ManifestRefusedError: the target's registry does not take this kind of manifest.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be read, or sent.
        VerificationError, FormatError: the bytes differ from their descriptors.
    """
    _check_hosts(source, target)
    origins = MountOrigins(lambda _: _origins(source, target), on_event)
    with (
        Repository(source, connection) as there,
        Repository(target, connection, origins) as here,
    ):
        if target.digest is not None:
            digest = source.digest or there.resolve(source).digest
            if target.digest != digest:
                raise UsageError(
                    f"what is to be copied is {digest}, not what {target} says",
                    hint="leave the digest out of the second name",
                )
        try:
            jobs = connection.jobs(source.registry, target.registry)
            return copy(there, source, here, target, concurrency=jobs, on_event=on_event)
        except ManifestRefusedError as error:
            error.remedy = ""
            error.hint = "a copy rewrites nothing; pull it, tag it and push it to have it rewritten"
            raise


def _check_hosts(source: Reference, target: Reference) -> None:
    for name in (source, target):
        if name.registry is None:
            raise UsageError(
                f"{name} has no registry host, and copy goes from a registry to a registry",
                remedy="copy_from_store" if name is source else "copy_to_store",
                source=source,
                target=target,
            )


def _origins(source: Reference, target: Reference) -> Sequence[str]:
    """Return the source's repository, where it is another one in the same registry."""
    same = source.registry == target.registry and source.repository != target.repository
    return (source.repository,) if same else ()
