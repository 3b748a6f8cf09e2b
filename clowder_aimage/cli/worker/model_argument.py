"""The model that a verb runs: a name, a short name, or a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clowder_aimage.cli.console.option import ModelParameter
from clowder_aimage.cli.console.stored_name import pack_path, resolve_model_or_path, stored_argument
from clowder_aimage.cli.worker.choice import find_default_worker
from clowder_aimage.cli.worker.remote_name import obtain_remotely
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.config.name_index import NamedModel
    from clowder_aimage.engine.worker_client import WorkerClient


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """A model on the command line. The way to its name is ``obtain``."""

    typed: Reference | Path

    @classmethod
    def parse(cls, text: str) -> ModelArgument:
        """Parse a name or a path. Raises as ``resolve_model_or_path``."""
        return cls(resolve_model_or_path(text))

    def obtain(
        self, client: WorkerClient | None, *, is_local: bool, check: Callable[[NamedModel], None]
    ) -> Reference:
        """Return the name of the model. Raises as ``pack_path`` and ``obtain_model``."""
        if isinstance(self.typed, Path):
            return pack_path(self.typed, client)
        return obtain_model(self.typed, client, is_local=is_local, check=check)


# The option --yes comes with it.
model_argument = stored_argument("model", parse=ModelArgument.parse, cls=ModelParameter)


def obtain_model(
    reference: Reference,
    client: WorkerClient | None,
    *,
    check: Callable[[NamedModel], None],
    is_local: bool = False,
) -> Reference:
    """Return a name that the worker, the store or a registry has: a short name is fetched.

    The worker is that of ``client``. Without one it is the default worker, unless ``is_local``.
    ``check`` raises the errors of the verb for a model of the index before the user is asked.
    Raises as ``obtain_remotely`` and ``named_model.obtain``.
    """
    if reference.registry is not None:
        return reference
    if client is not None:
        return obtain_remotely(client, reference, check) or reference
    from clowder_aimage.cli.create.named_model import is_stored, obtain

    if is_stored(reference) or (not is_local and find_default_worker(reference)):
        return reference
    return obtain(reference, check)
