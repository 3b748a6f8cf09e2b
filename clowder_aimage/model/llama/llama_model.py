"""A GGUF language model, run by llama.cpp."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats.gguf import quantization
from clowder_aimage.model.llama.gguf_check import GgufFacts, check_adapter, check_model
from clowder_aimage.model.llama.gguf_layers import GgufLayers, read_layers
from clowder_aimage.model.llama.llama_params import fit_context, gpus, make_params
from clowder_aimage.model.llama.llama_server import LlamaServer
from clowder_aimage.model.text.language_model import (
    COMPLETION,
    EMBEDDING,
    GRAMMAR,
    LENGTH,
    LOGPROBS,
    STOP,
    ContextError,
    EmbeddingRequest,
    Embeddings,
    Sampling,
    TextEnd,
    TextEvent,
    TextPiece,
    TextRequest,
    Token,
    require,
)

_MEAN, _RANK = 1, 4  # enum llama_pooling_type
_ENCODERS = ("bert", "t5encoder", "gemma-embedding", "llama-embed")  # parts of architectures
_LEAST_LOGPROB = -9999.0  # of a token without a probability, as in OpenAI's API
_SEEDS = (1 << 32) - 1  # llama.cpp draws a seed for the last value
_SAMPLING = {  # by the field of Sampling: llama.cpp's name, tools/server/README.md
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
_SENTINEL = "@#@#"


def load(
    files: BlobFiles,
    aimage: AImage,
    *,
    dtype: str | None = None,  # noqa: ARG001 - llama.cpp computes in the types of the weights
    memory: int | None = None,
    context: int | None = None,
    parallel: int = 1,
) -> LlamaModel:
    """Load a model. Arguments and errors are those of ``load_language_model``."""
    layers = read_layers(files, aimage)
    facts = check_model(layers.metadata, layers.tensors.values())
    for adapter, _ in layers.adapters:
        check_adapter(
            adapter.header.metadata, adapter.header.tensors, facts.architecture, layers.tensors
        )
    pooling = _pooling(facts)
    wanted = context or _whole(layers.params, "num_ctx")
    weights = sum(file.layer.descriptor.size for file in layers.model)
    tokens, pool = fit_context(
        facts,
        weights,
        is_embedding=pooling is not None,
        wanted=wanted,
        parallel=parallel,
        memory=memory,
    )
    adapters = [(file.path, scale) for file, scale in layers.adapters]
    with layers.linked() as path:
        params = make_params(
            path, adapters, context=tokens, pool=pool, parallel=parallel, pooling=pooling
        )
        server = LlamaServer(params)
    return LlamaModel(server, layers, facts, tokens, parallel, pooling is not None)


class LlamaModel:
    """A loaded model, see LanguageModel. The text of a request is computed ahead of its reader."""

    def __init__(
        self,
        server: LlamaServer,
        layers: GgufLayers,
        facts: GgufFacts,
        context: int,
        parallel: int,
        is_embedding: bool,
    ) -> None:
        self._server, self._layers, self._facts = server, layers, facts
        self.context, self.parallel = context, parallel
        self.device = f"{gpus()[0]}, llama.cpp" if gpus() else "cpu, llama.cpp"
        self.dtype = quantization(layers.metadata, layers.tensors.values()) or "F32"
        self.capabilities = frozenset(
            (EMBEDDING,) if is_embedding else (COMPLETION, GRAMMAR, LOGPROBS)
        )
        self._grammars: dict[str, str] = {}  # by schema

    def close(self) -> None:
        """End all requests and release the model."""
        self._server.close()

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return embeddings. Raises UsageError, ContextError."""
        require(self.capabilities, EMBEDDING, "input")
        answer = self._server.embed(request.texts)
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        vectors = tuple(_unit(row["embedding"]) for row in rows)
        return Embeddings(vectors, int(answer["usage"]["prompt_tokens"]))

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield pieces, and a TextEnd; see LanguageModel."""
        require(self.capabilities, COMPLETION, "prompt")
        body = self._body(request, str(request.prompt))
        text = self._text(body, request)
        next(text)  # raises at once
        return text

    def _text(self, body: dict[str, Any], request: TextRequest) -> Generator[Any, None, None]:
        with closing(self._server.stream(body)) as answers:
            total = _prompt_tokens(next(answers))
            if total >= self.context:
                raise ContextError(total, self.context)
            yield None
            for answer in answers:
                yield from _pieces(answer, request)
                if (end := _end(answer, total, self.context)) is not None:
                    yield end
                    return
        raise ModelError("llama.cpp ended without a result")

    def _body(self, request: TextRequest, prompt: str) -> dict[str, Any]:
        """Return llama.cpp's request."""
        body: dict[str, Any] = {
            "prompt": prompt,
            "stream": True,
            "return_progress": True,
            "timings_per_token": True,
            "cache_prompt": True,
            "n_predict": request.max_tokens or _whole(self._layers.params, "num_predict") or -1,
            "stop": [*request.stop, *_stops(self._layers.params)],
        }
        body |= _sampling(self._layers.params) | _sampled(request.sampling)
        if request.alternatives is not None:
            body["logprobs"] = max(1, request.alternatives)
        if request.schema is not None:
            body["grammar"] = self._grammar(request.schema)
        return body

    def _grammar(self, schema: Mapping[str, Any]) -> str:
        """Return the grammar of a JSON Schema. Raises UsageError if it is unsupported."""
        import xllamacpp

        value = dict(schema) or {"type": "object"}
        key = json.dumps(value, sort_keys=True)
        if key not in self._grammars:
            try:
                grammar = xllamacpp.json_schema_to_grammar(value)
            except (RuntimeError, TypeError, ValueError, RecursionError) as error:
                raise _schema_error(str(error)) from None
            self._check_grammar(grammar)
            if len(self._grammars) >= 64:
                self._grammars.clear()
            self._grammars[key] = grammar
        return self._grammars[key]

    def _check_grammar(self, grammar: str) -> None:
        """Refuse a grammar that llama.cpp would ignore, as it does if LLGuidance rejects it.

        A text that must begin with a certain word does only if the grammar is in use.
        """
        head, start, rest = grammar.partition("start: ")
        if not start:  # of llama.cpp's own kind: errors are reported
            return
        tried = f'{head}{start}"{_SENTINEL}" {rest}'
        body = {"prompt": ".", "n_predict": 4, "temperature": 0, "grammar": tried, "stream": True}
        text = ""
        with closing(self._server.stream(body)) as answers:
            for answer in answers:
                text += answer["choices"][0]["text"]
        if not text or not _SENTINEL.startswith(text[: len(_SENTINEL)]):
            raise _schema_error("it is invalid, or has keywords that are not supported")


def _schema_error(reason: str) -> UsageError:
    error = UsageError(f"the JSON Schema cannot be used: {reason:.300}")
    error.facts["field"] = "response_format"
    return error


def _pooling(facts: GgufFacts) -> int | None:
    """Return the pooling of an embedding model, None for other models. Raises ModelError."""
    if facts.pooling == _RANK:
        raise ModelError("the model ranks documents; only text and embeddings are supported")
    if any(part in facts.architecture for part in _ENCODERS):
        return facts.pooling or _MEAN
    return facts.pooling or None


def _prompt_tokens(answer: Mapping[str, Any]) -> int:
    return int(answer["prompt_progress"]["total"])


def _end(answer: Mapping[str, Any], total: int, context: int) -> TextEnd | None:
    """Return the end if this is the last answer, or if the context is full."""
    reason = answer["choices"][0]["finish_reason"]
    timings = answer.get("timings") or {}
    count = int(timings.get("predicted_n", 0))
    if reason is None and total + count < context:
        return None
    return TextEnd(
        STOP if reason == "stop" else LENGTH,
        total,
        count,
        int(timings.get("cache_n", 0)),
        float(timings.get("prompt_ms", 0)) / 1000,
        float(timings.get("predicted_ms", 0)) / 1000,
    )


def _pieces(answer: Mapping[str, Any], request: TextRequest) -> Generator[TextPiece, None, None]:
    choice = answer["choices"][0]
    found = (choice.get("logprobs") or {}).get("content") or ()
    tokens = tuple(_token(one, request.alternatives or 0) for one in found)
    if choice["text"] or tokens or "prompt_progress" in answer:  # an empty piece is progress
        yield TextPiece(choice["text"], tokens=tokens)


def _token(value: Mapping[str, Any], alternatives: int) -> Token:
    others = value.get("top_logprobs", ())[:alternatives]
    logprob = value["logprob"]
    return Token(
        value["token"],
        tuple(value["bytes"]),
        _LEAST_LOGPROB if logprob is None else float(logprob),
        tuple(_token(one, 0) for one in others),
    )


def _unit(vector: list[float]) -> tuple[float, ...]:
    length = math.sqrt(sum(one * one for one in vector))
    if not length or not math.isfinite(length):
        raise ModelError("the model gives no embedding: its numbers are not finite")
    return tuple(one / length for one in vector)


def _sampled(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request that are not None, by llama.cpp's names."""
    values = {name: getattr(sampling, field) for field, name in _SAMPLING.items()}
    if values["seed"] is not None:
        values["seed"] %= _SEEDS
    return {name: value for name, value in values.items() if value is not None}


def _sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the model, from ollama's params. Raises FormatError."""
    own = {field: params[name] for field, name in _SAMPLING.items() if name in params}
    try:
        return _sampled(Sampling(**own))
    except (UsageError, TypeError) as error:
        raise FormatError(f"params.json: {error}") from None


def _stops(params: Mapping[str, Any]) -> list[str]:
    stops = params.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise FormatError("params.json: stop is not a list of texts")
    return stops


def _whole(params: Mapping[str, Any], name: str) -> int | None:
    """Return a positive number of the params; ollama writes -1 for none."""
    value = params.get(name)
    return value if type(value) is int and value > 0 else None
