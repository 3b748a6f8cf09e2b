"""Exceptions of the project.

    AImageError                    exit 1
    ├── ContentError               the input is wrong
    │   ├── UsageError             exit 2   an argument is invalid
    │   │   └── TooLargeError               ... an input has too many bytes
    │   ├── ModelError             exit 1   a model (directory, config, weights) cannot be used
    │   │   ├── ChatTemplateError           ... because of its chat template
    │   │   ├── UnrunnableError             ... by this installation
    │   │   └── StuckError                  ... and a call that reads it does not end
    │   ├── FormatError            exit 5   bytes do not parse as their media type
    │   │   └── NoPictureError              ... an artifact that was to have a picture has none
    │   ├── VerificationError      exit 5   bytes do not match their digest
    │   └── PolicyError            exit 5   content is not accepted by its signer or licence
    │       ├── SignatureError              ... it has no signature of an expected signer
    │       └── LicenseError                ... its licence is not one that the policy accepts
    └── AccessError                content could not be read or written
        ├── NotFoundError          exit 3   the name or digest does not exist
        ├── UnauthorizedError      exit 4   the registry requires (other) credentials
        ├── ForbiddenError         exit 4   the operator does not permit to read it
        ├── NetworkError           exit 1   no response, or an incomplete one
        ├── RegistryError          exit 1   the registry answered with an error
        │   └── ManifestRefusedError        ... to the kind of manifest, not to its content
        ├── StoreError             exit 1   the store on disk cannot be used
        └── NoSpaceError           exit 6   the disk is full

A message describes the failure and its object. A hint suggests a solution in general terms. A
remedy is the code of a command that would help; the command line has the texts
(``cli/console/remedy.py``), so that messages of lower layers contain no option and no verb.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar


class AImageError(Exception):
    """Base class of all errors that a user may see.

    Args:
        message: A description of the failure and its object.
        hint: A suggestion in terms that apply to every interface.
        remedy: The code of the command line's advice, a key of its table of remedies.
        facts: Values for that advice: references, hosts, paths.

    ``exit_code`` is the exit status of the command.
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
        """Return hint, remedy and facts, as arguments for an error that replaces this one."""
        return {"hint": self.hint, "remedy": self.remedy, **self.facts}

    def __str__(self) -> str:
        return self.message


_T = TypeVar("_T")
_V = TypeVar("_V")


def describe_each(
    items: Iterable[_T], describe: Callable[[_T], _V], on_error: Callable[[_T, Exception], object]
) -> Iterator[_V]:
    """Yield the description of each item of a list; pass malformed items to ``on_error``.

    Items may be untrusted: a malformed one must not hide the others.
    """
    for item in items:
        try:
            yield describe(item)
        # Any exception: a parser's unforeseen error counts as a malformed item, too.
        except Exception as error:
            on_error(item, error)


class ContentError(AImageError):
    """The input is wrong."""


class UsageError(ContentError):
    """An argument is invalid: a bad name, size or combination."""

    exit_code = 2


class TooLargeError(UsageError):
    """An input has more bytes or pixels than are accepted."""


class ModelError(ContentError):
    """A model cannot be packed or run: its directory, configs or weights do not fit."""


class NoMemoryError(ModelError):
    """The memory is insufficient for a model or a picture."""


class ChatTemplateError(ModelError):
    """The chat template of a model cannot be read, or fails."""


class UnrunnableError(ModelError):
    """This installation cannot run a model: another request for it would fail alike."""


class StuckError(ModelError):
    """A call of a library does not end: its thread stays, so the process should exit."""


class FormatError(ContentError):
    """Bytes do not parse as their media type."""

    exit_code = 5


class NoPictureError(FormatError):
    """An artifact has no picture."""


class VerificationError(ContentError):
    """Bytes do not match the expected size or digest."""

    exit_code = 5


class PolicyError(ContentError):
    """Content is not accepted, by its signer or its licence."""

    exit_code = 5


class SignatureError(PolicyError):
    """Content has no signature of an expected signer."""


class LicenseError(PolicyError):
    """Content has a licence that the policy does not accept, or none."""


class AccessError(AImageError):
    """Content could not be read or written."""


class NotFoundError(AccessError):
    """The name or digest does not exist."""

    exit_code = 3


class UnauthorizedError(AccessError):
    """The registry requires credentials, or refuses the given ones."""

    exit_code = 4


class ForbiddenError(AccessError):
    """The operator or the network's boundary does not permit to read it."""

    exit_code = 4


class NetworkError(AccessError):
    """No response, or an incomplete one."""


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

    @property
    def is_blob_unknown(self) -> bool:
        """True if the registry misses a blob of a manifest."""
        return self.code in ("MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN")


class ManifestRefusedError(RegistryError):
    """The registry refuses this kind of manifest; another dialect may be accepted."""


class StoreError(AccessError):
    """The store on disk cannot be used."""


class StoreBusyError(StoreError):
    """Another process has locked the store for too long."""


class NoSpaceError(AccessError):
    """The disk is full. ``missing_size`` is the number of missing free bytes; 0 if unknown."""

    exit_code = 6

    def __init__(self, message: str, *, missing_size: int = 0, **advice: Any) -> None:
        super().__init__(message, **advice)
        self.missing_size = missing_size


def is_passing(error: Exception) -> bool:
    """Return True if content is missing, damaged or cannot be read: it may be repaired later.

    That it has no signature may change, too.
    """
    passing = AccessError | VerificationError | SignatureError | OSError | MemoryError
    return isinstance(error, passing)


def build_extra_error(subject: str, extra: str) -> UsageError:
    """Return the error for a library that ``subject`` needs and that ``extra`` installs.

    ``extra`` may have others before it that are of use with it.
    """
    message = f"{subject} needs the extra [{extra.rpartition(',')[2]}]"
    return UsageError(message, remedy="install_extra", extra=extra)


@contextlib.contextmanager
def needs(subject: str, extra: str) -> Iterator[None]:
    """Convert an import that fails into ``build_extra_error``, unless it is of this package."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of this package is a defect.
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise build_extra_error(subject, extra) from None
