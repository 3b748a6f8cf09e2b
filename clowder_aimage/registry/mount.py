"""Cross-repository mount (distribution-spec, "Mounting a blob from another repository", end-11).

A blob that the registry has in another repository need not be sent again. A failed mount is not an
error: the blob is uploaded instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from urllib.parse import urlencode

from clowder_aimage.content.copy_option import CopyEvent, OnEvent, ignore
from clowder_aimage.content.store import ContentStore
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AImageError, UnauthorizedError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry.response import RegistryResponse
from clowder_aimage.registry.session import Session

CANDIDATES = 3  # repositories that are asked about one blob
_MANIFESTS_READ = 64  # of a store, to learn what other repositories hold

Find = Callable[[Digest], Sequence[str]]  # a blob -> repositories that may hold it


class MountOrigins:
    """The repositories of a registry that a blob may be mounted from, the likeliest first.

    ``find`` returns the repositories that may have a blob; the registry's responses tell which of
    them are worth a request. A mounted blob is reported as one that was present.
    """

    def __init__(self, find: Find = lambda _: (), on_event: OnEvent = ignore) -> None:
        self._find = find
        self._on_event = on_event
        self._refused: set[str] = set()
        self._missing: set[str] = set()

    def of(self, digest: Digest) -> list[str]:
        """Return the repositories to mount a blob from, those without another blob last."""
        found = [name for name in self._find(digest) if name not in self._refused]
        return sorted(found, key=lambda name: name in self._missing)[:CANDIDATES]

    def mounted(self, content: Descriptor) -> None:
        """Report a blob as present."""
        self._on_event(CopyEvent("skip", content, content.size))

    def refused(self, repository: str) -> None:
        """Exclude a repository."""
        self._refused.add(repository)

    def missed(self, repository: str) -> None:
        """Put a repository last."""
        self._missing.add(repository)


def begin(session: Session, content: Descriptor, origins: MountOrigins) -> RegistryResponse | None:
    """Mount a blob, or begin its upload; return the response to that, or None if mounted.

    A response 202 to a mount begins an upload, too.
    """
    for repository in origins.of(content.digest):
        answer = _mount(session, content.digest, repository)
        if answer is not None and answer.status_code == 202:
            origins.missed(repository)
            return answer
        if answer is not None:
            answer.finish()
        if answer is not None and answer.status_code == 201:
            origins.mounted(content)
            return None
        origins.refused(repository)
    return session.request("POST", session.url("blobs/uploads/"), headers={"Content-Length": "0"})


def _mount(session: Session, digest: Digest, repository: str) -> RegistryResponse | None:
    """Request a mount; return None if there are no credentials for it.

    A token that another thread received a moment ago may lack the right to read the other
    repository, so a 401 is worth a second request.
    """
    query = urlencode({"mount": str(digest), "from": repository})
    url = session.url(f"blobs/uploads/?{query}")
    try:
        answer = session.request("POST", url, headers={"Content-Length": "0"})
        if answer.status_code == 401:
            answer.finish()
            answer = session.request("POST", url, headers={"Content-Length": "0"})
    except UnauthorizedError:
        return None
    return answer


class MountHolders:
    """The repositories that may have a blob in the registry of ``target``, by a store's tags.

    The store is read once, when the first blob is missing in the registry.
    """

    def __init__(self, store: ContentStore, target: Reference) -> None:
        self._store = store
        self._target = target
        self._lock = threading.Lock()
        self._known: dict[Digest, list[str]] | None = None

    def __call__(self, digest: Digest) -> Sequence[str]:
        with self._lock:
            if self._known is None:
                self._known = holders(self._manifests())
            return self._known.get(digest, ())

    def _manifests(self) -> Iterator[tuple[str, Manifest]]:
        names = sibling_repositories(self._store.tags(), self._target)
        for repository, descriptor in names[:_MANIFESTS_READ]:
            try:
                raw = read_all(self._store.open(descriptor), descriptor)
                yield repository, Manifest.parse(raw, descriptor.media_type)
            except AImageError:
                continue  # not ours to judge here: it only could have saved some time


def sibling_repositories(
    names: Iterable[tuple[str, Descriptor]], target: Reference
) -> list[tuple[str, Descriptor]]:
    """Return the manifests of the store in other repositories of the registry of ``target``."""
    found: dict[tuple[str, Digest], Descriptor] = {}
    for name, descriptor in names:
        try:
            reference = Reference.parse(name)
        except AImageError:
            continue  # a name that another tool gave
        if reference.registry != target.registry or reference.repository == target.repository:
            continue
        if descriptor.media_type in mediatype.MANIFESTS:
            found[reference.repository, descriptor.digest] = descriptor
    return [(repository, descriptor) for (repository, _), descriptor in found.items()]


def holders(manifests: Iterable[tuple[str, Manifest]]) -> dict[Digest, list[str]]:
    """Return the repositories of each blob in ``manifests``."""
    found: dict[Digest, list[str]] = {}
    for repository, manifest in manifests:
        for blob in manifest.children:
            places = found.setdefault(blob.digest, [])
            if repository not in places:
                places.append(repository)
    return found
