"""A GGUF language model, run by llama.cpp."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import chain
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.formats.gguf import resolve_quantization
from clowder_aimage.model.llama.digit_bound import DigitBound
from clowder_aimage.model.llama.gguf_check import GgufFacts, check_adapter, check_model
from clowder_aimage.model.llama.gguf_layers import GgufLayers, read_layers
from clowder_aimage.model.llama.grammar import Grammar, Grammars
from clowder_aimage.model.llama.params import (
    STEP,
    fit_context,
    get_default_memory,
    list_gpus,
    make_params,
)
from clowder_aimage.model.llama.request import ModelParams, parse_tokens, split_drawn_tokens
from clowder_aimage.model.llama.server import LlamaServer
from clowder_aimage.model.llama.slot_table import SlotTable
from clowder_aimage.model.text.chat_prompt import begin_chat
from clowder_aimage.model.text.chat_template import ChatTemplate, check_request, require_template
from clowder_aimage.model.text.forced_call import build_call_schema
from clowder_aimage.model.text.language_model import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    GRAMMAR,
    LENGTH,
    LOGPROBS,
    THINKING,
    TOOLS,
    ContextError,
    EmbeddingRequest,
    Embeddings,
    TextDelta,
    TextEnd,
    TextEvent,
    TextNotice,
    TextRequest,
    begin_events,
    join_deltas,
    require,
    require_characters,
)
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.text_facts import GGUF_TEMPLATES
from clowder_aimage.model.text.tool_call_format import call_format

__all__ = ["LlamaModel", "get_default_memory", "load"]
_log = logging.getLogger("aimage.worker")
_MEAN, _RANK = 1, 4  # enum llama_pooling_type
_ENCODERS = ("bert", "t5encoder", "gemma-embedding", "llama-embed")  # parts of architectures
_INTERVAL = 0.1  # seconds between two looks whether a request is cancelled
_ROLES = ("bos", "eos", "unknown", "seperator", "padding", "cls", "mask")  # the keys' spelling


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
    if layers.left_out:
        _log.warning("not used by llama.cpp here: %s", ", ".join(layers.left_out))
    facts = check_model(layers.metadata, layers.tensors.values())
    for file, _ in layers.adapters:
        header = file.header
        check_adapter(header.metadata, header.tensors, facts.architecture, layers.tensors)
    pooling = _resolve_pooling(facts)
    is_embedding = pooling is not None
    template = None if is_embedding else _build_template(layers, facts)
    params = ModelParams(layers.params)
    tokens, count = fit_context(
        facts,
        layers.size,
        is_embedding=is_embedding,
        requested=context or params.context,
        parallel=parallel,
        memory=memory,
    )
    server = _serve(layers, context=tokens, parallel=count, pooling=pooling)
    bos = (
        ""
        if is_embedding
        else _detect_added_bos(server, facts.decode_special_token(layers.metadata, "bos"))
    )
    return LlamaModel(server, layers, template, params, bos, tokens, count)


def _serve(
    layers: GgufLayers,
    *,
    context: int,
    parallel: int = 1,
    pooling: int | None = None,
    prefix: str = "",
) -> LlamaServer:
    """Return a server. begun: the text before the rules of a grammar. Raises ModelError."""
    adapters = [(file.path, scale) for file, scale in layers.adapters]
    with layers.link() as path:
        params = make_params(
            path,
            adapters,
            weights=layers.size,
            context=context,
            parallel=parallel,
            pooling=pooling,
        )
        params.sampling.generation_prompt = prefix
        return LlamaServer(params)


class LlamaModel:
    """A loaded model, see LanguageModel. The text of a request is computed ahead of its reader.

    template: of chats; None if it only continues texts, or embeds them. bos: the token that
    llama.cpp puts in front of each prompt.
    """

    warnings: tuple[str, ...] = ()

    def __init__(
        self,
        server: LlamaServer,
        layers: GgufLayers,
        template: ChatTemplate | None,
        params: ModelParams,
        bos: str,
        context: int,
        parallel: int,
    ) -> None:
        self._server, self._layers, self._template = server, layers, template
        self._params, self._bos, self._grammars = params, bos, Grammars()
        self._slots = SlotTable(parallel)
        self.context, self.parallel = context, parallel
        self.device = f"{next(iter(list_gpus()), 'cpu')}, llama.cpp"
        self.dtype = resolve_quantization(layers.metadata, layers.tensors.values()) or "F32"

    @property
    def capabilities(self) -> frozenset[str]:
        if self._server.is_embedding:
            return frozenset({EMBEDDING})
        features = {COMPLETION, GRAMMAR, LOGPROBS}
        if self._template is not None:
            features.add(CHAT)
            features |= {TOOLS} if self._template.has_tools else set()
            features |= {THINKING} if self._template.has_thinking else set()
        return frozenset(features)

    def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return embeddings. Raises UsageError, ContextError."""
        require(self.capabilities, EMBEDDING, "model")
        if request.prompt is not None:
            raise UsageError("a GGUF model has no prompts by name", field="prompt_name")
        require_characters("".join(request.texts))
        try:
            answer = self._server.embed(request.texts)
        except ContextError as error:  # llama.cpp's own context is rounded up
            raise ContextError(int(error.facts["tokens"]), self.context) from None
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        vectors = tuple(_normalize(row["embedding"]) for row in rows)
        return Embeddings(vectors, int(answer["usage"]["prompt_tokens"]))

    def try_schema(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Try the grammar of a request; see LanguageModel."""
        check_request(request, self.capabilities)
        if request.has_grammar:
            self._build_grammar(request, is_cancelled)

    def prepare(self, request: TextRequest, is_cancelled: Callable[[], bool]) -> None:
        """Wait until the grammar of a request may be used; see LanguageModel."""
        check_request(request, self.capabilities)
        if not request.has_grammar:
            return
        end = time.monotonic() + self._grammars.reserve(self._build_grammar(request, is_cancelled))
        while (seconds := end - time.monotonic()) > 0 and not is_cancelled():
            time.sleep(min(seconds, _INTERVAL))

    def generate(self, request: TextRequest) -> Generator[TextEvent, None, None]:
        """Yield deltas, calls and a TextEnd, see LanguageModel."""
        require(self.capabilities, COMPLETION, "model")
        check_request(request, self.capabilities)
        prompt, stream, notice = self._begin(request)
        require_characters(prompt)
        body = self._params.build_body(request, prompt.removeprefix(self._bos))
        # Only if this module ends the text: timings take 3 % of the time
        body["timings_per_token"] = bool(request.stop or self._params.stop or self.context % STEP)
        # Special tokens are hidden otherwise
        body["preserved_tokens"] = sorted(stream.marks)
        server, drawn = self._server, request.begun
        stream.resume(drawn, [drawn.text.encode()])
        digits = None
        if request.has_grammar:
            body["grammar"] = self._build_grammar(request).text
            digits = DigitBound()
            digits.feed(drawn.text)
            # Grammars of this type begin with the text that the server has
            if drawn.text:
                body["grammar_type"] = "tool_calls"
                server = _serve(self._layers, context=self.context, prefix=drawn.text)
        text = self._stream_text(server, body, stream, request, digits)
        while next(text) is not None:
            pass
        return begin_events(notice, text)

    def wake(self) -> None:
        """End a wait for tokens; see LanguageModel."""
        self._server.wake()

    def _build_grammar(
        self, request: TextRequest, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Grammar:
        """Return the grammar of the text. Raises UsageError with the field of the request."""
        if not request.must_call:
            return self._grammars.build(request.schema or {}, is_cancelled)
        form = call_format(require_template(self._template).source)
        try:
            return self._grammars.build(build_call_schema(request, form), is_cancelled)
        except UsageError as error:
            error.facts["field"] = "tools"
            raise

    def _begin(self, request: TextRequest) -> tuple[str, TextStream, TextNotice]:
        """Return the prompt of a request, the stream for its text, and remarks."""
        stop = self._params.stop
        if request.prompt is not None:
            return request.prompt, TextStream((*request.stop, *stop)), TextNotice()
        template, preceding = require_template(self._template), self._list_preceding(request)
        return begin_chat(template, request, stop, preceding=preceding)

    def _list_preceding(self, request: TextRequest) -> tuple[Mapping[str, Any], ...]:
        """Return the messages of the model itself."""
        system = self._layers.system
        has_system = request.messages[0].get("role") == "system" or system is None
        prefix = () if has_system else ({"role": "system", "content": system},)
        return (*prefix, *self._layers.messages)

    def _stream_text(
        self,
        server: LlamaServer,
        body: dict[str, Any],
        stream: TextStream,
        request: TextRequest,
        digits: DigitBound | None,
    ) -> Generator[Any, None, None]:
        """Yield None when the request was handed over, and its events. Close a server of its own.

        llama.cpp reads the prompts together that it has when it begins to compute, so the next
        request need not wait until it has accepted this one. One with a grammar, which may end the
        process, is accepted before None.
        """
        alternatives = request.alternatives
        is_shared = server is self._server
        server_end = nullcontext() if is_shared else closing(server)
        slot = self._taking_slot(body, request.owner) if is_shared else nullcontext()
        with server_end, slot, closing(server.stream(body)) as batches:
            next(batches)
            if not request.has_grammar:
                yield None
            total, remaining = yield from self._await_acceptance(batches, request)
            if request.has_grammar:
                yield None
            # The text was complete before this request
            if remaining is None or not body["n_predict"]:
                yield TextEnd(LENGTH, total, 0)
                return
            is_plain = alternatives is None and not body["timings_per_token"] and digits is None
            # Plain answers are joined: a fast model would spend much time on each event
            for answers in chain([remaining], batches):
                groups = [answers] if is_plain and answers else [[answer] for answer in answers]
                events = [*self._iter_events(groups, stream, total, alternatives, digits)]
                yield from join_deltas(events or [TextDelta("")])
                if events and isinstance(events[-1], TextEnd):
                    return
        raise ModelError("llama.cpp ended without a result")

    @contextmanager
    def _taking_slot(self, body: dict[str, Any], owner: str) -> Iterator[None]:
        """Take a slot for a request; the prompts of other clients are not used."""
        # A text that goes on has numbers of tokens after its prompt
        prompt = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][0]
        taken = self._slots.take(owner, prompt)
        number, is_own = taken or (None, False)
        if number is not None:
            body["id_slot"] = number
        if not is_own:
            body["cache_prompt"] = False
        try:
            yield
        finally:
            if number is not None:
                self._slots.release(number)

    def _await_acceptance(
        self, batches: Iterator[list[dict[str, Any]]], request: TextRequest
    ) -> Generator[TextDelta, None, tuple[int, list[dict[str, Any]] | None]]:
        """Return the number of tokens of the prompt, and the answers that came with it.

        No answers come if a text goes on that has reached the end of the context. Raises
        ContextError, UsageError.
        """
        try:
            while not (answers := next(batches)):
                yield TextDelta("")
            progress, *remaining = answers
            total = _count_prompt_tokens(progress)
            if total >= self.context:
                raise ContextError(total, self.context)
        except ContextError as error:
            if not request.begun.count:
                raise
            return int(error.facts["tokens"]), None
        return total, remaining

    def _iter_events(
        self,
        groups: Iterable[Sequence[Mapping[str, Any]]],
        stream: TextStream,
        total: int,
        alternatives: int | None,
        digits: DigitBound | None,
    ) -> Generator[TextEvent, None, None]:
        """Yield the events of answers up to the end; the prompt has ``total`` tokens."""
        for group in groups:
            answer = _join(group)
            if "prompt_progress" in answer:
                # Other requests can run while the prompt is read
                yield TextDelta("")
            shown, hidden = split_drawn_tokens(group, stream.count)
            yield from stream.attach_drawn(_feed(stream, answer, alternatives), shown)
            yield from stream.attach_drawn((), hidden)
            reason = answer["choices"][0]["finish_reason"]
            timings = answer.get("timings") or {}
            is_full = total + int(timings.get("predicted_n", 0)) >= self.context
            is_full = is_full or (digits is not None and digits.feed(answer["choices"][0]["text"]))
            if reason or stream.is_stopped or is_full:
                yield from stream.finish()
                is_ended = reason == "stop" or stream.is_stopped
                yield _end(stream.reason if is_ended else LENGTH, total, timings)
                return


def _build_template(layers: GgufLayers, facts: GgufFacts) -> ChatTemplate | None:
    """Return the template of a layer, else those of the file. Raises ModelError."""
    sources = {}
    for name, key in GGUF_TEMPLATES.items():
        if isinstance(source := layers.metadata.get(key), str):
            sources[name] = source
    if layers.template is not None:
        sources = {"default": layers.template}
    if not sources:
        return None
    texts = {role: facts.decode_special_token(layers.metadata, role) for role in _ROLES}
    names = {"unknown": "unk", "seperator": "sep", "padding": "pad"}
    tokens = {f"{names.get(role, role)}_token": text for role, text in texts.items() if text}
    sources = {"default": next(iter(sources.values())), **sources}
    return ChatTemplate(sources, tokens, *facts.list_added_tokens(layers.metadata))


def _detect_added_bos(server: LlamaServer, bos: str) -> str:
    """Return the token if llama.cpp puts it in front of each prompt, else an empty text.

    That depends on the kind of tokenizer. The first request also reads the weights.
    """
    body = {"prompt": bos or ".", "n_predict": 1, "stream": True, "return_progress": True}
    with closing(server.stream(body)) as batches:
        progress, *_ = chain.from_iterable(batches)
    return bos if _count_prompt_tokens(progress) > 1 else ""


def _resolve_pooling(facts: GgufFacts) -> int | None:
    """Return the pooling of an embedding model, None for other models. Raises ModelError."""
    if facts.pooling == _RANK:
        raise ModelError("the model ranks documents; only text and embeddings are supported")
    if any(encoder in facts.architecture for encoder in _ENCODERS):
        return facts.pooling or _MEAN
    return facts.pooling or None


def _count_prompt_tokens(answer: Mapping[str, Any]) -> int:
    if (progress := answer.get("prompt_progress")) is None:
        raise UsageError("the prompt has no tokens", field="prompt")
    return int(progress["total"])


def _join(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last answer with the text of all."""
    choices = [answer["choices"][0] for answer in answers]
    text = "".join(choice["text"] for choice in choices)
    return {**answers[-1], "choices": [{**choices[-1], "text": text}]}


def _feed(
    stream: TextStream, answer: Mapping[str, Any], alternatives: int | None
) -> list[TextEvent]:
    """Convert an answer of the server to events."""
    choice = answer["choices"][0]
    head, *tail = parse_tokens(choice, alternatives) or (None,)
    events = stream.feed(choice["text"].encode(), head)
    return events + [event for token in tail for event in stream.feed(b"", token)]


def _end(reason: str, total: int, timings: Mapping[str, Any]) -> TextEnd:
    return TextEnd(
        reason,
        total,
        int(timings.get("predicted_n", 0)),
        int(timings.get("cache_n", 0)),
        float(timings.get("prompt_ms", 0)) / 1000,
        float(timings.get("predicted_ms", 0)) / 1000,
    )


def _normalize(vector: list[float]) -> tuple[float, ...]:
    length = math.sqrt(sum(number * number for number in vector))
    if not length or not math.isfinite(length):
        raise ModelError("the model computed an embedding with values that are not finite")
    return tuple(number / length for number in vector)
