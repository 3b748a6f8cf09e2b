"""The tokenizer and the chat template in the files of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.chat_template import find_templates, parse_special_tokens
from clowder_aimage.model.tokenizer_backend import TokenizerBackend
from clowder_aimage.model.weights import find
from clowder_aimage.tensor.config_fields import parse_object

_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer in a folder of an AImage; the folder "" is the top level."""

    store: BlobFiles
    aimage: AImage
    folder: str = ""

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, or None. Raises ModelError if it is too large."""
        prefix = f"{self.folder}/" if self.folder else ""
        return find(self.store, self.aimage, prefix + name)

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, empty without the file. Raises ModelError."""
        data = self.read(name)
        return {} if data is None else parse_object(name, data)

    def read_config(self) -> dict[str, Any]:
        """Return ``tokenizer_config.json`` over ``special_tokens_map.json``."""
        special = self.read_object("special_tokens_map.json")
        return {**special, **self.read_object("tokenizer_config.json")}

    def read_templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the chat templates by name. Raises ModelError."""
        return find_templates(config, self.read)

    def list_special_tokens(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the texts of special tokens by names such as ``bos_token``."""
        return parse_special_tokens(config)

    def build_backend(self, config: Mapping[str, Any]) -> TokenizerBackend:
        """Return the tokenizer in tokenizer.json, or one built from vocab.json and merges.txt.

        Raises:
            ModelError: The tokenizer is missing or malformed.
        """
        try:
            return self._build_backend(self.list_added_tokens(config))
        except ModelError:
            raise
        # The library raises any type of error, since any field may have any type
        except Exception as error:
            raise ModelError(f"the tokenizer cannot be read: {error}") from error

    def _build_backend(self, added: Mapping[str, Any]) -> TokenizerBackend:
        data = self.read("tokenizer.json")
        if data is not None:
            return TokenizerBackend.from_json(data.decode(), added)
        vocabulary, merges = self.read_object("vocab.json"), self.read("merges.txt")
        if not vocabulary or merges is None:
            raise ModelError("the model has neither tokenizer.json nor vocab.json with merges.txt")
        return TokenizerBackend.from_qwen(vocabulary, _parse_merges(merges.decode()), added)

    def list_added_tokens(self, config: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
        """Return the options of tokens that the configuration adds, in the order of their ids."""
        listed = config.get("added_tokens_decoder") or {
            index: {"content": content, "special": content.startswith("<|")}
            for content, index in self.read_object("added_tokens.json").items()
        }
        return {
            fields["content"]: {key: fields[key] for key in _TOKEN_OPTIONS if key in fields}
            for _, fields in sorted(listed.items(), key=lambda item: int(item[0]))
        }


def _parse_merges(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    pairs = [tuple(line.rstrip("\r").split(" ")) for line in lines]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError("merges.txt: every line must contain two tokens")
    return [(left, right) for left, right in pairs]
