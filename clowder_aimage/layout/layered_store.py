"""Several stores in order: all are read, the first is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from clowder_aimage.errors import NotFoundError
from clowder_aimage.layout.entry_name import is_same_name
from clowder_aimage.layout.entry_reader import EntryReader
from clowder_aimage.layout.ingest import build_blob_path, is_file
from clowder_aimage.layout.layout import ImageLayout, index_name
from clowder_aimage.layout.lease import FileLease
from clowder_aimage.oci import Descriptor, Digest, Reference


class LayeredStore(ImageLayout):
    """The store in ``roots[0]``, together with read-only stores in the other directories.

    A name is resolved by the first store that has it. Content of a read-only store is neither
    fetched again nor copied: the first store then depends on it.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        super().__init__(roots[0])
        self._read_only = [ImageLayout(root) for root in roots[1:]]

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self.root, *(layout.root for layout in self._read_only))

    def read_only_names(self) -> dict[str, Path]:
        local_names = {name for name, _ in super().iter_entries()}
        entries = [
            (name, layout.root) for layout in self._read_only for name, _ in layout.list_tags()
        ]
        return {name: root for name, root in reversed(entries) if name not in local_names}

    def iter_entries(self) -> Iterator[tuple[str, Descriptor]]:
        names: set[str] = set()
        listed = [super().iter_entries(), *(layout.iter_entries() for layout in self._read_only)]
        for name, descriptor in chain.from_iterable(listed):
            if not name or name not in names:
                yield name, descriptor
            names.add(name)

    def iter_candidates(self, reference: Reference) -> Iterator[tuple[str, Descriptor]]:
        yield from super().iter_candidates(reference)
        for layout in self._read_only:
            yield from layout.iter_candidates(reference)

    def iter_indexes(self) -> Iterator[tuple[str, Descriptor]]:
        yield from super().iter_indexes()
        for layout in self._read_only:
            yield from layout.iter_indexes()

    def build_entry_readers(self) -> list[EntryReader]:
        others = (layout.build_entry_readers() for layout in self._read_only)
        return [*super().build_entry_readers(), *chain.from_iterable(others)]

    def locate(self, content: Descriptor) -> str:
        local_path = super().locate(content)
        paths = [local_path, *(build_blob_path(layout.root, content) for layout in self._read_only)]
        return next((path for path in paths if is_file(path)), local_path)

    def untag(self, reference: Reference, /) -> None:
        try:
            super().untag(reference)
        except NotFoundError:
            for name, root in self.read_only_names().items():
                if name == index_name(reference) or is_same_name(name, reference):
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
