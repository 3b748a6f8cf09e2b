"""The fields of a JSON body, each read as what it is to be, and refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clowder_aimage.http.api_error import ApiError

# What clients send and nothing here depends on; ``user`` is neither kept nor logged
_NO_EFFECT = frozenset({"user", "safety_identifier", "moderation", "style", "input_fidelity"})


def wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """That a field cannot be meant."""
    return ApiError(400, f"{param} {message}", code=code, param=param)


class RequestFields:
    """The fields of a body, each asked for by its name; what nobody asked for is unknown."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._asked: set[str] = {"strict", *_NO_EFFECT}

    def get(self, *names: str) -> tuple[str, Any]:
        """The value, and which of its names it came by; None where there is none."""
        self._asked.update(names)
        found = [(name, self._body[name]) for name in names if name in self._body]
        if any(value != found[0][1] for _, value in found):
            raise wrong(found[0][0], f"and {found[1][0]} are the same, but differ here")
        return found[0] if found else (names[0], None)

    def text(self, name: str, *, most: int) -> str | None:
        _, value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong(name, "must be text", "invalid_type")
        if len(value) > most:
            raise wrong(name, f"can have {most} characters at most, not {len(value)}")
        if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise wrong(name, "holds characters that are not valid Unicode")
        return value

    def word(self, name: str, words: tuple[str, ...], default: str) -> str:
        _, value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong(name, "must be text", "invalid_type")
        if value not in words:
            raise wrong(name, f"must be one of {', '.join(words)}, not {shown(value)}")
        return value

    def count(self, *names: str, least: int, most: int) -> int | None:
        name, value = self.get(*names)
        if value is None:
            return None
        if type(value) is not int:
            raise wrong(name, f"must be a whole number, not {shown(value)}", "invalid_type")
        if not least <= value <= most:
            raise wrong(name, f"must be from {least} to {most}, not {shown(value)}")
        return value

    def number(self, *names: str, least: float = 0, most: int) -> float | None:
        name, value = self.get(*names)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise wrong(name, f"must be a number, not {shown(value)}", "invalid_type")
        if not least <= value <= most:
            raise wrong(name, f"must be from {least} to {most}, not {shown(value)}")
        return float(value)

    def flag(self, name: str, *, also: tuple[int, ...] = (), default: bool = False) -> bool:
        _, value = self.get(name)
        if value is None:
            return default
        if type(value) is bool or (type(value) is int and value in also):
            return bool(value)
        raise wrong(name, f"must be true or false, not {shown(value)}", "invalid_type")

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(sorted(self._body.keys() - self._asked))

    def refuse_unknown(self) -> None:
        """Raises ApiError for the first field that means nothing here."""
        for name in self.unknown:
            text = shown(name)
            message = f"{text} is unknown; without strict it would be ignored"
            raise ApiError(400, message, code="unknown_parameter", param=name[:60])


def shown(value: object) -> str:
    """A value as an error shows it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "that number"
    return (text if len(text) <= 40 else f"{text[:40]}...").encode("ascii", "replace").decode()
