"""The refusal of a model whose files cannot be run here, however often they are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from clowder_aimage.errors import (
    ChatTemplateError,
    FormatError,
    ModelError,
    NoMemoryError,
    StuckError,
    UnrunnableError,
)


@contextlib.contextmanager
def refuse_unrunnable() -> Iterator[None]:
    """Raise UnrunnableError for errors of the files of a model, which are complete."""
    try:
        yield
    # Other memory may suffice; the others have a status of their own, or end the process
    except (NoMemoryError, ChatTemplateError, StuckError, UnrunnableError):
        raise
    except (ModelError, FormatError) as error:
        raise UnrunnableError(error.message, **error.advice) from error
