"""Encoding of a prompt as token ids: the chat template, then the tokenizer.

The template is part of the model and untrusted, so it is rendered in Jinja's immutable sandbox
with the few names that transformers provides to templates. No code of the model is run.
Reference: transformers, ``apply_chat_template`` and ``tokenization_qwen2``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.model.weights import find, find_object
from clowder_aimage.tensor.config_fields import parse_object

MAX_TOKENS = 512
FOLDER = "tokenizer"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# The regular expression of Qwen2 and Qwen3 to split text before the byte-level BPE.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer that encodes a prompt as the only message of a chat."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str, config: Mapping[str, Any]):
        side = config.get("truncation_side") or "right"
        backend.enable_truncation(MAX_TOKENS, direction=side)
        backend.no_padding()
        self._backend = backend
        self._special = _special_tokens(config)
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, store: BlobFiles, aimage: AImage) -> Tokenizer:
        """Read the files below ``tokenizer/``.

        Raises:
            ModelError: The tokenizer or chat template is missing or malformed.
        """
        config = find_object(store, aimage, f"{FOLDER}/tokenizer_config.json") or {}
        special = find_object(store, aimage, f"{FOLDER}/special_tokens_map.json") or {}
        template = _template(store, aimage, config)
        try:
            backend = _backend(store, aimage)
            _add_tokens(backend, config, find_object(store, aimage, f"{FOLDER}/added_tokens.json"))
            return cls(backend, template, {**special, **config})
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"the tokenizer cannot be read: {error}") from error

    def render(self, prompt: str) -> str:
        """Return the prompt in the model's chat template, with the generation prompt."""
        try:
            return self._template.render(
                messages=[{"role": "user", "content": prompt}],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                range=_Range(),
                **{**self._special, "enable_thinking": True},
            )
        except Exception as error:  # a template can raise any exception
            raise ModelError(f"the chat template failed: {error}") from error

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of the prompt in its template, 512 at most.

        Raises:
            ModelError: There are none.
        """
        tokens: list[int] = self._backend.encode(self.render(prompt)).ids
        if not tokens:
            raise ModelError("the tokenizer returned no tokens for the prompt")
        return tokens


def _backend(store: BlobFiles, aimage: AImage) -> tokenizers.Tokenizer:
    """Return the tokenizer in tokenizer.json, or one built from vocab.json and merges.txt."""
    data = find(store, aimage, f"{FOLDER}/tokenizer.json")
    if data is not None:
        return tokenizers.Tokenizer.from_str(data.decode())
    vocabulary = find_object(store, aimage, f"{FOLDER}/vocab.json")
    merges = find(store, aimage, f"{FOLDER}/merges.txt")
    if vocabulary is None or merges is None:
        raise ModelError("the model has neither tokenizer.json nor vocab.json with merges.txt")
    model = models.BPE(vocab=vocabulary, merges=_merges(merges.decode()))
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError("tokenizer/merges.txt: every line must contain two tokens")
    return [(first, second) for first, second in pairs]


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any] | None
) -> None:
    """Add the tokens of the configuration that the backend lacks, in id order."""
    listed = config.get("added_tokens_decoder") or {
        index: {"content": content, "special": content.startswith("<|")}
        for content, index in (added or {}).items()
    }
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, fields in sorted(listed.items(), key=lambda item: int(item[0])):
        if fields["content"] in known:
            continue
        options = {key: fields[key] for key in _TOKEN_OPTIONS if key in fields}
        backend.add_tokens([AddedToken(fields["content"], **options)])


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
            hint="Z-Image requires tokenizer/chat_template.jinja, or chat_template in "
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


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Range:
    """``range`` with a total budget per rendering, so that nested loops end too."""

    def __init__(self) -> None:
        self._left = 100_000

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers) + 1
        if self._left < 0:
            raise jinja2.TemplateError("the chat template exceeds the limit of loop iterations")
        return numbers


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().strftime(format)
