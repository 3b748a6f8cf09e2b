"""find_adapters: list the adapters of a model, in the store and in its registry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from clowder_aimage.content.store import Source
from clowder_aimage.errors import AImageError, NotFoundError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import interpret, read_manifest
from clowder_aimage.oci import Descriptor, Digest, Reference
from clowder_aimage.registry import ClientOptions, Repository, is_generated, list_repositories

# Repositories of a registry, adapters of a repository and tags of a repository that are read.
MAX_REPOSITORIES = 200
MAX_ADAPTERS = 200
MAX_TAGS = 50


@dataclass(slots=True)
class FoundAdapter:
    """An adapter: its name, its digest, its facts, and where it is: store, registry or both."""

    reference: Reference
    digest: Digest
    facts: dict[str, Any]
    places: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the adapter for programs."""
        keys = ("title", "type", "rank", "triggerWords", "weight", "base")
        stated = {key: self.facts[key] for key in keys if key in self.facts}
        where = {"reference": str(self.reference), "digest": str(self.digest)}
        return {**where, **stated, "places": self.places}


def find_adapters(
    layout: ImageLayout,
    reference: Reference,
    connect: Callable[[], ClientOptions],
    *,
    on_skip: Callable[[str], None] = lambda _: None,
) -> list[FoundAdapter]:
    """Return the adapters whose subject is ``reference``, in the store and in its registry.

    In a registry these are the referrers in its repository, and in the other repositories that the
    registry lists. ``on_skip`` is called with a sentence about what could not be read.

    Raises:
        NotFoundError: the model is neither in the store nor in its registry.
        UnauthorizedError, NetworkError, RegistryError: its repository cannot be read.
    """
    found: dict[Digest, FoundAdapter] = {}
    subjects: set[Digest] = set()
    missing: NotFoundError | None = None
    try:
        subjects.add(layout.resolve(reference).digest)
    except NotFoundError as error:
        missing = error
    connection = connect()
    remote = connection.expand(reference)
    if remote.registry is not None:
        try:
            with Repository(remote, connection) as repository:
                subjects.add(repository.resolve(remote).digest)
        except NotFoundError as error:
            missing = missing and error
            if not subjects:
                raise
            on_skip(f"{remote} is not in its registry")
    if not subjects and missing is not None:
        raise missing
    for adapter in _iter_stored(layout, subjects):
        found.setdefault(adapter.digest, adapter)
    for adapter in _iter_remote(remote, subjects, connection, on_skip) if remote.registry else ():
        entry = found.setdefault(adapter.digest, adapter)
        if "registry" not in entry.places:
            entry.places.append("registry")
    return sorted(found.values(), key=lambda adapter: str(adapter.reference))


def _iter_stored(layout: ImageLayout, subjects: set[Digest]) -> Iterator[FoundAdapter]:
    for name, descriptor in layout.iter_entries():
        # Other tools' names and artifacts, and what is missing or damaged, are those of verify.
        with contextlib.suppress(AImageError):
            facts = _read_facts(layout, descriptor, subjects)
            if facts is not None and name:
                yield FoundAdapter(Reference.parse(name), descriptor.digest, facts, ["store"])


def _read_facts(
    source: Source, descriptor: Descriptor, subjects: set[Digest]
) -> dict[str, Any] | None:
    """Return the facts of an adapter of a subject; None for another artifact."""
    manifest = read_manifest(source, descriptor)
    if manifest.subject is None or manifest.subject.digest not in subjects:
        return None
    properties = interpret(source, descriptor, manifest).aimage.properties
    facts = properties.get("adapter")
    return dict(facts) if properties.get("format") == "lora" and isinstance(facts, dict) else None


def _iter_remote(
    base: Reference,
    subjects: set[Digest],
    connection: ClientOptions,
    on_skip: Callable[[str], None],
) -> Iterator[FoundAdapter]:
    """Yield the adapters in the repository of the base, then in others of the registry."""
    yield from _iter_repository(base, subjects, connection)
    host = base.registry or ""
    try:
        names = [name for name in list_repositories(host, connection) if name != base.repository]
    except AImageError as error:
        on_skip(f"only the repository {base.name} was read: {error.message}")
        return
    if len(names) > MAX_REPOSITORIES:
        on_skip(f"only {MAX_REPOSITORIES} of {len(names)} other repositories of {host} were read")
    unread = 0
    for name in names[:MAX_REPOSITORIES]:
        try:
            other = Reference.parse(f"{host}/{name}")
            yield from _iter_repository(other, subjects, connection)
        except AImageError:
            unread += 1
    if unread:
        on_skip(f"{unread} other repositories of {host} could not be read")


def _iter_repository(
    place: Reference, subjects: set[Digest], connection: ClientOptions
) -> Iterator[FoundAdapter]:
    with Repository(place, connection) as repository:
        adapters = []
        for subject in sorted(subjects, key=str):
            for entry in repository.list_referrers(subject)[:MAX_ADAPTERS]:
                # One artifact that is damaged or of another kind does not hide the others.
                with contextlib.suppress(AImageError):
                    plain = Descriptor(entry.media_type, entry.digest, entry.size)
                    if (facts := _read_facts(repository, plain, subjects)) is not None:
                        adapters.append(FoundAdapter(place, entry.digest, facts, ["registry"]))
        if not adapters:
            return
        tags = _read_tags(repository, place)
        for adapter in adapters:
            adapter.reference = tags.get(adapter.digest, place.with_digest(adapter.digest))
        yield from adapters


def _read_tags(repository: Repository, place: Reference) -> dict[Digest, Reference]:
    """Return the first tag of each manifest in a repository; none if they cannot be read."""
    tags: dict[Digest, Reference] = {}
    with contextlib.suppress(AImageError):
        names = [tag for tag in repository.list_tag_names() if not is_generated(tag)]
        for name in names[:MAX_TAGS]:
            tagged = replace(place, tag=name, digest=None)
            tags.setdefault(repository.resolve(tagged).digest, tagged)
    return tags
