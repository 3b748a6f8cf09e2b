"""Names for layers without Clowder's names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from clowder_aimage.dialect.aimage import Layer, check_name, check_names
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, mediatype

_WORD = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = re.compile(r"v?[0-9]+")
_GENERIC = frozenset("application vnd oci docker image layer diff raw tar gzip zstd json".split())


def clean_path(path: str) -> str:
    """Return a path of another tool as a layer's name: without ``./`` and ``/`` at its ends.

    It is empty for the root directory. Raises FormatError.
    """
    segments = [segment for segment in path.split("/") if segment not in ("", ".")]
    if path.startswith("/"):
        raise FormatError(f"invalid layer name: {path[:100]!r}")
    return check_name("/".join(segments)) if segments else ""


def name_layers(
    layers: Sequence[Descriptor],
    names: Sequence[str | None],
    read: Callable[[Descriptor, str], Layer],
) -> tuple[Layer, ...]:
    """Call ``read`` with each of ``layers`` and its unique name, and return the results.

    The name is that in ``names``, else the layer's title, else the most specific word of its media
    type with its position. Raises FormatError for invalid or duplicate names.
    """
    used = UsedNames(name for name in names if name is not None)
    return check_names(
        tuple(
            read(layer, used.add(_iter_proposals(layer, position)) if name is None else name)
            for position, (layer, name) in enumerate(zip(layers, names, strict=True))
        )
    )


class UsedNames:
    """Names of files that are in use, as are their directories."""

    def __init__(self, names: Iterable[str]) -> None:
        self._files = set(names)
        self._directories = {parent for name in self._files for parent in _iter_parents(name)}

    def add(self, proposals: Iterable[str]) -> str:
        """Add and return the first free name of ``proposals``, an infinite sequence."""
        name = next(proposal for proposal in proposals if self._is_free(proposal))
        self._files.add(name)
        self._directories.update(_iter_parents(name))
        return name

    def _is_free(self, name: str) -> bool:
        # A file system has no file and directory of one name.
        is_used = name in self._files or name in self._directories
        return not is_used and self._files.isdisjoint(_iter_parents(name))


def _iter_parents(name: str) -> Iterator[str]:
    """Yield the parent directories of a file."""
    parts = name.split("/")[:-1]
    yield from ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def number_names(name: str) -> Iterator[str]:
    """Yield ``model.gguf``, ``model-2.gguf``, ``model-3.gguf`` ..."""
    yield name
    stem, dot, suffix = name.rpartition(".")
    yield from (f"{stem}-{n}.{suffix}" if dot else f"{name}-{n}" for n in count(2))


def _iter_proposals(layer: Descriptor, position: int) -> Iterator[str]:
    # A title need not be a valid name.
    with contextlib.suppress(FormatError):
        yield check_name(layer.annotations.get(mediatype.TITLE, ""))
    plain = f"{_find_word(layer.media_type)}.{position}"
    yield plain
    yield from (f"{plain}-{number}" for number in count(2))


def _find_word(media_type: str) -> str:
    """Return the last specific word of a media type: ``gguf``, ``ep``, ``license``."""
    words = [word for word in _WORD.findall(media_type) if not _NUMBER.fullmatch(word)]
    return next((word for word in reversed(words) if word not in _GENERIC), "layer")[:100]
