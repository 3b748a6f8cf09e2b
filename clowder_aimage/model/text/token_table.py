"""The bytes of tokens, as the decoder of a tokenizer joins them.

A token may be a part of a character, so texts are decoded from the bytes of tokens. Formats:
byte-level BPE (GPT-2), SentencePiece with byte fallback, and BPE with a suffix for word ends.
"""

from __future__ import annotations

import re

from clowder_aimage.model.tokenizer_backend import TokenizerBackend

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's mark of a space


class TokenTable:
    """The bytes and the kind of each token of a tokenizer."""

    def __init__(self, backend: TokenizerBackend) -> None:
        self._backend = backend
        decoders = {str(part.get("type")): part for part in backend.decoders}
        self._is_byte_level = "ByteLevel" in decoders
        self._has_bytes = "ByteFallback" in decoders
        self._suffix = str(decoders.get("BPEDecoder", {}).get("suffix", ""))
        self.has_leading_space = "Strip" in decoders or "Metaspace" in decoders
        """Whether a text begins with a space that is not part of it."""
        self._known: dict[int, bytes] = {}

    def data(self, token: int) -> bytes:
        """Return the bytes of a token, empty for an unknown one."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._data(token)
        return found

    def is_special(self, token: int) -> bool:
        """Return True for a token that is not a part of texts."""
        return self._backend.added.get(token, False)

    def _data(self, token: int) -> bytes:
        text = self._backend.text(token)
        if text is None:
            return b""
        if token in self._backend.added:
            return text.encode()
        if self._is_byte_level and all(one in _BYTES for one in text):
            return bytes(_BYTES[one] for one in text)
        if self._has_bytes and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if self._suffix:
            return text.replace(self._suffix, " ").encode()
        return text.replace(_SPACE, " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (GPT-2, ``bytes_to_unicode``)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _byte_characters()
