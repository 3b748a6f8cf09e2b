"""The tokenizers library in bounds: it panics, and its components may grow a text without end.

No other module imports the library. Panics are BaseExceptions whose report on standard error may
quote the prompt; they become ModelErrors, and the report is discarded.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from clowder_aimage.errors import ModelError, StuckError
from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.tensor.config_fields import parse_object

_SECONDS = 1.5
# Characters of a normalized text
_MAX_TEXT = 1 << 20
# Characters of an added token or of a pattern
_MAX_TOKEN = 1024
# Characters of all added tokens
_MAX_ADDED = 1 << 19
# Characters of replacements, prefixes and suffixes
_MAX_AFFIX = 64
# Tokens that a post-processor adds
_MAX_PIECES = 64
_MAX_COMPONENTS = 64
_ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
# Characters that a normalizer makes of one at most (Unicode, UAX #15, "Maximum Expansion Factor")
_GROWTH = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 3, "ByteLevel": 4}
_GROWTH["BertNormalizer"] = 12
# They remove characters, or replace each by one
_GROWTH |= {"Strip": 1, "StripAccents": 1, "Nmt": 1}
_STDERR = threading.Lock()


class TokenizerTimeoutError(ModelError):
    """The library still runs in a thread that cannot be ended."""


@dataclass(frozen=True, slots=True)
class EncodingLimits:
    """Limits of one encoding: characters of a normalized text, and seconds.

    ``has_special``: the post-processor adds its special tokens. ``tokens``: more are cut off, at
    the ``side``.
    """

    text: int = _MAX_TEXT
    seconds: float = _SECONDS
    has_special: bool = True
    tokens: int | None = None
    side: str = "right"


class TokenizerBackend:
    """A tokenizer of the library; ``growth`` is how often its normalizer repeats a character.

    ``decoders`` are the descriptions of its decoder's components.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        growth: int,
        added: Mapping[str, Any],
        decoders: tuple[dict[str, Any], ...],
    ) -> None:
        self._backend, self._growth, self.decoders = backend, growth, decoders
        _check_tokens(added, growth)
        existing = {token.content for token in backend.get_added_tokens_decoder().values()}
        new = [
            AddedToken(text, **options) for text, options in added.items() if text not in existing
        ]
        with _silence_output("the tokenizer cannot be read"):
            backend.add_tokens(new)
            backend.no_padding()
            # Of the file's last use, which is not that of this program
            backend.no_truncation()

    @classmethod
    def from_json(cls, text: str, added: Mapping[str, Any]) -> TokenizerBackend:
        """Return the tokenizer of a ``tokenizer.json`` with added tokens and their options.

        Raises:
            ModelError: It is malformed, or its components may grow a text too much.
        """
        value = parse_object("tokenizer.json", text.encode(), MAX_JSON)
        _check_components(value)
        growth = _compute_growth(value.get("normalizer"))
        _check_tokens([token["content"] for token in value.get("added_tokens") or ()], growth)
        with _silence_output("the tokenizer cannot be read"):
            backend = tokenizers.Tokenizer.from_str(text)
        return cls(backend, growth, added, tuple(_iter_components(value.get("decoder"))))

    def truncate(self, count: int, side: str) -> None:
        """Return at most ``count`` tokens from now on. Raises ModelError."""
        with _silence_output("the tokenizer cannot be read"):
            self._backend.enable_truncation(count, direction=side)

    def find(self, token: str) -> int | None:
        """Return the id of a token, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def find_text(self, token: int) -> str | None:
        """Return the text of a token as it is in the vocabulary, or None."""
        content: str | None = self._backend.id_to_token(token)
        return content

    @functools.cached_property
    def added(self) -> dict[int, bool]:
        """Return the added tokens, with True for special ones."""
        return {
            token: bool(options.special)
            for token, options in self._backend.get_added_tokens_decoder().items()
        }

    def encode(self, text: str, *, limits: EncodingLimits | None = None) -> list[int]:
        """Return the token ids of ``text``. Raises as ``encode_counted``."""
        return self.encode_counted(text, limits=limits)[0]

    def encode_counted(
        self, text: str, *, limits: EncodingLimits | None = None
    ) -> tuple[list[int], int]:
        """Return the token ids of ``text``, and their number before some were cut off.

        Raises:
            ModelError: The tokenizer fails or may grow the text too much; StuckError: it takes too
                long.
        """
        limits = limits or EncodingLimits()
        _check_length(len(text), self._growth, limits.text)
        if limits.tokens is not None:
            self.truncate(limits.tokens, limits.side)
        with _silence_output("the tokenizer failed", is_private=True):
            # a batch, unlike a text, is encoded without the interpreter's lock
            special = limits.has_special
            work = _Work(
                lambda: _count(self._backend.encode_batch([text], add_special_tokens=special)[0])
            )
            counted: tuple[list[int], int] = work.wait_result(limits.seconds)
            if limits.tokens is not None:
                self._backend.no_truncation()
        return counted


def _count(encoding: tokenizers.Encoding) -> tuple[list[int], int]:
    """Return the token ids of an encoding, and their number with those that were cut off.

    Each part that was cut off has the special tokens of a text again.
    """
    cut = (len(part.ids) - sum(part.special_tokens_mask) for part in encoding.overflowing)
    return encoding.ids, len(encoding.ids) + sum(cut)


class _Work(threading.Thread):
    """A call in a thread, for a limited time."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self._result = call, None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            # Also panics; result() raises it in the caller's thread
            self._error = error

    def wait_result(self, seconds: float) -> Any:
        """Return the result of the call, or raise its error. Raises StuckError."""
        self.join(seconds)
        if self.is_alive():
            raise StuckError(f"the tokenizer takes longer than {seconds:g} seconds")
        if self._error is not None:
            raise self._error
        return self._result


@contextlib.contextmanager
def _silence_output(failure: str, is_private: bool = False) -> Iterator[None]:
    """Discard the output of the library, and raise ModelError for its errors and panics.

    With ``is_private``, the message has the kind of the error alone: its text may quote the prompt.
    """
    with _STDERR, contextlib.ExitStack() as stack:
        # A daemon may have no standard error
        with contextlib.suppress(OSError):
            sys.stderr.flush()
            stack.callback(os.close, saved := os.dup(2))
            stack.callback(os.dup2, saved, 2)
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        try:
            yield
        except ModelError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            text = "" if is_private else str(error)
            raise ModelError(f"{failure}: {text or type(error).__name__}") from None


def _check_tokens(contents: Iterable[str], growth: int) -> None:
    total = 0
    for content in contents:
        # Each token takes time, an empty one too
        total += len(content) + 16
        if len(content) > _MAX_TOKEN or total > _MAX_ADDED:
            raise ModelError(f"an added token exceeds {_MAX_TOKEN} characters, or all {_MAX_ADDED}")
        _check_length(len(content), growth)


def _check_components(value: dict[str, Any]) -> None:
    """Refuse slow patterns, repetition of the text, and many or long added tokens."""
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    nodes = [component for name in parts for component in _iter_components(value.get(name))]
    if len(nodes) > _MAX_COMPONENTS:
        raise ModelError(f"the tokenizer has more than {_MAX_COMPONENTS} components")
    for node in nodes:
        pattern = node.get("pattern")
        if isinstance(pattern, dict) and len(pattern.get("Regex", "")) > _MAX_TOKEN:
            raise ModelError(f"a pattern of the tokenizer exceeds {_MAX_TOKEN} characters")
    model = value.get("model") or {}
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(name) or "") > _MAX_AFFIX:
            raise ModelError(f"the tokenizer's {name} exceeds {_MAX_AFFIX} characters")
    splits = _iter_components(value.get("pre_tokenizer"))
    if [node.get("type") for node in splits].count("ByteLevel") > 1:
        raise ModelError("the tokenizer writes bytes of bytes as text")
    adding = [node for node in nodes if node.get("type") in _ADDING]
    if len(adding) > 1:
        raise ModelError("the tokenizer has several post-processors that add tokens")
    for node in adding:
        _check_template(node)


def _iter_components(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a component with all in it."""
    if isinstance(component, dict):
        yield component
        for kind in ("normalizers", "pretokenizers", "processors", "decoders"):
            for child in component.get(kind) or ():
                yield from _iter_components(child)


def _check_template(node: dict[str, Any]) -> None:
    """Refuse a template that repeats the text: the length would multiply."""
    tokens = node.get("special_tokens") or {}
    texts = [text for token in tokens.values() for text in token["tokens"]]
    texts += [node[name][0] for name in ("sep", "cls") if name in node]
    _check_tokens(texts, 1)
    count = repeated = 0
    for piece in node.get("single") or ():
        if "Sequence" in piece:
            repeated += 1
        else:
            count += len(tokens[piece["SpecialToken"]["id"]]["ids"])
    if repeated > 1:
        raise ModelError("the tokenizer's template repeats the text")
    if count > _MAX_PIECES:
        raise ModelError(f"the tokenizer's template adds more than {_MAX_PIECES} tokens")


def _check_length(length: int, growth: int, limit: int = _MAX_TEXT) -> None:
    if length * growth > limit:
        raise ModelError(f"the tokenizer may make more than {limit} characters of the text")


def _compute_growth(normalizer: Any) -> int:
    """Return the most characters that a normalizer makes of one."""
    if not isinstance(normalizer, dict):
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        return math.prod(map(_compute_growth, normalizer["normalizers"]))
    if kind == "Replace":
        # the empty text is found beside each character, by a regular expression perhaps
        beside = 1 if normalizer["pattern"].get("String", "") == "" else 0
        return max(1, len(normalizer["content"]) + beside)
    if kind == "Prepend":
        return 1 + len(normalizer["prepend"])
    # The size of a trie, the trie, then texts that end with NUL
    if kind == "Precompiled":
        data = base64.b64decode(normalizer["precompiled_charsmap"])
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(1, *map(len, texts))
    if kind not in _GROWTH:
        raise ModelError(f"the normalizer {kind!r:.80} of the tokenizer is unknown")
    return _GROWTH[kind]
