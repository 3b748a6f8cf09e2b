"""Picture files of the user of this machine, read without the libraries that decode them."""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.errors import NotFoundError, StoreError, UsageError

# The limit of a picture file
_MAX_BYTES = 256 << 20


def read_file(path: Path) -> bytes:
    """Return a picture file. Raises NotFoundError, UsageError (too large), StoreError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"picture {path} not found") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} has more than {_MAX_BYTES} bytes")
    return data
