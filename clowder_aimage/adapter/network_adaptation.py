"""The adapters of one network, whichever library computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use


class NetworkAdaptation(ABC):
    """The adapters of one network, whose tensors are called ``component/name``.

    ``sanitize`` returns the name of the parameter of a tensor, ``skip`` whether the network does
    not have it. ``_undoing`` has the functions that put back what was changed.
    """

    def __init__(
        self, component: str, sanitize: Callable[[str], str], skip: Callable[[str], bool]
    ) -> None:
        self.component = component
        self._sanitize, self._skip = sanitize, skip
        self._uses: tuple[Use, ...] = ()
        self._applied: tuple[Use, ...] = ()
        self._network: Any = None
        self._undoing: list[Callable[[], object]] = []

    def use(self, uses: Sequence[Use]) -> None:
        """Set the adapters of the network; ``apply`` puts them in."""
        self._uses = tuple(use for use in uses if use[1] and self.tensors(use[0]))

    def tensors(self, adapter: LoadedAdapter) -> list[str]:
        """Return the names of the tensors of the network that an adapter changes."""
        prefix = f"{self.component}/"
        names = (name.removeprefix(prefix) for name in adapter.tensors if name.startswith(prefix))
        return sorted(name for name in names if not self._skip(name))

    def release(self) -> None:
        """Forget the network."""
        self._network, self._applied, self._undoing = None, (), []

    def apply(self, network: Any) -> None:
        """Put the adapters into ``network``, in place of those that were there.

        Raises:
            ModelError: An adapter changes a tensor that the network does not have as values.
        """
        if network is not self._network:
            self.release()
            self._network = network
        if self._applied == self._uses:
            return
        self._undo()
        try:
            self._put(self._uses)
        except BaseException:
            self._undo()  # the next request may have no adapters
            raise
        self._applied = self._uses

    @abstractmethod
    def _put(self, uses: Sequence[Use]) -> None:
        """Change the network; add to ``_undoing`` for each change."""

    def _undo(self) -> None:
        """Put back what was changed."""
        for undo in self._undoing:
            undo()
        self._undoing, self._applied = [], ()
