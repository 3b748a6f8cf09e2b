"""Embeddings of texts by models that state how: sentence-transformers' pooling.

Mean pooling of a model that was trained to continue texts says little, so there is no default.
Format: sentence-transformers, ``modules.json`` and ``1_Pooling/config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.formats.transformers import POOLING
from clowder_aimage.model.backend import mx
from clowder_aimage.model.text.tokenizer_file import TokenizerFiles

_LAST, _MEAN, _FIRST = "lasttoken", "mean_tokens", "cls_token"
_MODES = (_LAST, _MEAN, _FIRST)


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The hidden states of a network as one vector of unit length."""

    network: Any
    mode: str

    @classmethod
    def find(cls, files: TokenizerFiles, network: Any) -> TextEmbedding | None:
        """Return the pooling that the files state, or None. Raises ModelError: it is unknown."""
        if files.read("modules.json") is None and files.read(POOLING) is None:
            return None
        config = files.read_object(POOLING)
        stated = [mode for mode in _MODES if config.get(f"pooling_mode_{mode}") is True]
        inner = getattr(network, "model", None)
        if len(stated) != 1 or not callable(inner):
            raise ModelError(f"{POOLING}: one of {', '.join(_MODES)} must be stated for embeddings")
        return cls(inner, stated[0])

    def embed(self, tokens: list[int]) -> tuple[float, ...]:
        """Return the embedding of tokens."""
        states = self.network(mx.array([tokens]))[0].astype(mx.float32)
        pooled = {_LAST: lambda: states[-1], _FIRST: lambda: states[0]}.get(
            self.mode, lambda: states.mean(axis=0)
        )()
        unit = pooled / mx.maximum(mx.linalg.norm(pooled), 1e-12)
        return tuple(unit.tolist())
