"""The part of a text that its client has, after which another process goes on with the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clowder_aimage.model.text.language_model import (
    DrawnTokens,
    TextEnd,
    TextEvent,
    TextPiece,
    TextRequest,
    Token,
    ToolCall,
)


class SentText:
    """The tokens of the events that were passed on.

    An event is passed on together with all others of its tokens, so that none is lost or repeated.
    """

    def __init__(self) -> None:
        self._waiting: list[TextPiece | ToolCall] = []  # for other events of their tokens
        self._numbers: list[int | str] = []
        self._texts: list[str] = []
        self._held: tuple[Token, ...] = ()
        self._count = self._begun = 0  # tokens; those of earlier processes
        self._times: list[float] = []  # of the first and the last event of this process
        self._seconds = 0.0  # between the first and the last event of each earlier process
        self.is_ended = False

    def add(self, event: TextEvent, now: float) -> Sequence[TextEvent]:
        """Return the events that are passed on after this one. ``now`` is in seconds."""
        if isinstance(event, TextEnd):
            self.is_ended = True
            return (*self._take(now), self._whole(event))
        self._waiting.append(event)
        return () if event.drawn.is_partial else self._take(now)

    def _take(self, now: float) -> Sequence[TextEvent]:
        """Return the events that waited, and record their tokens."""
        passed, self._waiting = self._waiting, []
        self._times = [*self._times[:1], now]
        for event in passed:
            self._numbers += event.drawn.numbers
            self._texts.append(event.drawn.text)
            self._count += event.drawn.count
            self._held = event.drawn.held
        return passed

    def _whole(self, end: TextEnd) -> TextEnd:
        """Return the end with the counts of the whole text; the prompt was the request's alone."""
        prompt = end.prompt_tokens - self._begun
        return replace(
            end,
            prompt_tokens=prompt,
            tokens=end.tokens + self._begun,
            cached_tokens=min(end.cached_tokens, prompt),
            seconds=end.seconds + self._seconds,
        )

    def rest(self, request: TextRequest) -> TextRequest:
        """Return the request for the rest of the text, after its process has died."""
        if self._times:
            self._seconds += self._times[-1] - self._times[0]
        self._waiting, self._times, self._begun = [], [], self._count
        text = "".join(self._texts)
        begun = DrawnTokens(tuple(self._numbers), self._count, text, self._held)
        return replace(request, begun=begun)
