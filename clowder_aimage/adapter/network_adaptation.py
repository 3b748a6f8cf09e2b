"""The adapters of a network, independent of the library that computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use


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
        self._uses: tuple[Use, ...] = ()
        self._applied: tuple[Use, ...] = ()
        self._network: Any = None
        self._undoing: list[Callable[[], object]] = []

    def use(self, uses: Sequence[Use]) -> None:
        """Set the adapters of the network; ``apply`` changes it."""
        self._uses = tuple(use for use in uses if use[1] and self.list_tensors(use[0]))

    def list_tensors(self, adapter: LoadedAdapter) -> list[str]:
        """Return the names of the network's tensors that an adapter changes."""
        prefix = f"{self.component}/"
        names = (name.removeprefix(prefix) for name in adapter.tensors if name.startswith(prefix))
        return sorted(name for name in names if not self._skip(name))

    def release(self) -> None:
        """Release the network without undoing changes."""
        self._network, self._applied, self._undoing = None, (), []

    def apply(self, network: Any) -> None:
        """Apply the adapters to ``network`` in place of the previous ones.

        Raises:
            ModelError: An adapter changes a tensor that is missing or quantized.
        """
        if network is not self._network:
            self.release()
            self._network = network
        # Successive requests often have the same adapters.
        if self._applied == self._uses:
            return
        self._undo()
        try:
            self._put(self._uses)
        except BaseException:
            # The next request may have no adapters.
            self._undo()
            raise
        self._applied = self._uses

    @abstractmethod
    def _put(self, uses: Sequence[Use]) -> None:
        """Change the network; add to ``_undoing`` for each change."""

    def _undo(self) -> None:
        """Undo all changes."""
        for undo in reversed(self._undoing):
            undo()
        self._undoing, self._applied = [], ()
