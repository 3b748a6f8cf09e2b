"""Cross-repository mount (distribution-spec, "Mounting a blob from another repository", end-11).

Blobs in another repository of the registry are not sent. After a failed mount they are uploaded. A
registry may confirm a mount and not have the blob then: distribution 2.8 does for sha512.

A mount of a blob from the repository itself shows whether it has the blob, and begins an upload if
not: one request in place of two.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

from clowder_aimage.content.copy_option import CopyEvent, OnEvent, ignore
from clowder_aimage.content.store import ContentStore
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AImageError, UnauthorizedError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.registry.response import RegistryResponse, build_response_error
from clowder_aimage.registry.retry import IntermediaryError
from clowder_aimage.registry.session import Session

# Blobs that are missing in the registry, one after the other, before mounts replace HEAD requests.
LEARNED_AFTER = 8
# Repositories that are tried for one blob.
CANDIDATES = 3
# Manifests of a store that are read, to find the blobs of other repositories.
_MANIFESTS_READ = 64

# Returns the repositories that may have a blob.
Find = Callable[[Digest], Sequence[str]]


class MountOrigins:
    """The repositories of a registry that a blob may be mounted from, in order of likelihood.

    ``find`` returns the repositories that may have a blob. Those that the registry refused are not
    requested again. A mounted blob is reported as already present.

    Mounts from the own repository are used once the registry has answered one of a missing blob
    by beginning an upload, and then one of the same blob, after its upload, by 201.
    """

    def __init__(self, find: Find = lambda _: (), on_event: OnEvent = ignore) -> None:
        self._find, self._on_event = find, on_event
        self._refused: set[str] = set()
        self._missing: set[str] = set()
        self._mounted: set[Digest] = set()
        self._is_stopped = False
        self._lock = threading.Lock()
        # True if mounts from the own repository show what it has; None while that is not known.
        self._own: bool | None = None
        # Blobs in a row that were missing, and the one whose upload shows how mounts are answered.
        self._absent = 0
        self._probe: Digest | None = None

    def stop(self) -> set[Digest]:
        """Mount no more blobs; return those that were mounted."""
        self._is_stopped, self._own = True, False
        mounted, self._mounted = self._mounted, set()
        return mounted

    def of(self, digest: Digest) -> list[str]:
        """Return the repositories to mount a blob from; those that lacked another blob are last."""
        if self._is_stopped:
            return []
        repositories = [name for name in self._find(digest) if name not in self._refused]
        return sorted(repositories, key=lambda name: name in self._missing)[:CANDIDATES]

    def shows_presence(self, digest: Digest) -> bool:
        """Return True if ``begin`` finds out whether the repository has a blob."""
        return bool(self._own) and digest.algorithm == "sha256" and not self.of(digest)

    def record_presence(self, digest: Digest, *, is_present: bool) -> None:
        """Record whether the repository had a blob before its upload."""
        with self._lock:
            self._absent = 0 if is_present else self._absent + 1
            is_known = self._own is not None or self._probe is not None
            if self._absent > LEARNED_AFTER and not is_known and digest.algorithm == "sha256":
                self._probe = digest

    def record_upload(self, session: Session, digest: Digest) -> None:
        """Record that a blob was uploaded: a mount of it from its own repository must succeed."""
        if self._own is not None or digest != self._probe:
            return
        self._own = False
        with contextlib.suppress(AImageError):
            answer = _mount(session, digest, session.repository)
            if answer is None:
                return
            answer.finish()
            self._own = answer.status_code == 201
            if not self._own and _begins_upload(answer):
                url = session.join_upload(answer.headers["Location"], answer.url)
                session.request("DELETE", url, actions="pull,push").finish()

    def begin(
        self, session: Session, content: Descriptor, resource: str
    ) -> RegistryResponse | None:
        """Mount a blob, or begin its upload; return the response to that, or None if mounted.

        A response 202 to a mount begins an upload, too. Raises as ``begin_upload`` does.
        """
        for repository in self.of(content.digest):
            answer = _mount(session, content.digest, repository)
            is_mounted = answer is not None and answer.status_code == 201
            if answer is not None and not is_mounted and _begins_upload(answer):
                self._missing.add(repository)
                return answer
            if answer is not None:
                answer.finish()
            if is_mounted:
                self._mounted.add(content.digest)
                self._on_event(CopyEvent("skip", content, content.size))
                return None
            self._refused.add(repository)
        is_probe = self._own is None and content.digest == self._probe
        if is_probe or self.shows_presence(content.digest):
            answer = _mount(session, content.digest, session.repository)
            if answer is not None and answer.status_code != 201 and _begins_upload(answer):
                return answer
            if answer is not None:
                answer.finish()
            if answer is not None and answer.status_code == 201 and not is_probe:
                self._mounted.add(content.digest)
                self._on_event(CopyEvent("skip", content, content.size))
                return None
            # The registry confirms what it does not have, or refuses such mounts.
            self._own = False
        return begin_upload(session, resource)


def begin_upload(session: Session, resource: str) -> RegistryResponse:
    """Begin an upload; return the response, which has a Location. Raises AImageError."""
    response = _begin(session, "")
    if _begins_upload(response):
        return response
    if response.status_code == 202:
        response.finish()
        raise IntermediaryError("the registry began an upload but sent no Location header")
    raise build_response_error(response, resource)


def _begins_upload(response: RegistryResponse) -> bool:
    """Return True if a response has the location of an upload: 202, or another success."""
    return response.is_success and bool(response.headers.get("Location"))


def _begin(session: Session, query: str) -> RegistryResponse:
    url = session.build_url(f"blobs/uploads/{query}")
    return session.request("POST", url, headers={"Content-Length": "0"})


def _mount(session: Session, digest: Digest, repository: str) -> RegistryResponse | None:
    """Request a mount; return None if there are no credentials for it.

    A token that another thread has just received may lack the permission to read the other
    repository, so a 401 is worth a second request.
    """
    query = f"?mount={digest.algorithm}%3A{digest.encoded}&from={quote(repository, safe='')}"
    try:
        answer = _begin(session, query)
        if answer.status_code == 401:
            answer.finish()
            answer = _begin(session, query)
    except UnauthorizedError:
        return None
    return answer


class MountHolders:
    """The repositories that may have a blob in the registry of ``target``, by a store's tags.

    The store is read once, when the first blob is missing in the registry.
    """

    def __init__(self, store: ContentStore, target: Reference) -> None:
        self._store, self._target = store, target
        self._lock = threading.Lock()
        self._holders: dict[Digest, list[str]] | None = None

    def __call__(self, digest: Digest) -> Sequence[str]:
        with self._lock:
            if self._holders is None:
                self._holders = self._read()
            return self._holders.get(digest, ())

    def _read(self) -> dict[Digest, list[str]]:
        holders: dict[Digest, dict[str, None]] = {}
        names = list_sibling_repositories(self._store.list_tags(), self._target)
        for repository, descriptor in names[:_MANIFESTS_READ]:
            try:
                raw = read_all(self._store.open(descriptor), descriptor)
                blobs = Manifest.parse(raw, descriptor.media_type).children
            except AImageError:
                # Mounting is only an optimisation.
                continue
            for blob in blobs:
                holders.setdefault(blob.digest, {})[repository] = None
        return {digest: list(repositories) for digest, repositories in holders.items()}


def list_sibling_repositories(
    names: Iterable[tuple[str, Descriptor]], target: Reference
) -> list[tuple[str, Descriptor]]:
    """Return the manifests of the store in other repositories of the registry of ``target``."""
    manifests: dict[tuple[str, Digest], Descriptor] = {}
    for name, descriptor in names:
        try:
            reference = Reference.parse(name)
        except AImageError:
            # Another tool's name need not be a reference.
            continue
        is_sibling = reference.registry == target.registry and reference.name != target.name
        if is_sibling and descriptor.media_type in mediatype.MANIFESTS:
            manifests[reference.canonical.repository, descriptor.digest] = descriptor
    return [(repository, descriptor) for (repository, _), descriptor in manifests.items()]
