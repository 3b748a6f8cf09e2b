"""The adapters of a network, independent of the library that computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use

# Of each picture of a batch, or of all
Rows = tuple[tuple[Use, ...], ...]
_NONE: Rows = ((),)


class NetworkAdaptation(ABC):
    """The adapters of a network with tensors ``component/name``.

    ``sanitize`` returns the name of the parameter of a tensor; ``skip`` is True for a tensor that
    the network does not have. ``_undoing`` has the functions that undo the changes.
    """

    def __init__(
        self, component: str, sanitize: Callable[[str], str], skip: Callable[[str], bool]
    ) -> None:
        self.component = component
        self._sanitize, self._skip = sanitize, skip
        # Of each picture of a batch; one if they are those of all
        self._rows: Rows = _NONE
        self._applied: Rows = _NONE
        self._network: Any = None
        self._undoing: list[Callable[[], object]] = []

    def use(self, uses: Sequence[Use]) -> None:
        """Set the adapters of the network; ``apply`` changes it."""
        self.use_each([uses])

    def use_each(self, rows: Sequence[Sequence[Use]]) -> None:
        """Set the adapters of each picture of a batch, which ``can_mix``; or those of all."""
        first, *others = (self._select(uses) for uses in rows)
        self._rows = (first,) if all(row == first for row in others) else (first, *others)

    def _select(self, uses: Sequence[Use]) -> tuple[Use, ...]:
        return tuple(use for use in uses if use[1] and any(self._iter_tensors(use[0])))

    def can_mix(self, uses: Sequence[Use]) -> bool:  # noqa: ARG002 - of networks that can
        """Return True if pictures with these adapters can be in a batch with others."""
        return False

    def list_tensors(self, adapter: LoadedAdapter) -> list[str]:
        """Return the names of the network's tensors that an adapter changes."""
        return sorted(self._iter_tensors(adapter))

    def _iter_tensors(self, adapter: LoadedAdapter) -> Iterator[str]:
        prefix = f"{self.component}/"
        names = (name.removeprefix(prefix) for name in adapter.tensors if name.startswith(prefix))
        return (name for name in names if not self._skip(name))

    def release(self) -> None:
        """Release the network without undoing changes."""
        self._network, self._applied, self._undoing = None, _NONE, []

    def apply(self, network: Any) -> None:
        """Apply the adapters to ``network`` in place of the previous ones.

        Raises:
            ModelError: An adapter changes a tensor that is missing or quantized.
        """
        if network is not self._network:
            self.release()
            self._network = network
        # Successive requests often have the same adapters.
        if self._applied == self._rows:
            return
        self._undo()
        try:
            self._put(self._rows)
        except BaseException:
            # The next request may have no adapters.
            self._undo()
            raise
        self._applied = self._rows

    @abstractmethod
    def _put(self, rows: Rows) -> None:
        """Change the network; add to ``_undoing`` for each change."""

    def _undo(self) -> None:
        """Undo all changes."""
        for undo in reversed(self._undoing):
            undo()
        self._undoing, self._applied = [], _NONE
