"""The Python interface to stores and registries (docs/python.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage import __version__
from clowder_aimage.config.user_directory import (
    list_default_stores,
    open_dialect_cache,
    read_client_options,
    use_store_settings,
)
from clowder_aimage.content.copy_option import CopyEvent
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import UsageError
from clowder_aimage.export import export
from clowder_aimage.importer import Provenance, Recipe
from clowder_aimage.importer.hub_model import HubName, find_model
from clowder_aimage.importer.model_source import ModelForm
from clowder_aimage.importer.request_default import build_request_defaults
from clowder_aimage.layout import ImageLayout, LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Digest, Reference, mediatype

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions

OnProgress = Callable[[int, int], object]
Name = str | Reference


class Store:
    """A store of AImages: an OCI image layout in the directory ``path``.

    Args:
        path: The directory. The first write creates it. By default the store of the command line:
            the directories in AIMAGE_STORE, else that of the platform.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        path_to_write, *read_only = roots = list_default_stores() if path is None else (Path(path),)
        self.path = path_to_write
        use_store_settings()
        self.layout = LayeredStore(roots) if read_only else ImageLayout(path_to_write)

    def __contains__(self, name: Name) -> bool:
        return str(to_reference(name)) in self.names()

    def names(self) -> list[str]:
        """Return the names in the store, sorted."""
        return sorted(name for name, _ in self.layout.list_tags())

    def digest(self, name: Name) -> str:
        """Return the digest of a name. Raises NotFoundError."""
        return str(self.layout.resolve(to_reference(name)).digest)

    def show(self, name: Name) -> dict[str, Any]:
        """Return the config of an AImage. Raises NotFoundError, FormatError."""
        return dict(read_aimage(self.layout, to_reference(name)).aimage.properties)

    def tag(self, name: Name, new: Name) -> None:
        """Give an AImage another name. Raises NotFoundError, StoreError."""
        target = to_reference(new)
        if target.digest is not None:
            raise UsageError(f"{target} names a digest: a tag is needed")
        with self.layout.keep():
            manifest = self.layout.resolve(to_reference(name))
            is_partial = manifest.annotations.get(mediatype.PARTIAL) == "true"
            self.layout.tag(manifest, target, is_partial=is_partial)

    def remove(self, name: Name) -> None:
        """Remove a name; its blobs stay until the next garbage collection. Raises NotFoundError."""
        self.layout.untag(to_reference(name))

    def export(self, name: Name, directory: str | os.PathLike[str]) -> Path:
        """Write an AImage as the directory that it was created from; return that directory.

        Raises:
            UsageError: The directory exists and is not empty.
            NotFoundError: The AImage is not in the store, or not all of it.
            FormatError, VerificationError, StoreError, NoSpaceError: It cannot be written.
        """
        export(self.layout, to_reference(name), Path(directory))
        return Path(directory)


class Registry:
    """A registry, and the account and the certificates for it.

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
        self.options = read_client_options(
            plain_http=plain_http,
            insecure=insecure,
            ca_file=None if ca_file is None else Path(ca_file),
            auths={} if username is None else {host: account},
        )

    def repositories(self) -> list[str]:
        """Return the names of the repositories. Raises UnauthorizedError, AccessError."""
        from clowder_aimage.registry import list_repositories

        return list_repositories(self.host, self.options)

    def tags(self, repository: str) -> list[str]:
        """Return the tags of a repository. Raises NotFoundError, UnauthorizedError, AccessError."""
        from clowder_aimage.registry import Repository, is_generated

        with Repository(Reference.parse(f"{self.host}/{repository}"), self.options) as remote:
            return [tag for tag in remote.list_tag_names() if not is_generated(tag)]

    def digest(self, name: str) -> str:
        """Return the digest of REPOSITORY:TAG. Raises NotFoundError, AccessError."""
        from clowder_aimage.registry import Repository

        reference = Reference.parse(f"{self.host}/{name}")
        with Repository(reference, self.options) as remote:
            return str(remote.resolve(reference).digest)


def pull(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    components: Sequence[str] = (),
    include: Sequence[str] = (),
    progress: OnProgress | None = None,
) -> str:
    """Pull an AImage from the registry in its name; return its digest.

    ``components`` and ``include`` (patterns of names) select a part of it. ``progress`` is called
    with the bytes done and their total, from several threads, one at a time.

    Raises:
        UsageError: The name has no registry, or another than ``registry``.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: It cannot be read.
        VerificationError, FormatError: The bytes are not those of the digest.
        StoreError, NoSpaceError: It cannot be stored.
    """
    from clowder_aimage.pull import PullOptions
    from clowder_aimage.pull import pull as pull_aimage

    layers = LayerSelection(tuple(components), tuple(include)) if components or include else None
    options = PullOptions(layers=layers, on_event=ProgressCounter(progress).on_event)
    reference, layout = to_reference(name), (store or Store()).layout
    return str(
        pull_aimage(reference, layout, to_connection(reference, registry), options).root.digest
    )


def push(
    name: Name,
    *,
    store: Store | None = None,
    registry: Registry | None = None,
    dialect: str | None = None,
    progress: OnProgress | None = None,
) -> str:
    """Push an AImage to the registry in its name; return its digest in the registry.

    If the registry refuses this kind of manifest it is rewritten; ``dialect`` chooses the kind.
    ``progress`` is called as ``pull`` does.

    Raises:
        UsageError: The name has no registry, or another than ``registry``.
        NotFoundError: The AImage is not in the store.
        UnauthorizedError, NetworkError, RegistryError: It cannot be sent.
        VerificationError: The copy in the store is damaged.
    """
    from clowder_aimage.push import push as push_aimage

    reference, layout = to_reference(name), (store or Store()).layout
    sent = push_aimage(
        layout,
        reference,
        to_connection(reference, registry),
        dialect=dialect,
        on_event=ProgressCounter(progress).on_event,
        ladder=open_dialect_cache(),
    )
    return str(sent.digest)


def create(
    name: Name,
    path: str | os.PathLike[str],
    *,
    store: Store | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    license: str | None = None,  # noqa: A002 - the field's name
    source: str | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    progress: OnProgress | None = None,
) -> str:
    """Pack a model as an AImage; return its digest. The digest depends on the model alone.

    ``path`` is a directory or file, or ORG/REPO or hf://ORG/REPO of the Hugging Face hub. ``dtype``
    is f32, f16, bf16 or auto; ``quantize`` is int8, int4 and so on, for the transformer or for each
    component (``transformer=int4,text_encoder=int8``). ``steps`` and ``guidance`` are the defaults
    of pictures, None for those that follow from the model. ``progress`` is called as ``pull`` does,
    for each stage from zero.

    Raises:
        ModelError, FormatError: It is not a model that can be packed.
        UsageError: The options do not fit the model, or an extra is missing.
        NotFoundError, UnauthorizedError, NetworkError: The hub does not give the model.
        StoreError, NoSpaceError: It cannot be stored.
    """
    from clowder_aimage.create import create as create_aimage

    reference, counter = to_reference(name), ProgressCounter(progress)
    hub_name = HubName.parse(os.fspath(path))
    if hub_name is not None:
        fetched = find_model(
            hub_name,
            ModelForm(),
            __version__,
            lambda plan: counter.begin(plan.size),
            counter.advance,
        )
        path, source = fetched.path, source or fetched.source
    packed = create_aimage(
        (store or Store()).layout,
        reference,
        Path(path),
        form=ModelForm(is_chosen=hub_name is not None),
        provenance=Provenance(license, source, defaults=build_request_defaults(steps, guidance)),
        recipe=Recipe.parse(dtype, quantize),
        on_survey=counter.begin,
        on_surveyed=counter.advance,
        on_plan=lambda plan: counter.begin(plan.size),
        on_written=lambda written: counter.advance(written.layer.descriptor.size),
    )
    return str(packed.descriptor.digest)


class ProgressCounter:
    """The bytes or steps done of a total, reported to a callback, one call at a time."""

    def __init__(self, progress: OnProgress | None) -> None:
        self._report = progress or (lambda _, __: None)
        # Several threads transfer blobs, but a caller's function need not be thread-safe.
        self._lock = threading.Lock()
        self._done = self._total = 0
        # The bytes of each unfinished blob.
        self._active: dict[Digest, int] = {}

    def begin(self, total: int) -> None:
        """Start over with a total."""
        with self._lock:
            self._done, self._total = 0, total
            self._report(0, total)

    def advance(self, count: int) -> None:
        """Add to the count."""
        with self._lock:
            self._done += count
            self._report(self._done, self._total)

    def on_event(self, event: CopyEvent) -> None:
        """Count an event of a copy."""
        if event.kind == "plan" or event.content is None:
            self.begin(event.count)
            return
        digest = event.content.digest
        if event.kind == "start":
            self._active[digest] = 0
        elif event.kind == "progress":
            self._active[digest] = self._active.get(digest, 0) + event.count
            self.advance(event.count)
        elif event.kind == "skip" or digest in self._active:
            # A blob is done. After a mount it was counted as skipped.
            self.advance(event.content.size - self._active.pop(digest, 0))


def to_reference(name: Name) -> Reference:
    """Parse a name unless it is a reference already. Raises UsageError."""
    return name if isinstance(name, Reference) else Reference.parse(name)


def to_connection(reference: Reference, registry: Registry | None) -> ClientOptions:
    """Return the options for the registry of a name. Raises UsageError: it is another one."""
    if registry is None:
        return read_client_options()
    if reference.registry not in (None, registry.host):
        raise UsageError(f"{reference} is not in the registry {registry.host}")
    return registry.options
