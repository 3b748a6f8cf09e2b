"""Encoding of a prompt as token ids: the chat template, then the tokenizer.

Template and tokenizer are parts of the model and untrusted: no code of the model is run.
Reference: transformers, ``apply_chat_template`` and ``tokenization_qwen2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.document.template import TemplateLimits
from clowder_aimage.errors import ChatTemplateError, ModelError, UsageError
from clowder_aimage.model.text.prompt_check import is_lost
from clowder_aimage.model.text.template_file import parse_special_tokens
from clowder_aimage.model.text.template_variant import TemplateVariant
from clowder_aimage.model.text.tokenizer_file import TokenizerFiles
from clowder_aimage.model.tokenizer_backend import TokenizerBackend

MAX_TOKENS = 512
FOLDER = "tokenizer"
# The padding token of Qwen
_PAD = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The tokens of a prompt that the model reads, of ``total``; the last ones or the first."""

    ids: list[int]
    total: int
    are_last: bool = False

    def describe_cut(self, name: str) -> str:
        """Return a sentence about the tokens that are cut off; empty if none are."""
        count = len(self.ids)
        if count == self.total:
            return ""
        which = "last" if self.are_last else "first"
        return (
            f"{name} has {self.total} tokens, of which the model reads the {which} {count}: the "
            "rest has no effect"
        )


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
        side = config.get("truncation_side") or "right"
        self._is_cut_before = side == "left"
        backend.truncate(MAX_TOKENS, side)
        self._backend = backend
        special = parse_special_tokens(config)
        self._pad = special.get("pad_token", _PAD)
        self._template = TemplateVariant(template, special, TemplateLimits())

    @classmethod
    def load(cls, store: BlobFiles, aimage: AImage, *, is_thinking: bool = True) -> Tokenizer:
        """Read the files below ``tokenizer/``; ``is_thinking`` is an option of the template.

        Raises:
            ModelError: The tokenizer or chat template is missing or malformed.
        """
        files = TokenizerFiles(store, aimage, FOLDER, "text_encoder/config.json")
        config = files.read_config()
        template = files.read_templates(config).get("default")
        if template is None:
            raise ModelError(
                "the model has no chat template",
                hint="it requires tokenizer/chat_template.jinja, or chat_template in "
                "tokenizer/tokenizer_config.json",
            )
        backend = files.build_backend(config)
        try:
            return cls(backend, template, config, is_thinking=is_thinking)
        except ModelError:
            raise
        except Exception as error:
            # Untrusted JSON: any field may have any type
            raise ModelError(f"the tokenizer cannot be read: {error}") from error

    @property
    def padding(self) -> int:
        """Return the token for padding. Raises ModelError: the tokenizer lacks it."""
        token = self._backend.find(self._pad)
        if token is None:
            raise ModelError(f"the tokenizer has no token {self._pad[:80]!r} for padding")
        return token

    def render(self, prompt: str) -> str:
        """Return the prompt in the model's chat template, with the generation prompt.

        Raises:
            ModelError: The template fails, or leaves out the prompt. The message never quotes the
                prompt and may be logged.
        """
        content = self._template.forms.find("user").convert(prompt)
        values = {
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "enable_thinking": self._is_thinking,
        }
        try:
            text = self._template.render(values)
        except UsageError:
            raise ChatTemplateError("the chat template refuses the messages") from None
        if is_lost(prompt, text):
            raise ChatTemplateError("the chat template leaves out the prompt")
        return text

    def encode(self, prompt: str) -> PromptTokens:
        """Return the tokens of the prompt in its template, 512 at most.

        Raises:
            ModelError: There are none, or the tokenizer fails.
        """
        tokens, total = self._backend.encode_counted(self.render(prompt))
        if not tokens:
            raise ModelError("the tokenizer returned no tokens for the prompt")
        return PromptTokens(tokens, total, self._is_cut_before)
