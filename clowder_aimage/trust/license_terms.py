"""The licences that a policy accepts: lists of allowed and denied ones.

Of alternatives (``OR``), one must be accepted; of licences that apply together (``AND``), all. A
denied licence is not accepted, allowed or not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from clowder_aimage.document.license_expression import (
    Expression,
    License,
    build_reference,
    list_identifiers,
    parse_expression,
    parse_license,
)
from clowder_aimage.document.similarity import find_nearest
from clowder_aimage.errors import FormatError, UsageError

# Characters of a licence in a message
_SHOWN = 200
# An entry with wildcards: part of an identifier
_PATTERN = re.compile(r"[A-Za-z0-9.:*-]*\*[A-Za-z0-9.:*-]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """A licence in a list: an identifier in lower case, in which ``*`` stands for any text.

    Without ``or_later``, it is for this version alone and for this or later ones, and without an
    exception for the licence with exceptions, too.
    """

    text: str
    id: str
    or_later: bool = False
    exception: str = ""

    def includes(self, license_: License) -> bool:
        """Return True if the entry is for a licence."""
        if self.exception and self.exception != license_.exception.lower():
            return False
        if self.or_later and not license_.or_later:
            return False
        return fnmatchcase(license_.id.lower(), self.id)

    def permits(self, license_: License) -> bool:
        """Return True if the entry includes a licence, with what it says about exceptions.

        An exception on SPDX's list permits more than the licence; others may restrict.
        """
        is_known = license_.is_listed or not license_.exception or bool(self.exception)
        return is_known and self.includes(license_)


@dataclass(frozen=True, slots=True)
class LicenseTerms:
    """The licences that the policy in ``source`` accepts; ``id`` is a hash of them."""

    allow: tuple[Entry, ...]
    deny: tuple[Entry, ...]
    accepts_unknown: bool
    source: str
    id: str

    def find_fault(self, stated: Sequence[str]) -> str | None:
        """Return why an AImage that states these licences is not accepted, None if it is."""
        if not stated:
            return None if self.accepts_unknown else "it states no licence (unknown: deny)"
        for text in stated:
            try:
                expression = parse_expression(text)
            except FormatError as error:
                if self.accepts_unknown:
                    continue
                return f"{error.message} (unknown: deny)"
            if (reason := self._find_fault(expression)) is not None:
                return f"it states the licence {text[:_SHOWN]!r}, and {reason}"
        return None

    def _find_fault(self, expression: Expression) -> str | None:
        if isinstance(expression, License):
            return self._judge(expression)
        faults = [self._find_fault(part) for part in expression.parts]
        if expression.operator == "AND":
            return next((fault for fault in faults if fault is not None), None)
        reasons = [fault for fault in faults if fault is not None]
        return " and ".join(dict.fromkeys(reasons)) if len(reasons) == len(faults) else None

    def _judge(self, license_: License) -> str | None:
        denied = next((entry for entry in self.deny if entry.includes(license_)), None)
        if denied is not None:
            return f"{license_} is denied by {denied.text!r}"
        if any(entry.permits(license_) for entry in self.allow):
            return None
        if not license_.is_listed:
            known = f"{license_} is not on SPDX's list, nor allowed (unknown: deny)"
            return None if self.accepts_unknown else known
        return f"{license_} is not allowed" if self.allow else None


def build_terms(source: str, value: dict[str, Any]) -> LicenseTerms:
    """Return the terms of a policy. Raises UsageError: an entry is no licence, or has no effect."""
    allow, deny = (
        tuple(_build_entry(source, text) for text in value.get(key, ()))
        for key in ("allow", "deny")
    )
    for entry in allow:
        license_ = License(entry.id, entry.or_later, entry.exception)
        if any(denied.includes(license_) for denied in deny):
            raise UsageError(f"{source}: {entry.text} is denied, too: remove it from one list")
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return LicenseTerms(allow, deny, value.get("unknown") == "allow", source, digest)


def _build_entry(source: str, text: str) -> Entry:
    if _PATTERN.fullmatch(text):
        return Entry(text, text.lower())
    try:
        found = parse_license(text)
    except FormatError as error:
        raise UsageError(
            f"{source}: {error.message}", hint="a list has one licence, or a pattern, per entry"
        ) from None
    # An entry of a misspelt name would have no effect.
    if not found.is_listed and found.id.lower() != text.partition(" ")[0].lower():
        nearest = find_nearest(text, list_identifiers())
        suggestion = f"did you mean {nearest}? " if nearest else ""
        raise UsageError(
            f"{source}: {text} is not on SPDX's list of licences",
            hint=f"{suggestion}a licence that is not on it is written {build_reference(text)}",
        )
    name = found.id.lower()
    if name.endswith("-only") and "-only" not in text.lower():
        # GPL-2.0 does not say which of both it means.
        name = name.removesuffix("only") + "*"
    return Entry(text, name, found.or_later, found.exception.lower())
