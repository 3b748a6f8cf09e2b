"""Several stores in order: all are read, the first is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout.index import same_name
from clowder_aimage.layout.ingest import blob_path, is_file
from clowder_aimage.layout.layout import ImageLayout, index_name
from clowder_aimage.layout.lease import FileLease
from clowder_aimage.oci import Descriptor, Digest, Reference


class LayeredStore(ImageLayout):
    """The store in ``roots[0]``, together with read-only stores in the other directories.

    A name is resolved by the first store that has it. Content of another store is neither fetched
    again nor copied: the first store then depends on it.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        super().__init__(roots[0])
        self._others = [ImageLayout(root) for root in roots[1:]]

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self.root, *(other.root for other in self._others))

    def borrowed(self) -> dict[str, Path]:
        own = {name for name, _ in super().entries()}
        later = [(name, other.root) for other in self._others for name, _ in other.tags()]
        return {name: root for name, root in reversed(later) if name not in own}

    def entries(self) -> Iterator[tuple[str, Descriptor]]:
        seen: set[str] = set()
        listed = [super().entries(), *(other.entries() for other in self._others)]
        for name, descriptor in chain.from_iterable(listed):
            if not name or name not in seen:
                yield name, descriptor
            seen.add(name)

    def place(self, content: Descriptor) -> str:
        own = super().place(content)
        places = [own, *(blob_path(other.root, content) for other in self._others)]
        return next((path for path in places if is_file(path)), own)

    def untag(self, reference: Reference, /) -> None:
        try:
            super().untag(reference)
        except NotFoundError:
            for name, root in self.borrowed().items():
                if name == index_name(reference) or same_name(name, reference):
                    raise read_only_error(reference, root, "rm") from None
            raise

    def lease(self, *digests: Digest) -> FileLease:
        return _Leases(self.roots, digests)


def read_only_error(reference: Reference, root: Path, verb: str) -> NotFoundError:
    """Return the error for a name in a read-only store; ``verb`` is the verb of the remedy."""
    return NotFoundError(
        f"{reference} is in the store {root}, which is read-only",
        remedy="other_store",
        root=root,
        verb=verb,
        reference=reference,
    )


class _Leases(FileLease):
    """A lease in each store; a read-only store has none."""

    def __init__(self, roots: Sequence[Path], digests: Sequence[Digest]) -> None:
        present = [root for root in roots if root == roots[0] or root.is_dir()]
        self._leases = [FileLease(root, digests) for root in present]

    def add(self, *digests: Digest) -> None:
        for lease in self._leases:
            lease.add(*digests)

    def close(self) -> None:
        for lease in self._leases:
            lease.close()
