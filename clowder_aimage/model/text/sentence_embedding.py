"""From texts to embeddings, whatever the network: prompts, tokens, states, pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from clowder_aimage.errors import UsageError
from clowder_aimage.model.text.language_model import (
    ContextError,
    EmbeddingRequest,
    Embeddings,
    require_characters,
)
from clowder_aimage.model.text.sentence_pooling import Floats, SentencePooling
from clowder_aimage.model.tokenizer_backend import EncodingLimits, TokenizerBackend

_ENCODING = EncodingLimits(text=4 << 20, seconds=10.0)
Tokens = list[int]
# From the tokens of texts to their states, (tokens, width)
Compute = Callable[[Sequence[Tokens]], Sequence[Floats]]


@dataclass(frozen=True, slots=True)
class SentenceEmbedder:
    """A network with its tokenizer and its pooling.

    context: the maximum number of tokens. Texts are cut at the length that the model's files state;
    if there is no room for that, longer ones are refused.
    """

    compute: Compute
    backend: TokenizerBackend
    pooling: SentencePooling
    context: int

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return embeddings. Raises UsageError, ContextError, ModelError."""
        recipe = self.pooling.recipe
        prompt = recipe.find_prompt(request.prompt)
        skipped = self._count_prompt(prompt) if recipe.skips_prompt and prompt else 0
        encoded = [self._encode(prompt + text) for text in request.texts]
        texts = [tokens for tokens, _ in encoded]
        vectors = tuple(self.pooling.pool(states, skipped) for states in self.compute(texts))
        cut = sum(is_cut for _, is_cut in encoded)
        return Embeddings(vectors, sum(map(len, texts)), cut, recipe.max_length or self.context)

    def _encode(self, text: str) -> tuple[Tokens, bool]:
        require_characters(text)
        recipe = self.pooling.recipe
        limits = replace(_ENCODING, tokens=recipe.max_length, side=recipe.cut_side)
        tokens, total = self.backend.encode_counted(text, limits=limits)
        if not tokens:
            raise UsageError("a text has no tokens", field="texts")
        if len(tokens) > self.context:
            raise ContextError(len(tokens), self.context)
        return tokens, total > len(tokens)

    def _count_prompt(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, without the special token at its end."""
        tokens, _ = self._encode(prompt)
        return len(tokens) - bool(self.backend.added.get(tokens[-1]))
