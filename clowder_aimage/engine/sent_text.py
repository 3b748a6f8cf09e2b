"""The part of a text that its client has received; another process can continue the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clowder_aimage.model.text.language_model import (
    DrawnTokens,
    TextDelta,
    TextEnd,
    TextEvent,
    TextRequest,
    Token,
    ToolCall,
)


class SentText:
    """The tokens of the events that were passed on.

    Events of the same tokens are passed on together, so that no token is lost or repeated.
    """

    def __init__(self) -> None:
        # Events that wait for other events of their tokens
        self._partial: list[TextDelta | ToolCall] = []
        self._numbers: list[int | str] = []
        self._texts: list[str] = []
        self._held: tuple[Token, ...] = ()
        # Tokens in all, and those of earlier processes
        self._count = self._earlier_count = 0
        # Times of the first and the last event of this process
        self._times: list[float] = []
        # Between the first and the last event of each earlier process
        self._seconds = 0.0
        self.is_ended = False

    def add(self, event: TextDelta | ToolCall | TextEnd, timestamp: float) -> Sequence[TextEvent]:
        """Return the events to pass on after this one. ``timestamp`` is in seconds."""
        if isinstance(event, TextEnd):
            self.is_ended = True
            return (*self._take(timestamp), self._add_earlier_counts(event))
        self._partial.append(event)
        return () if event.drawn.is_partial else self._take(timestamp)

    def _take(self, timestamp: float) -> Sequence[TextEvent]:
        """Return the events that waited, and record their tokens."""
        complete, self._partial = self._partial, []
        self._times = [*self._times[:1], timestamp]
        for event in complete:
            self._numbers += event.drawn.numbers
            self._texts.append(event.drawn.text)
            self._count += event.drawn.count
            self._held = event.drawn.held
        return complete

    def _add_earlier_counts(self, end: TextEnd) -> TextEnd:
        """Return the end with the counts of the whole text; the prompt excludes earlier tokens."""
        prompt = end.prompt_tokens - self._earlier_count
        return replace(
            end,
            prompt_tokens=prompt,
            tokens=end.tokens + self._earlier_count,
            cached_tokens=min(end.cached_tokens, prompt),
            seconds=end.seconds + self._seconds,
        )

    def continue_request(self, request: TextRequest) -> TextRequest:
        """Return the request for the rest of the text, after its process has died."""
        if self._times:
            self._seconds += self._times[-1] - self._times[0]
        self._partial, self._times, self._earlier_count = [], [], self._count
        text = "".join(self._texts)
        drawn = DrawnTokens(tuple(self._numbers), self._count, text, self._held)
        return replace(request, begun=drawn)
