"""An encoder as a language model that computes embeddings, read from the blobs of an AImage."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, NoMemoryError
from clowder_aimage.model.backend import DTYPES, describe, get_device_memory, mx
from clowder_aimage.model.encoder.network import Encoder
from clowder_aimage.model.encoder.tokenizer import build_tokenizer
from clowder_aimage.model.hardware import get_machine_memory
from clowder_aimage.model.library_choice import choose_dtype_name
from clowder_aimage.model.text.encoder_config import EncoderConfig, read_encoder
from clowder_aimage.model.text.language_model import (
    COMPLETION,
    EMBEDDING,
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEvent,
    TextRequest,
    require,
)
from clowder_aimage.model.text.sentence_embedding import SentenceEmbedder, Tokens
from clowder_aimage.model.text.sentence_pooling import Floats, SentencePooling
from clowder_aimage.model.text.tokenizer_file import TokenizerFiles
from clowder_aimage.model.weights import ModelWeights

# Of the memory; the rest is for activations
_RESERVE = 0.9


class EncoderModel:
    """A loaded model, see the protocol ``LanguageModel``."""

    capabilities = frozenset({EMBEDDING})
    warnings: tuple[str, ...] = ()

    def __init__(self, embedder: SentenceEmbedder, parallel: int, dtype: str) -> None:
        self._embedder = embedder
        self.context, self.parallel, self.dtype = embedder.context, parallel, dtype
        self.device = describe()

    def try_schema(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Refuse the request: the model writes no texts."""
        require(self.capabilities, COMPLETION, "model")

    def prepare(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Refuse the request: the model writes no texts."""
        require(self.capabilities, COMPLETION, "model")

    def wake(self) -> None:
        """Do nothing: no text waits."""

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:  # noqa: ARG002
        """Refuse the request at once: the model writes no texts."""
        require(self.capabilities, COMPLETION, "model")
        return (TextDelta("") for _ in ())

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return embeddings; texts beyond the context are cut, and counted."""
        return self._embedder.embed(request)


def load(
    files: BlobFiles,
    aimage: AImage,
    *,
    dtype: str | None = None,
    memory: int | None = None,
    context: int | None = None,
    parallel: int = 1,
) -> EncoderModel:
    """Load a model on the calling thread, see ``load_language_model``.

    The default type is float32 on a GPU too: embeddings are compared with those of other programs.
    """
    weights = ModelWeights.open(files, aimage)
    tokenizer = TokenizerFiles(files, aimage)
    config, recipe = read_encoder(weights.config, tokenizer.read, context)
    name = choose_dtype_name(dtype, is_gpu=False)
    limit = int(_RESERVE * (memory or get_default_memory()))
    network = _load_network(weights, config, DTYPES[name], limit)
    backend = build_tokenizer(tokenizer, config.kind, is_lower=recipe.is_lower)
    pooling = SentencePooling.load(files, aimage, recipe)
    compute = partial(_compute_states, network)
    embedder = SentenceEmbedder(compute, backend, pooling, recipe.max_length or config.context)
    return EncoderModel(embedder, parallel, name)


def _load_network(
    weights: ModelWeights, config: EncoderConfig, dtype: mx.Dtype, limit: int
) -> Encoder:
    """Return the network with its weights, of at most ``limit`` bytes. Raises ModelError."""
    network = Encoder(config)
    unused = network.list_unused(weights.keys())
    size, _ = weights.check(network, skip=unused.__contains__, dtype=dtype)
    if size > limit:
        raise NoMemoryError(f"the weights take {size >> 20} MiB; the limit is {limit >> 20} MiB")
    weights.apply(network, skip=unused.__contains__, dtype=dtype)
    return network


def _compute_states(network: Encoder, texts: Sequence[Tokens]) -> list[Floats]:
    """Return the states of texts. Raises ModelError: the tokenizer is that of another network."""
    if max(map(max, texts)) >= network.config.tokens:
        raise ModelError("the tokenizer has more tokens than the network")
    return [np.array(states.astype(mx.float32)) for states in network(texts)]


def get_default_memory() -> int:
    """Return the bytes of a model if no number is given."""
    return get_device_memory() or get_machine_memory() or 1 << 40
