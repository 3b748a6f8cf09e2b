"""The bytes of tokens, in the decoding of a tokenizer.

A token may be a part of a character, so texts are decoded from the bytes of tokens. Formats:
byte-level BPE (GPT-2), SentencePiece with byte fallback, and BPE with a suffix for word ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.errors import ModelError

if TYPE_CHECKING:
    from clowder_aimage.model.tokenizer_backend import TokenizerBackend

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# SentencePiece's mark of a space
_SPACE = "\u2581"
# Components of decoders whose effect on the bytes of a token is known, with their settings
_PLAIN = ("Sequence", "ByteLevel", "ByteFallback", "Fuse", "BPEDecoder")
_SETTINGS: dict[str, dict[str, Any]] = {
    "Replace": {"pattern": {"String": _SPACE}, "content": " "},
    "Metaspace": {"replacement": _SPACE},
    "Strip": {"content": " ", "stop": 0},
}


class TokenTable:
    """The bytes and the kind of each token of a tokenizer.

    Raises ModelError: the effect of its decoder is unknown.
    """

    def __init__(self, backend: TokenizerBackend) -> None:
        self._backend = backend
        for decoder in backend.decoders:
            _check_decoder(decoder)
        if not backend.decoders:
            raise ModelError("the tokenizer has no decoder, which makes texts of tokens")
        decoders = {str(decoder.get("type")): decoder for decoder in backend.decoders}
        self._is_byte_level = "ByteLevel" in decoders
        self._has_bytes = "ByteFallback" in decoders
        self._suffix = str(decoders.get("BPEDecoder", {}).get("suffix", ""))
        self.has_leading_space = "Strip" in decoders or "Metaspace" in decoders
        """True if the tokenizer puts a space before a text."""
        self._cache: dict[int, bytes] = {}

    def get_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, empty for an unknown token."""
        token_bytes = self._cache.get(token)
        if token_bytes is None:
            token_bytes = self._cache[token] = self._compute(token)
        return token_bytes

    def is_special(self, token: int) -> bool:
        """Return True for a token that is not a part of texts."""
        return self._backend.added.get(token, False)

    def _compute(self, token: int) -> bytes:
        text = self._backend.find_text(token)
        if text is None:
            return b""
        if token in self._backend.added:
            return text.encode()
        # Tokens outside of the byte alphabet occur in vocabularies of converted models
        if self._is_byte_level and all(character in BYTES for character in text):
            return bytes(BYTES[character] for character in text)
        if self._has_bytes and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if self._suffix:
            return text.replace(self._suffix, " ").encode()
        return text.replace(_SPACE, " ").encode()


def _check_decoder(decoder: Mapping[str, Any]) -> None:
    kind = str(decoder.get("type"))
    settings = {} if kind in _PLAIN else _SETTINGS.get(kind)
    if settings is None or any(decoder.get(key) != value for key, value in settings.items()):
        raise ModelError(f"the decoder {kind[:80]} of the tokenizer, or its settings are unknown")


def _build_byte_table() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (GPT-2, ``bytes_to_unicode``)."""
    # The other bytes have no visible character, and get those from 256 on
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }


BYTES = _build_byte_table()
"""The byte of each character in the byte alphabet of GPT-2."""
