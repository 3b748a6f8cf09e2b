"""Links in the header of a response (RFC 8288, 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Some registries omit the angle brackets, and some write single quotes.
_TARGET = re.compile(r'[\s,]*(?:<([^>]*)>|([^\s;,<>"]+))')
_PARAMETER = re.compile(
    r"""\s*;\s*([^\s=;,"<>]*)(?:\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^'"]*)'|([^\s;,"]*)))?""",
    re.DOTALL,
)


def find_link(header: str, relation: str) -> str:
    """Return the target of the first link with a relation type; an empty text without one."""
    for target, parameters in _iter_links(header):
        # A link may have several types. They are compared without case (RFC 8288, 2.1.1).
        if relation in parameters.get("rel", "").lower().split():
            return target
    return ""


def _iter_links(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the target and the parameters of each link. Of equal parameters the first counts."""
    position = 0
    while link := _TARGET.match(header, position):
        position, parameters = link.end(), dict[str, str]()
        while parameter := _PARAMETER.match(header, position):
            position = parameter.end()
            name, quoted, single, plain = parameter.groups()
            value = (
                (single or plain)
                if quoted is None
                else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
            )
            parameters.setdefault(name.lower(), value or "")
        yield (link[1] if link[1] is not None else link[2]).strip(), parameters
