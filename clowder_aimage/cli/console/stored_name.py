"""Arguments for AImages in the store: names, or the first digits of a digest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import click

from clowder_aimage.cli.console.option import complete_name, parse_reference, settings
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Digest, Reference

_PREFIX = re.compile(r"(sha256:|sha512:)?[0-9a-f]{4,128}")


def stored_reference(text: str) -> Reference:
    """Parse the name of an AImage in the store, or return the first name of a digest.

    A name in the store takes precedence. Raises UsageError: several digests begin with ``text``.
    """
    reference, found = _find(text)
    if found is None:
        return reference
    digest, names = found
    return names[0] if names else Reference(None, digest.short, None, digest)


def only_name(text: str) -> Reference:
    """Parse a name in the store, or return the only name of a digest.

    Raises UsageError: it has several, or none.
    """
    reference, found = _find(text)
    if found is None:
        return reference
    digest, names = found
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{digest.short} has no name in the store")
    listed = ", ".join(map(str, names))
    raise UsageError(f"{digest.short} has several names: {listed}", hint="use one of them")


def _find(text: str) -> tuple[Reference, tuple[Digest, list[Reference]] | None]:
    """Return the parsed text and, if it begins a digest in the store, that with its names."""
    reference = parse_reference(text)
    is_remote = click.get_current_context().params.get("remote")  # it is eager
    if is_remote or _PREFIX.fullmatch(text) is None:
        return reference, None
    layout, found = settings().layout, dict[Digest, list[Reference]]()
    with contextlib.suppress(NotFoundError):
        layout.resolve(reference)
        return reference, None
    for name, descriptor in layout.entries():
        if str(descriptor.digest).startswith(text) or descriptor.digest.encoded.startswith(text):
            names = found.setdefault(descriptor.digest, [])
            with contextlib.suppress(UsageError):  # no name, or another tool's
                names.append(parse_reference(name))
    if len(found) > 1:
        listed = (f"{one.short} ({', '.join(map(str, of))})" for one, of in found.items())
        raise UsageError(
            f"several digests begin with {text}: {', '.join(sorted(listed))}",
            hint="use more digits, or a name",
        )
    return reference, next(((one, sorted(of, key=str)) for one, of in found.items()), None)


def stored_argument(
    name: str = "reference",
    metavar: str | None = "REF",
    parse: Callable[[str], Reference] = stored_reference,
    **attributes: Any,
) -> Callable[[Any], Any]:
    """Return an argument for an AImage in the store, or with ``nargs`` -1 for several."""
    return click.argument(
        name, metavar=metavar, type=parse, shell_complete=complete_name, **attributes
    )


def stored_arguments(
    *, required: bool, parse: Callable[[str], Reference] = stored_reference
) -> Callable[[Any], Any]:
    """Return an argument for any number of AImages in the store."""
    metavar = "REF..." if required else "[REF...]"
    return stored_argument("references", metavar, parse, nargs=-1, required=required)
