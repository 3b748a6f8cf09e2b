"""Every error that the project raises on purpose.

Messages and hints name no option and no verb: a remedy is the code of a command that would help,
and the command line has the sentences (``cli/console/remedy.py``).
"""

from __future__ import annotations

from typing import Any


class AImageError(Exception):
    """Base of all errors that a user may see; the command exits with ``exit_code``.

    ``message`` is what went wrong, and with what; ``hint`` what would help, in terms that hold for
    every interface; ``remedy`` a key of the command line's table of remedies, and ``facts`` are
    what that advice names: references, hosts, paths.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, hint: str | None = None, remedy: str = "", **facts: object
    ) -> None:
        super().__init__(message)
        self.message, self.hint, self.remedy = message, hint, remedy
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
    specification ("Error Codes") in its body, ``detail`` that error's detail as text,
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
        self.status, self.code, self.detail = status, code, detail
        self.retry_after = retry_after


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
