"""Typed and bounded fields of a JSON object; errors name the file and the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clowder_aimage.document.strict_json import MAX_DOCUMENT_SIZE, read_json
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.tensor.quantization_config import KEYS, find_unknown_key

MAX_LAYERS = 1024
MAX_SIZE = 1 << 24
# Its square is a finite double, and its product with a size a finite float32.
MAX_NUMBER = 1e30
# The least number that counts as positive.
_LEAST = 1e-30


def parse_object(name: str, data: bytes, limit: int = MAX_DOCUMENT_SIZE) -> dict[str, Any]:
    """Parse the JSON object of the file ``name``, up to ``limit`` bytes. Raises ModelError."""
    try:
        value = read_json(data, name, limit)
    except FormatError as error:
        raise ModelError(error.message) from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} must be a JSON object")
    return value


class ConfigFields:
    """Fields of a JSON object; every getter raises ModelError with file and field name.

    A getter without a default makes the field required. An explicit ``null`` counts as absent.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values
        self._read: set[str] = set()

    def accept_quantization(self) -> None:
        """Accept a quantization that blobs support. Raises ModelError for others."""
        if key := find_unknown_key({key: self.get_raw(key) for key in KEYS}):
            raise self.refuse(key, "unsupported quantization")

    def refuse(self, key: str, reason: str) -> ModelError:
        """Return the error for an unusable value."""
        return ModelError(f"{self.name}: {key} = {self.values.get(key)!r:.80}: {reason}")

    def get_raw(self, key: str, default: Any = None) -> Any:
        """Return the value unchanged, or the default if it is absent or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def _require_value(self, key: str, default: Any) -> Any:
        value = self.get_raw(key, default)
        if value is None:
            raise ModelError(f"{self.name}: missing field {key}")
        return value

    def get_integer(self, key: str, default: int | None = None, *, maximum: int = MAX_SIZE) -> int:
        """Return a whole number from 1 to ``maximum``."""
        value = self._require_value(key, default)
        if type(value) is int and 1 <= value <= maximum:
            return value
        raise self.refuse(key, f"must be a whole number from 1 to {maximum}")

    def get_number(
        self,
        key: str,
        default: float | None = None,
        *,
        minimum: float = -MAX_NUMBER,
        maximum: float = MAX_NUMBER,
    ) -> float:
        """Return a number from ``minimum`` to ``maximum``."""
        value = self._require_value(key, default)
        # The comparison is false for NaN.
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            raise self.refuse(key, f"must be a number from {minimum:g} to {maximum:g}")
        return float(value)

    def get_positive(
        self, key: str, default: float | None = None, *, maximum: float = MAX_NUMBER
    ) -> float:
        """Return a number above zero, up to ``maximum``."""
        return self.get_number(key, default, minimum=_LEAST, maximum=maximum)

    def get_boolean(self, key: str, default: bool) -> bool:
        """Return True or False."""
        value = self.get_raw(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def get_text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._require_value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def get_integers(self, key: str, default: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return a list of whole numbers above zero."""
        value = self._require_value(key, None if default is None else list(default))
        if not isinstance(value, list) or not all(
            type(item) is int and 1 <= item <= MAX_SIZE for item in value
        ):
            raise self.refuse(key, "must be a list of whole numbers above 0")
        return tuple(value)

    def check_value(self, key: str, allowed: Any) -> None:
        """Reject any value but ``allowed``; the field may be absent."""
        if self.get_raw(key, allowed) != allowed:
            raise self.refuse(key, f"unsupported, expected {allowed!r}")

    def finish(self, *ignored: str) -> None:
        """Reject fields that were neither read nor ``ignored``, unless null or ``_private``."""
        # A field that this version does not know may change the network: guessing is worse.
        unknown = sorted(
            key
            for key, value in self.values.items()
            if key not in self._read | set(ignored) and value is not None and key[:1] != "_"
        )
        if unknown:
            raise ModelError(
                f"{self.name}: unknown fields {', '.join(unknown[:8])}",
                hint="they may change the result of the model, and are therefore not ignored",
            )
