"""An AImage that is pulled in the background while its smaller variant generates pictures."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.oci import Reference
    from clowder_aimage.registry import ClientOptions


class LaterModel:
    """A pull in a thread that ends with the process; what has arrived is kept for the next pull."""

    def __init__(
        self, reference: Reference, layout: ImageLayout, connection: ClientOptions, variant: str
    ) -> None:
        self._result: Future[None] = Future()
        self._arguments = reference, layout, connection
        self._variant = variant
        threading.Thread(target=self._pull, daemon=True, name="aimage-pull").start()

    @property
    def is_done(self) -> bool:
        """Return whether the pull has ended."""
        return self._result.done()

    def end(self) -> None:
        """Wait for the end of the pull. Raises as ``pull``."""
        self._result.result()

    def _pull(self) -> None:
        from clowder_aimage.content.platform import ManifestSelector
        from clowder_aimage.pull import PullOptions, pull

        try:
            pull(*self._arguments, PullOptions(ManifestSelector(last=self._variant)))
            self._result.set_result(None)
        except BaseException as error:
            self._result.set_exception(error)
