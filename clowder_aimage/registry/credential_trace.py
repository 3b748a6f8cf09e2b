"""The record of a search for credentials: the places, their content, and where it was sent.

It contains no secret and no name of a user: a name may be a token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Places that are not files or helpers, with the hint if their credentials are refused.
OPTIONS = "the given username and password"
REQUEST = "the credentials of the request"
VARIABLE = "DOCKER_AUTH_CONFIG"
_HINTS = {
    OPTIONS: "check the username and the password",
    REQUEST: "check the credentials",
    VARIABLE: f"change {VARIABLE}",
}
_EMPTY = "no credentials"
_log = logging.getLogger("aimage.registry")


@dataclass(frozen=True, slots=True)
class CredentialEvent:
    """A step of the search for the credentials of a registry, or of their use.

    ``place`` is a file, a helper, a variable or an option. ``remedy`` is the code of a command.
    """

    registry: str
    place: str
    result: str
    is_warning: bool = False
    remedy: str = ""


OnCredential = Callable[[CredentialEvent], object]


class WarningLog:
    """Log each warning once. Thread-safe."""

    def __init__(self) -> None:
        self._logged: set[CredentialEvent] = set()
        self._lock = threading.Lock()

    def __call__(self, event: CredentialEvent) -> None:
        with self._lock:
            is_new = event.is_warning and event not in self._logged
            self._logged.add(event)
        if is_new:
            fields = {"registry": event.registry, "place": event.place, "reason": event.result}
            _log.warning("credentials of %(registry)s: %(place)s: %(reason)s", fields, extra=fields)


class CredentialTrace:
    """The places of the credentials of one registry, each with its last result. Thread-safe.

    ``is_sent`` is True if credentials were sent, and ``is_issued`` if to a token service.
    """

    def __init__(self, registry: str, report: OnCredential) -> None:
        self._registry, self._report = registry, report
        self._results: dict[str, str] = {}
        # The value of the setting that would permit the token service to get the credentials.
        self._trusted_realms = ""
        # The place whose credentials were refused.
        self._refused = ""
        # True if the registry accepted the credentials, and denied the request.
        self._is_denied = False
        self.is_sent = self.is_issued = False

    @property
    def is_refused(self) -> bool:
        """True if the registry, or its token service, refused credentials, or a request by them."""
        return bool(self._refused) or self._is_denied

    @property
    def is_withheld(self) -> bool:
        """True if a token service did not get the credentials."""
        return bool(self._trusted_realms)

    def add(self, place: str, result: str, *, is_warning: bool = False, remedy: str = "") -> None:
        """Record the result of a place, instead of its previous one."""
        if self._results.get(place) != result:
            self._results[place] = result
            self._report(CredentialEvent(self._registry, place, result, is_warning, remedy))

    def add_empty(self, place: str) -> None:
        """Record that a place has no credentials, unless another result is known."""
        if place not in self._results:
            self.add(place, _EMPTY)

    def send(self, place: str, realm: str = "") -> None:
        """Record that the registry, or its token service, gets the credentials of a place."""
        self.is_sent, self.is_issued = True, bool(realm)
        self.add(place, f"sent to {_describe_service(realm) or self._registry}")

    def refuse(
        self, place: str, status: int, realm: str = "", *, is_optional: bool = False
    ) -> None:
        """Record that the registry, or its token service, refused the credentials of a place.

        If they are optional, the request is made without them.
        """
        self.is_sent, self._refused = True, place
        result = f"refused by {_describe_service(realm) or self._registry} ({status})"
        if is_optional:
            result += "; continuing without them"
            self.add(place, result, is_warning=True, remedy="" if place in _HINTS else "logout")
        else:
            self.add(place, result)

    def deny(self, place: str) -> None:
        """Record that the registry accepted the credentials, which lack the permission."""
        self._is_denied = True
        self.add(place, f"accepted by {self._registry}, but without this permission")

    def withhold(self, place: str, realm: str, trusted_realms: str) -> None:
        """Record that a token service does not get the credentials of a place."""
        result = (
            f"not sent to {_describe_service(realm)}, which is neither on {self._registry} "
            "nor in AIMAGE_TRUSTED_REALMS"
        )
        # The caller expects that given credentials are used.
        self.add(place, result, is_warning=place == OPTIONS)
        self._trusted_realms = trusted_realms

    def describe(self) -> str:
        """Return all results in one line."""
        results = list(self._results.items())
        lines = [f"{place}: {result}" for place, result in results if result != _EMPTY]
        if places := [place for place, result in results if result == _EMPTY]:
            lines.append(f"none for {self._registry} in {', '.join(places)}")
        return "; ".join(lines)

    def build_advice(self, *, remedy: str = "", hint: str | None = None) -> dict[str, Any]:
        """Return the arguments of an error: the places tried, and a remedy or else a hint."""
        facts = {"credentials": self.describe(), "registry": self._registry}
        if self._trusted_realms:
            return {**facts, "remedy": "trust_realm", "realms": self._trusted_realms}
        if remedy == "login" and self._is_denied:
            return {**facts, "hint": "ask for the permission, or log in with another account"}
        if remedy == "login" and self._refused:
            hint = _HINTS.get(self._refused)
            remedy = "" if hint else "logout"
        return {**facts, "remedy": remedy, "hint": hint}


def _describe_service(realm: str) -> str:
    return f"the token service {realm}" if realm else ""
