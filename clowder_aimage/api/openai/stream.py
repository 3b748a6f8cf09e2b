"""The two forms of an event stream.

``PlainStream`` is that of ollama's image generation (its documentation, "Streaming Progress"):
``progress`` for each step, ``done`` with the pictures. ``OpenAIStream`` is that of OpenAI's images
API. Its clients identify an event by the ``type`` in its data. Progress is sent in comments, as
clients ignore them, or on request in events of a type that OpenAI does not have.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from clowder_aimage.api import answer_stream
from clowder_aimage.api.model_list import describe_use
from clowder_aimage.api.picture.request import AUTO, OLLAMA, OPENAI, WITH_PROGRESS, ImageRequest
from clowder_aimage.engine.event import (
    Event,
    ImageEvent,
    LoadingEvent,
    PreviewEvent,
    PullingEvent,
    QueuedEvent,
    StartedEvent,
)
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.pipeline import Step

# Keeps a picture and returns its link
KeepPicture = Callable[[ImageEvent], str]
# Older names of OpenAI's presets, and the automatic one
_QUALITIES = {"standard": "medium", "hd": "high", "auto": "medium"}


def choose(body: ImageRequest, headers: Mapping[str, str]) -> str:
    """Return the stream form that a client expects.

    OpenAI's SDKs identify themselves, but send the same Accept header for streams and others.
    """
    if body.stream_format != AUTO:
        return body.stream_format
    is_openai = "x-stainless-lang" in headers or "previews" in body.stated
    return OPENAI if is_openai else OLLAMA


def encode(picture: ImageEvent | PreviewEvent) -> str:
    """Return a picture as base64."""
    return base64.b64encode(picture.data).decode()


def build_entry(picture: ImageEvent, body: ImageRequest, keep: KeepPicture) -> dict[str, str]:
    """Return a picture as an entry of a response: its bytes or its URL."""
    is_link = body.response_format == "url"
    fields = {"url": keep(picture)} if is_link else {"b64_json": encode(picture)}
    if body.enhance:
        fields["revised_prompt"] = str(picture.facts["prompt"])
    return fields


def build_usage() -> dict[str, Any]:
    """Return zero token counts: clients require the field."""
    details = {"image_tokens": 0, "text_tokens": 0}
    counts = dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0)
    return {**counts, "input_tokens_details": details, "output_tokens_details": details}


def translate_quality(body: ImageRequest) -> str:
    """Return the preset under OpenAI's name."""
    return _QUALITIES.get(body.quality, body.quality)


class PlainStream:
    """ollama's form. Steps are counted across all pictures of a request.

    ``on_parameters`` takes the parameters and warnings; ``frames`` yields the frames of an event,
    ``end`` those after the last picture.
    """

    def __init__(self, body: ImageRequest, keep: KeepPicture) -> None:
        self._body, self._keep = body, keep
        self._data: list[dict[str, str]] = []
        self._digest = ""
        self._describe_use: Callable[[], dict[str, list[Any]]] = dict

    def on_parameters(self, parameters: GenerateRequest, _: str, warnings: Sequence[str]) -> None:
        # The model adds its warnings later
        self._describe_use = partial(describe_use, parameters.adapters.loras, warnings)

    def iter_frames(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, Step):
            facts = {"step": event.done, "total": self._body.count * event.total}
            yield answer_stream.encode_event("progress", facts)
        elif isinstance(event, PullingEvent):
            yield answer_stream.encode_event(
                "pull", {"completed": event.done, "total": event.total}
            )
        elif isinstance(event, ImageEvent):
            self._data.append(build_entry(event, self._body, self._keep))
            self._digest = event.digest

    def end(self) -> Iterator[bytes]:
        facts = {"created": int(time.time()), "data": self._data, "digest": self._digest}
        yield answer_stream.encode_event("done", facts | self._describe_use())


class OpenAIStream:
    """OpenAI's form: ``completed`` for each picture after up to three ``partial_image``."""

    def __init__(self, body: ImageRequest, keep: KeepPicture, *, has_progress: bool) -> None:
        self._body, self._keep, self._has_progress = body, keep, has_progress
        self._size = body.dimensions
        self._describe_use: Callable[[], dict[str, list[Any]]] = dict
        # The new prompt, until it was sent
        self._prompt: dict[str, str | None] | None = None

    def on_parameters(
        self, parameters: GenerateRequest, size: str, warnings: Sequence[str]
    ) -> None:
        self._size = size
        if self._body.enhance:
            self._prompt = {"prompt": parameters.prompt, "enhancer": parameters.enhancer}
        # The model adds its warnings later
        self._describe_use = partial(describe_use, parameters.adapters.loras, warnings)

    def iter_frames(self, event: Event) -> Iterator[bytes]:
        if self._prompt is not None:
            yield from self._encode_state("prompt", "prompt written", **self._prompt)
            self._prompt = None
        if isinstance(event, QueuedEvent):
            yield from self._encode_state(
                "queued", f"queued behind {event.ahead}", ahead=event.ahead
            )
        elif isinstance(event, PullingEvent):
            text = f"pulled {event.done} of {event.total} bytes"
            yield from self._encode_state("pulling", text, completed=event.done, total=event.total)
        elif isinstance(event, LoadingEvent):
            yield from self._encode_state("loading", "loading")
        elif isinstance(event, StartedEvent):
            yield from self._encode_state("started", "started")
        elif isinstance(event, Step):
            yield self._encode_progress(event)
        elif isinstance(event, PreviewEvent):
            facts = {"b64_json": encode(event), "partial_image_index": event.number}
            yield self._encode_event("partial_image", {**facts, **self._build_facts(self._size)})
        elif isinstance(event, ImageEvent):
            # OpenAI's events have no field for the digest
            yield answer_stream.encode_comment(f"digest {event.digest}")
            yield self._encode_completed(event)

    def end(self) -> Iterator[bytes]:
        return iter(())

    def _encode_state(self, name: str, text: str, **facts: Any) -> Iterator[bytes]:
        """Yield an event of a type that OpenAI does not have, if the client asked for them."""
        yield (
            self._encode_event(name, facts)
            if self._has_progress
            else answer_stream.encode_comment(text)
        )

    def _encode_progress(self, event: Step) -> bytes:
        total = self._body.count * event.total
        if not self._has_progress:
            return answer_stream.encode_comment(f"step {event.done} of {total}")
        facts = {"step": event.done, "total": total, "created_at": int(time.time())}
        return self._encode_event("progress", facts)

    def _encode_completed(self, picture: ImageEvent) -> bytes:
        facts: dict[str, Any] = {"b64_json": encode(picture)}
        facts |= self._build_facts(f"{picture.width}x{picture.height}") | self._describe_use()
        if self._body.response_format == "url":
            facts["url"] = self._keep(picture)
        return self._encode_event("completed", {**facts, "usage": build_usage()})

    def _build_facts(self, size: str) -> dict[str, Any]:
        return {
            "created_at": int(time.time()),
            "size": size,
            "quality": translate_quality(self._body),
            "background": "opaque",
            "output_format": self._body.encoding.kind,
        }

    def _encode_event(self, name: str, facts: Mapping[str, Any]) -> bytes:
        kind = f"{self._body.EVENTS}.{name}"
        return answer_stream.encode_event(kind, {"type": kind, **facts})


ImageStream = PlainStream | OpenAIStream


def create_stream(dialect: str, body: ImageRequest, keep: KeepPicture) -> ImageStream:
    """Return the stream of the given form."""
    if dialect == OLLAMA:
        return PlainStream(body, keep)
    return OpenAIStream(body, keep, has_progress=dialect == WITH_PROGRESS)
