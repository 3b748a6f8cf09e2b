"""A language model of mlx-lm, read from the blobs of an AImage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.formats.transformers import build_facts
from clowder_aimage.model.backend import get_device_memory, mx
from clowder_aimage.model.hardware import get_machine_memory
from clowder_aimage.model.mlxlm import library
from clowder_aimage.model.mlxlm.embedding import find_embedder
from clowder_aimage.model.mlxlm.generation import Prompt, TextGeneration
from clowder_aimage.model.mlxlm.generation_config import list_warnings, parse_defaults
from clowder_aimage.model.mlxlm.network_weights import (
    choose_form,
    count_parameter_bytes,
    format_dtype,
    load_network,
)
from clowder_aimage.model.mlxlm.prompt_cache import PromptCache, cache_size
from clowder_aimage.model.mlxlm.token_batch import TokenBatch
from clowder_aimage.model.mlxlm.token_sampler import TokenSampler
from clowder_aimage.model.text.chat_prompt import begin_chat
from clowder_aimage.model.text.chat_template import ChatTemplate, check_request, require_template
from clowder_aimage.model.text.language_model import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    LOGPROBS,
    THINKING,
    TOOLS,
    ContextError,
    EmbeddingRequest,
    Embeddings,
    Sampling,
    TextEvent,
    TextNotice,
    TextRequest,
    begin_events,
    require,
    require_characters,
)
from clowder_aimage.model.text.sentence_embedding import SentenceEmbedder
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.token_table import TokenTable
from clowder_aimage.model.text.tokenizer_file import TokenizerFiles
from clowder_aimage.model.tokenizer_backend import EncodingLimits, TokenizerBackend
from clowder_aimage.model.weights import ModelWeights

_ENCODING = EncodingLimits(text=4 << 20, seconds=10.0)
# Tokens of a request, before several requests share the memory
_USUAL_CONTEXT = 8192
# Of a configuration without one
_DEFAULT_CONTEXT = 4096
_LEAST_CONTEXT = 16
# Tokens for which mlx-lm's caches allocate at once
_SLOTS = 256
# Of the memory; the rest is for activations
_RESERVE = 0.9
# Of the memory for caches: those of earlier requests
_KEPT = 0.25


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of a request's context, of the number of requests, and of cached caches (bytes)."""

    context: int
    parallel: int
    cached: int

    @classmethod
    def of(
        cls, memory: int, token_size: int, native: int, requested: int | None, parallel: int
    ) -> CachePlan:
        """Divide ``memory`` bytes for caches of ``token_size`` bytes per token.

        A context of ``requested`` tokens, else of 8,192, has precedence over parallel requests, and
        these over a longer context.

        Raises:
            UsageError: The memory is insufficient for one request.
        """
        shared = int(memory * (1 - _KEPT))
        most = shared // max(1, token_size)  # tokens of all requests
        if most < min(native, requested or _LEAST_CONTEXT):
            raise UsageError(
                f"the memory has room for {max(0, most)} tokens of the context, "
                f"{requested or _LEAST_CONTEXT} are required"
            )
        context = min(native, requested or max(most // parallel, _USUAL_CONTEXT), most)
        return cls(context, max(1, min(parallel, most // context)), memory - shared)


class MlxModel:
    """A loaded model, see the protocol ``LanguageModel``."""

    def __init__(
        self,
        network: Any,
        backend: TokenizerBackend,
        template: ChatTemplate | None,
        ends: frozenset[int],
        defaults: Sampling,
        plan: CachePlan,
        dtype: str,
    ) -> None:
        self._network, self._backend, self._template = network, backend, template
        self._table, self._ends, self._defaults = TokenTable(backend), ends, defaults
        self._prompt_cache = PromptCache(network, plan.cached)
        self._batch = TokenBatch(network)
        self.warnings: tuple[str, ...] = ()
        self._embedder: SentenceEmbedder | None = None
        self.context, self.parallel, self.dtype = plan.context, plan.parallel, dtype
        self.device = library.describe()

    @property
    def capabilities(self) -> frozenset[str]:
        features = {COMPLETION, LOGPROBS}
        if self._template is not None:
            features.add(CHAT)
            features |= {TOOLS} if self._template.has_tools else set()
            features |= {THINKING} if self._template.has_thinking else set()
        return frozenset(features | ({EMBEDDING} if self._embedder else set()))

    def try_schema(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:  # noqa: ARG002
        """Refuse a schema: there are no grammars."""
        check_request(request, self.capabilities)

    def prepare(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Return at once: nothing takes long before the turn of a request."""

    def wake(self) -> None:
        """Do nothing: no text waits."""

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        check_request(request, self.capabilities)
        prompt, stream, notice = self._begin(request)
        notice = replace(notice, warnings=(*self.warnings, *notice.warnings))
        sampling = self._resolve_sampling(request.sampling)
        sampler = TokenSampler(sampling, prompt.tokens, self.context, prompt.begun.count)
        generation = TextGeneration(
            self._network, self._batch, self._prompt_cache, self._table, self._ends
        )
        return begin_events(notice, generation.run(prompt, sampler, stream))

    def _begin(self, request: TextRequest) -> tuple[Prompt, TextStream, TextNotice]:
        """Return the tokens of a request, the stream for its text, and remarks."""
        if request.prompt is not None:
            stream, notice = TextStream(request.stop), TextNotice()
            tokens = self._encode(request.prompt, has_special=True)
        else:
            template, is_stripped = require_template(self._template), self._table.has_leading_space
            text, stream, notice = begin_chat(template, request, is_stripped=is_stripped)
            tokens = self._encode(text, has_special=False)
        if not tokens:
            raise UsageError("the prompt has no tokens", field="prompt")
        if len(tokens) >= self.context:
            raise ContextError(len(tokens), self.context)
        room, begun = self.context - len(tokens), request.begun
        count = min(room, request.max_tokens or room) - begun.count
        # This runtime states all tokens as numbers
        numbers = [number for number in begun.numbers if isinstance(number, int)]
        prompt = Prompt([*tokens, *numbers], count, request.alternatives, begun, request.owner)
        return prompt, stream, notice

    def _encode(self, text: str, *, has_special: bool) -> list[int]:
        require_characters(text)
        return self._backend.encode(text, limits=replace(_ENCODING, has_special=has_special))

    def _resolve_sampling(self, sampling: Sampling) -> Sampling:
        """Return the options of a request, with the model's defaults and a seed."""
        requested = {field.name: getattr(sampling, field.name) for field in fields(Sampling)}
        usual = {name: getattr(self._defaults, name) for name in requested}
        chosen = {
            name: usual[name] if value is None else value for name, value in requested.items()
        }
        if chosen["seed"] is None:
            chosen["seed"] = secrets.randbits(63)
        return Sampling(**chosen)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        require(self.capabilities, EMBEDDING, "model")
        assert self._embedder is not None  # noqa: S101 - a capability
        return self._embedder.embed(request)


def load(
    files: BlobFiles,
    aimage: AImage,
    *,
    dtype: str | None = None,
    memory: int | None = None,
    context: int | None = None,
    parallel: int = 1,
) -> MlxModel:
    """Load a model on the calling thread, see ``load_language_model``."""
    library.enter()
    weights = ModelWeights.open(files, aimage)
    tokenizer = TokenizerFiles(files, aimage)
    config, generation = tokenizer.read_config(), tokenizer.read_object("generation_config.json")
    backend, defaults = tokenizer.build_backend(config), parse_defaults(generation)
    sources, special = tokenizer.read_templates(config), tokenizer.list_special_tokens(config)
    added = {backend.find_text(number) or "": kind for number, kind in backend.added.items()}
    hidden = [text for text, is_special in added.items() if is_special]
    template = ChatTemplate(sources, special, added, hidden) if sources else None
    built = library.make_network(weights.config, context)
    network = built.network
    limit = int(_RESERVE * (memory or get_default_memory()))
    chosen, is_quantized = choose_form(weights, dtype, limit)
    load_network(weights, network, chosen, keep_quantized=is_quantized)
    cache_memory = limit - count_parameter_bytes(network)
    native = build_facts(weights.config).get("context", _DEFAULT_CONTEXT)
    native = min(native, built.limit or native)
    plan = CachePlan.of(cache_memory, _measure_token_size(network), native, context, parallel)
    ends = _ends(generation, weights.config, backend, special)
    model = MlxModel(network, backend, template, ends, defaults, plan, format_dtype(chosen))
    model._embedder = find_embedder(tokenizer, network, backend, model.context)  # noqa: SLF001
    model.warnings = (*built.warnings, *list_warnings(generation))
    return model


def get_default_memory() -> int:
    """Return the bytes of a model if no number is given."""
    return get_device_memory() or get_machine_memory() or 1 << 40


def _measure_token_size(network: Any) -> int:
    """Return the bytes of a cache per token, from a run with one token.

    Raises ModelError: the network fails, as with fewer layers than it expects.
    """
    try:
        cache = library.import_library_module("models.cache").make_prompt_cache(network)
        mx.eval(network(mx.array([[0]]), cache=cache))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"the network does not run with config.json: {reason:.300}") from error
    return -(-cache_size(cache) // _SLOTS)


def _ends(
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    backend: TokenizerBackend,
    special: Mapping[str, str],
) -> frozenset[int]:
    """Return the tokens that end a text."""
    inner = config.get("text_config")
    ends: set[int] = set()
    for source in (generation, config, inner if isinstance(inner, dict) else {}):
        value = source.get("eos_token_id")
        ends |= {
            token for token in (value if isinstance(value, list) else [value]) if type(token) is int
        }
    if (end := backend.find(special.get("eos_token", ""))) is not None:
        ends.add(end)
    return frozenset(ends)
