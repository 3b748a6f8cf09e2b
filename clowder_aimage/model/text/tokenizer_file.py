"""The tokenizer and the chat template in the files of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.model.model_file import find, find_object
from clowder_aimage.model.text.bpe_file import (
    MERGES,
    VOCABULARY,
    build_tokenizer,
    find_class,
    list_special_tokens,
)
from clowder_aimage.model.text.prefix_space import has_prefix_space, set_prefix_space
from clowder_aimage.model.text.template_file import find_templates, parse_special_tokens
from clowder_aimage.model.tokenizer_backend import TokenizerBackend
from clowder_aimage.tensor.config_fields import parse_object

_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer in a folder of an AImage; the folder "" is the top level.

    network: the name of the configuration of its network.
    """

    store: BlobFiles
    aimage: AImage
    folder: str = ""
    network: str = "config.json"

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
            return self._build_backend(config, self.list_added_tokens(config))
        except ModelError:
            raise
        # The library raises any type of error, since any field may have any type
        except Exception as error:
            raise ModelError(f"the tokenizer cannot be read: {error}") from error

    def _build_backend(
        self, config: Mapping[str, Any], added: Mapping[str, Any]
    ) -> TokenizerBackend:
        data = self.read("tokenizer.json")
        network = find_object(self.store, self.aimage, self.network) or {}
        if data is not None:
            text = self._read_split(data.decode(), config, network.get("model_type"))
            return TokenizerBackend.from_json(text, added)
        vocabulary, merges = self.read_object(VOCABULARY), self.read(MERGES)
        if not vocabulary or merges is None:
            raise ModelError(f"the model has neither tokenizer.json nor {VOCABULARY} with {MERGES}")
        stated = self._list_stated_tokens(config).items()
        ids = {fields["content"]: int(number) for number, fields in stated}
        name = find_class(config, network.get("model_type"))
        text = json.dumps(build_tokenizer(name, config, vocabulary, merges.decode(), ids))
        special = list_special_tokens(name, config, {**vocabulary, **ids})
        # New tokens get the next ids, in this order
        others = {text: options for text, options in special.items() if text not in added}
        backend = TokenizerBackend.from_json(text, {**added, **others})
        for content, number in ids.items():
            if backend.find(content) != number:
                raise ModelError(f"the added token {content!r:.80} cannot have the id {number}")
        return backend

    def _read_split(self, text: str, config: Mapping[str, Any], kind: object) -> str:
        """Return a tokenizer.json that splits texts as the configuration says."""
        if not has_prefix_space(config, kind):
            return text
        value = parse_object("tokenizer.json", text.encode(), MAX_JSON)
        return json.dumps(value) if set_prefix_space(value, config, kind) else text

    def list_added_tokens(self, config: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
        """Return the options of tokens that the configuration adds, in the order of their ids."""
        listed = self._list_stated_tokens(config)
        return {
            fields["content"]: {key: fields[key] for key in _TOKEN_OPTIONS if key in fields}
            for _, fields in sorted(listed.items(), key=lambda item: int(item[0]))
        }

    def _list_stated_tokens(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the added tokens by their ids, as they are stated."""
        stated: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {
            str(index): {"content": content, "special": content.startswith("<|")}
            for content, index in self.read_object("added_tokens.json").items()
        }
        return stated
