"""Embeddings of texts by language models that state how: the states before the head, pooled.

Mean pooling of a model that was trained to continue texts says little, so there is no default.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from clowder_aimage.errors import ModelError
from clowder_aimage.model.backend import mx
from clowder_aimage.model.text.embedding_recipe import read_recipe
from clowder_aimage.model.text.sentence_embedding import SentenceEmbedder, Tokens
from clowder_aimage.model.text.sentence_pooling import Floats, SentencePooling
from clowder_aimage.model.text.tokenizer_file import TokenizerFiles
from clowder_aimage.model.tokenizer_backend import TokenizerBackend


def find_embedder(
    files: TokenizerFiles, network: Any, backend: TokenizerBackend, context: int
) -> SentenceEmbedder | None:
    """Return what computes embeddings as the files state; None without a pooling.

    Raises ModelError: it is not supported.
    """
    recipe = read_recipe(files.read)
    if not recipe.has_pooling:
        return None
    inner = getattr(network, "model", None)
    if not callable(inner) or recipe.is_lower:
        raise ModelError("the files state a pooling, which this network does not support")
    compute = partial(_compute_states, inner)
    # The width of the states is not known before the first text
    pooling = SentencePooling.load(files.store, files.aimage, recipe)
    return SentenceEmbedder(compute, backend, pooling, context)


def _compute_states(network: Any, texts: Sequence[Tokens]) -> list[Floats]:
    return [
        np.array(network(mx.array([tokens]))[0].astype(mx.float32), np.float32) for tokens in texts
    ]
