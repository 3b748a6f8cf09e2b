"""A selection of layers by component and by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import NotFoundError
from clowder_aimage.oci import Reference, mediatype

_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """The layers in one of the ``components``, or with a name like one of the ``patterns``.

    A component is the first segment of a name, or several (``adapters/style``). In a pattern ``*``
    matches any characters, including slashes. Components include the top-level files that are not
    weights, such as ``model_index.json``.
    """

    components: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def list_names(self, aimage: AImage, reference: Reference) -> frozenset[str]:
        """Return the names of the selected layers.

        Raises:
            NotFoundError: a component or pattern matches no layer; the error lists the layers.
        """
        chosen: set[str] = set()
        unmatched: list[str] = []
        for component in self.components:
            start = f"{component.rstrip('/')}/"
            matches = {layer.name for layer in aimage.layers if layer.name.startswith(start)}
            chosen.update(matches)
            unmatched += [] if matches else [f"no component {component!r:.100}"]
        for pattern in self.patterns:
            matches = {layer.name for layer in aimage.layers if fnmatchcase(layer.name, pattern)}
            chosen.update(matches)
            unmatched += [] if matches else [f"no layer matching {pattern!r:.100}"]
        if unmatched:
            raise _build_not_found_error(aimage, reference, unmatched)
        if self.components:
            chosen.update(layer.name for layer in aimage.layers if _is_top_file(layer))
        return frozenset(chosen)


def _is_top_file(layer: Layer) -> bool:
    kind, _ = mediatype.split_compression(layer.descriptor.media_type)
    return not layer.component and kind == mediatype.AIMAGE_FILE


def _build_not_found_error(
    aimage: AImage, reference: Reference, missed: Sequence[str]
) -> NotFoundError:
    components = dict.fromkeys(layer.component for layer in aimage.layers if layer.component)
    top = [layer.name for layer in aimage.layers if not layer.component]
    available = [f"the components {join_names(components)}"] if components else []
    available += [f"the top-level layers {join_names(top)}"] if top else []
    example = f", such as {aimage.layers[-1].name}" if aimage.layers else ""
    return NotFoundError(
        f"{reference} has {' and '.join(missed)}; it has {' and '.join(available) or 'no layers'}",
        hint=f"nothing was fetched; a pattern must match a complete layer name{example}",
    )


def join_names(names: Iterable[str]) -> str:
    """Return the names in one line, at most twenty."""
    ordered = list(names)
    shown = ", ".join(ordered[:_MAX_LISTED])
    return f"{shown} and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else shown
