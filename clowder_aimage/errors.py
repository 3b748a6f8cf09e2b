"""Every error that the project raises on purpose.

    AImageError                    exit 1
    ├── ContentError               the input is wrong
    │   ├── UsageError             exit 2   an argument is invalid
    │   ├── ModelError             exit 1   a model (directory, config, weights) cannot be used
    │   ├── FormatError            exit 5   bytes do not parse as their media type
    │   └── VerificationError      exit 5   bytes do not match their digest
    └── AccessError                content could not be read or written
        ├── NotFoundError          exit 3   the name or digest does not exist
        ├── UnauthorizedError      exit 4   the registry requires (other) credentials
        ├── NetworkError           exit 1   no response, or an incomplete one
        ├── RegistryError          exit 1   the registry answered with an error
        │   └── ManifestRefusedError        ... to the kind of manifest, not to its content
        ├── StoreError             exit 1   the store on disk cannot be used
        └── NoSpaceError           exit 6   the disk is full

A message says what went wrong and with what. A hint says in general terms what would help. A
remedy is the code of a command that would help; the command line has the sentences
(``cli/console/remedy.py``), so that messages below it name no option and no verb.
"""

from __future__ import annotations

from typing import Any


class AImageError(Exception):
    """Base of all errors that a user may see.

    Args:
        message: What went wrong, and with what.
        hint: What would help, in terms that hold for every interface.
        remedy: The code of the command line's advice, a key of its table of remedies.
        facts: What that advice names: references, hosts, paths.

    ``exit_code`` is what the command exits with.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, hint: str | None = None, remedy: str = "", **facts: object
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.remedy = remedy
        self.facts = {name: str(fact) for name, fact in facts.items()}

    @property
    def advice(self) -> dict[str, Any]:
        """Return hint, remedy and facts, as arguments for an error that is raised in its place."""
        return {"hint": self.hint, "remedy": self.remedy, **self.facts}

    def __str__(self) -> str:
        return self.message


class ContentError(AImageError):
    """Error in what was received."""


class UsageError(ContentError):
    """An argument that cannot be meant: a bad name, size or combination."""

    exit_code = 2


class ModelError(ContentError):
    """A model that cannot be packed or run: its directory, configs or weights do not fit."""


class FormatError(ContentError):
    """Bytes that do not parse as what they claim to be."""

    exit_code = 5


class VerificationError(ContentError):
    """Bytes whose size or digest is not the promised one."""

    exit_code = 5


class AccessError(AImageError):
    """We could not get it, or could not keep it."""


class NotFoundError(AccessError):
    """There is nothing by that name or digest."""

    exit_code = 3


class UnauthorizedError(AccessError):
    """The registry refuses us without credentials, or with the ones we have."""

    exit_code = 4


class NetworkError(AccessError):
    """No answer, or an answer that broke off."""


class RegistryError(AccessError):
    """The registry answered with an error.

    ``status`` is the HTTP status, ``code`` the first error code of the distribution
    specification ("Error Codes") in its body, ``detail`` that error's detail as text;
    ``retry_after`` the seconds to wait before the next request.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "",
        detail: str = "",
        retry_after: float = 0.0,
        **advice: Any,
    ) -> None:
        super().__init__(message, **advice)
        self.status = status
        self.retry_after = retry_after
        self.code = code
        self.detail = detail


class ManifestRefusedError(RegistryError):
    """The registry does not take this kind of manifest; another dialect may pass."""


class StoreError(AccessError):
    """The store on disk cannot be used."""


class NoSpaceError(AccessError):
    """The disk is full. ``missing_size`` is how many more free bytes are needed; 0 if unknown."""

    exit_code = 6

    def __init__(self, message: str, *, missing_size: int = 0, **advice: Any) -> None:
        super().__init__(message, **advice)
        self.missing_size = missing_size
