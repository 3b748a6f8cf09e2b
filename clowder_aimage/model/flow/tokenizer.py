"""Encoding of a prompt as token ids: the chat template, then the tokenizer.

Template and tokenizer are parts of the model and untrusted, so the template is rendered in a
sandbox with the few names that transformers provides to templates, and the tokenizer's library is
called in bounds. No code of the model is run.
Reference: transformers, ``apply_chat_template`` and ``tokenization_qwen2``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.model.tokenizer_backend import TokenizerBackend
from clowder_aimage.model.weights import find, find_object
from clowder_aimage.template_sandbox import RenderError, SandboxedTemplate
from clowder_aimage.tensor.config_fields import parse_object

MAX_TOKENS = 512
FOLDER = "tokenizer"
_PAD = "<|endoftext|>"  # of Qwen
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """A tokenizer that encodes a prompt as the only message of a chat."""

    def __init__(
        self,
        backend: TokenizerBackend,
        template: str,
        config: Mapping[str, Any],
        *,
        is_thinking: bool = True,
    ) -> None:
        self._is_thinking = is_thinking
        backend.truncate(MAX_TOKENS, config.get("truncation_side") or "right")
        self._backend = backend
        self._special = _special_tokens(config)
        self._pad = self._special.get("pad_token", _PAD)
        try:
            self._template = SandboxedTemplate(
                template,
                names={"raise_exception": _raise, "strftime_now": _strftime_now},
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=[_Generation, "jinja2.ext.loopcontrols"],
            )
        except RenderError as error:
            raise ModelError(f"the chat template cannot be read: {error}") from None

    @classmethod
    def load(cls, store: BlobFiles, aimage: AImage, *, is_thinking: bool = True) -> Tokenizer:
        """Read the files below ``tokenizer/``; ``is_thinking`` is an option of the template.

        Raises:
            ModelError: The tokenizer or chat template is missing or malformed.
        """
        config = find_object(store, aimage, f"{FOLDER}/tokenizer_config.json") or {}
        special = find_object(store, aimage, f"{FOLDER}/special_tokens_map.json") or {}
        template = _template(store, aimage, config)
        try:
            backend = _backend(store, aimage, _added_tokens(store, aimage, config))
            return cls(backend, template, {**special, **config}, is_thinking=is_thinking)
        except ModelError:
            raise
        except Exception as error:  # any field may have any type
            raise ModelError(f"the tokenizer cannot be read: {error}") from error

    @property
    def padding(self) -> int:
        """Return the token that texts are padded with. Raises ModelError: there is none."""
        found = self._backend.find(self._pad)
        if found is None:
            raise ModelError(f"the tokenizer has no token {self._pad[:80]!r} for padding")
        return found

    def render(self, prompt: str) -> str:
        """Return the prompt in the model's chat template, with the generation prompt.

        Raises:
            ModelError: The template fails. The message has nothing of the prompt, so it may be
                logged.
        """
        values = {
            "messages": [{"role": "user", "content": prompt}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            options = {"enable_thinking": self._is_thinking}
            return self._template.render({**values, **self._special, **options})
        except RenderError as error:
            raise ModelError(f"the chat template failed: {error.summary}") from None

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of the prompt in its template, 512 at most.

        Raises:
            ModelError: There are none, or the tokenizer fails.
        """
        tokens = self._backend.encode(self.render(prompt))
        if not tokens:
            raise ModelError("the tokenizer returned no tokens for the prompt")
        return tokens


def _backend(store: BlobFiles, aimage: AImage, added: Mapping[str, Any]) -> TokenizerBackend:
    """Return the tokenizer in tokenizer.json, or one built from vocab.json and merges.txt."""
    data = find(store, aimage, f"{FOLDER}/tokenizer.json")
    if data is not None:
        return TokenizerBackend.from_json(data.decode(), added)
    vocabulary = find_object(store, aimage, f"{FOLDER}/vocab.json")
    merges = find(store, aimage, f"{FOLDER}/merges.txt")
    if vocabulary is None or merges is None:
        raise ModelError("the model has neither tokenizer.json nor vocab.json with merges.txt")
    return TokenizerBackend.from_qwen(vocabulary, _merges(merges.decode()), added)


def _merges(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError("tokenizer/merges.txt: every line must contain two tokens")
    return [(first, second) for first, second in pairs]


def _added_tokens(
    store: BlobFiles, aimage: AImage, config: Mapping[str, Any]
) -> dict[str, dict[str, bool]]:
    """Return the options of the tokens that the configuration adds, in the order of their ids."""
    added = find_object(store, aimage, f"{FOLDER}/added_tokens.json")
    listed = config.get("added_tokens_decoder") or {
        index: {"content": content, "special": content.startswith("<|")}
        for content, index in (added or {}).items()
    }
    return {
        fields["content"]: {key: fields[key] for key in _TOKEN_OPTIONS if key in fields}
        for _, fields in sorted(listed.items(), key=lambda item: int(item[0]))
    }


def _template(store: BlobFiles, aimage: AImage, config: Mapping[str, Any]) -> str:
    """Return chat_template.jinja, else the (default) one in the configuration or its own JSON."""
    data = find(store, aimage, f"{FOLDER}/chat_template.jinja")
    if data is not None:
        return data.decode()
    found = config.get("chat_template")
    if found is None and (data := find(store, aimage, f"{FOLDER}/chat_template.json")) is not None:
        found = parse_object(f"{FOLDER}/chat_template.json", data).get("chat_template")
    if isinstance(found, list):
        found = {item["name"]: item["template"] for item in found}
    if isinstance(found, dict):
        found = found.get("default")
    if not isinstance(found, str):
        raise ModelError(
            "the model has no chat template",
            hint="it requires tokenizer/chat_template.jinja, or chat_template in "
            "tokenizer/tokenizer_config.json",
        )
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for role in _ROLES:
        value = config.get(f"{role}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[f"{role}_token"] = value
    return tokens


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant output; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    if len(format) > 100 or re.search(r"\d\d\d", format):  # a width
        raise ValueError("the format of the time is too large")
    return datetime.now().strftime(format)
