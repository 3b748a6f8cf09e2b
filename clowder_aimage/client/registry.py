"""Registries in the Python interface, and names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.client.progress import Progress, count_progress
from clowder_aimage.config.user_directory import read_client_options
from clowder_aimage.errors import UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions, Repository

Name = str | Reference


class Registry:
    """A registry, and the account and the certificates for it.

    Its methods take names in it, with or without the host: ``team/shapes:v1``.

    Args:
        host: The host, with a port if it has one.
        username: The account; by default that of ``docker login`` and of credential helpers.
        password: The password of that account.
        plain_http: Use HTTP; by default only for loopback hosts.
        insecure: Do not verify the certificate.
        ca_file: Trust the certificates in this file.
    """

    def __init__(
        self,
        host: str,
        *,
        username: str | None = None,
        password: str | None = None,
        plain_http: bool | None = None,
        insecure: bool = False,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.host = host
        if Reference.parse(f"{host}/x").registry is None:
            raise UsageError(f"invalid registry host {host!r}")
        if (username is None) != (password is None):
            raise UsageError("a username and a password belong together")
        account = {"username": username, "password": password}
        self._options = read_client_options(
            plain_http=plain_http,
            insecure=insecure,
            ca_file=None if ca_file is None else Path(ca_file),
            auths={} if username is None else {host: account},
        )

    def __repr__(self) -> str:
        return f"Registry({self.host!r})"

    def repositories(self) -> list[str]:
        """Return the names of the repositories. Raises UnauthorizedError, AccessError."""
        from clowder_aimage.registry import list_repositories

        return list_repositories(self.host, self._options)

    def tags(self, repository: str) -> list[str]:
        """Return the tags of a repository. Raises NotFoundError, UnauthorizedError, AccessError."""
        from clowder_aimage.registry import is_generated

        with self._open(self._expand(repository)) as remote:
            return [tag for tag in remote.list_tag_names() if not is_generated(tag)]

    def digest(self, name: Name) -> str:
        """Return the digest of a name. Raises NotFoundError, AccessError."""
        reference = self._expand(name)
        with self._open(reference) as remote:
            return str(remote.resolve(reference).digest)

    def show(self, name: Name) -> dict[str, Any]:
        """Return the output of ``aimage show --remote --json``. Raises as ``pull``."""
        from clowder_aimage.show import show

        reference = self._expand(name)
        with self._open(reference) as remote:
            return show(remote, reference).to_json()

    def tag(self, name: Name, new: str) -> None:
        """Give a manifest another tag in its repository. Raises NotFoundError, AccessError."""
        reference = self._expand(name)
        target = Reference.parse(f"{reference.name}:{new}")
        with self._open(reference) as remote:
            remote.tag(remote.resolve(reference), target)

    def delete(self, name: Name) -> None:
        """Delete a tag, or with a digest a manifest and all its tags.

        Raises:
            UsageError: The name has neither tag nor digest.
            NotFoundError, UnauthorizedError, AccessError: It cannot be deleted.
        """
        reference = self._expand(name)
        # A tag that is not stated must not be deleted.
        if str(name) in (reference.name, reference.repository):
            raise UsageError(f"{name} has neither tag nor digest", hint="add :TAG or @DIGEST")
        with self._open(reference) as remote:
            remote.delete(reference)

    def copy(
        self,
        name: Name,
        target: Name,
        *,
        recursive: bool = False,
        progress: Progress = None,
    ) -> str:
        """Copy an artifact to a name in this or another registry; return its digest.

        Nothing is stored here. ``recursive`` copies what is attached to it too. The account of this
        registry is used for this registry only. ``progress`` is that of ``pull``.

        Raises:
            UsageError: ``target`` has no registry, or another digest.
            NotFoundError, UnauthorizedError, NetworkError, RegistryError: It cannot be copied.
            VerificationError, FormatError: The bytes differ from their descriptors.
        """
        from clowder_aimage.push import transfer

        source, destination = self._expand(name), to_reference(target)
        with count_progress(progress, "copying") as counter:
            copied = transfer(
                source,
                destination,
                self._options,
                recursive=recursive,
                on_event=counter.on_event,
            )
        return str(copied.digest)

    def attach(
        self,
        name: Name,
        *files: str | os.PathLike[str],
        artifact_type: str,
        annotations: Mapping[str, str] | None = None,
        progress: Progress = None,
    ) -> str:
        """Push files as an artifact whose subject is the manifest of a name; return its digest.

        Raises:
            UsageError: The type is not a media type, or two files have one name.
            NotFoundError: The manifest or a file does not exist.
            UnauthorizedError, NetworkError, RegistryError: They cannot be sent.
        """
        from clowder_aimage.attach import attach

        if not files:
            raise UsageError("there are no files to attach")
        with count_progress(progress, "attaching") as counter:
            descriptor, _ = attach(
                self._expand(name),
                [Path(file) for file in files],
                self._options,
                artifact_type=artifact_type,
                annotations=annotations,
                on_event=counter.on_event,
            )
        return str(descriptor.digest)

    def referrers(
        self, name: Name, *, artifact_type: str = "", recursive: bool = False
    ) -> list[dict[str, Any]]:
        """Return the output of ``aimage referrers --json``: the artifacts attached to a name.

        Raises NotFoundError, UnauthorizedError, AccessError.
        """
        from clowder_aimage.attach import list_attached

        reference = self._expand(name)
        entries = list_attached(reference, self._options, artifact_type, is_recursive=recursive)
        return [entry.to_json(reference, has_subject=recursive) for entry in entries]

    def _open(self, reference: Reference) -> AbstractContextManager[Repository]:
        from clowder_aimage.registry import Repository

        return Repository(reference, self._options)

    def _expand(self, name: Name) -> Reference:
        """Return a name in this registry. Raises UsageError: it is in another one."""
        reference = to_reference(name)
        if reference.registry is None:
            # The host may change the grammar of the rest.
            if isinstance(name, str):
                return Reference.parse(f"{self.host}/{name}")
            return replace(reference, registry=self.host)
        connect(reference, self)
        return reference


def to_reference(name: Name) -> Reference:
    """Parse a name unless it is a reference already. Raises UsageError."""
    return name if isinstance(name, Reference) else Reference.parse(name)


def connect(reference: Reference, registry: Registry | None) -> ClientOptions:
    """Return the options for the registry of a name. Raises UsageError: it is another one."""
    if registry is None:
        return read_client_options()
    if reference.registry not in (None, registry.host):
        raise UsageError(f"{reference} is not in the registry {registry.host}")
    return registry._options  # noqa: SLF001 - not part of the public interface
