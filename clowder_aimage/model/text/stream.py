"""The bytes of tokens as pieces of text, thoughts and calls.

Text that may be the beginning of a mark or of a stop string is held back until more is known.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from clowder_aimage.model.text.language_model import (
    STOP,
    TOOL_CALLS,
    DrawnTokens,
    TextEnd,
    TextEvent,
    TextPiece,
    Token,
)
from clowder_aimage.model.text.tool_call_format import CallFormat, Tools

THINK, THOUGHT = "<think>", "</think>"  # around thoughts
_CONTENT, _THINKING, _CALL = "content", "thinking", "call"
_PARTIAL = DrawnTokens(is_partial=True)


class TextStream:
    """The text of one request.

    Args:
        stop: Strings that end the text and are not part of it.
        calls: The format of calls; None for a text without calls.
        tools: The functions that may be called.
        is_thinking: The prompt ends inside thoughts.
        has_thinking: Thoughts between marks are separated.
        is_stripped: Spaces at the beginning are not part of the text.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        calls: CallFormat | None = None,
        tools: Tools = (),
        is_thinking: bool = False,
        has_thinking: bool = False,
        is_stripped: bool = False,
    ) -> None:
        self._stop, self._calls, self._tools = tuple(stop), calls, tools
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = _THINKING if is_thinking else _CONTENT
        self._has_thinking, self._is_stripped = has_thinking, is_stripped or is_thinking
        self._is_begun = False  # the answer has begun
        self._buffer, self._mark = "", ""
        self._place = 0  # characters before the buffer
        self._tokens: deque[tuple[int, Token]] = deque()  # with the places of their ends
        self._drawn = DrawnTokens()  # since the last event
        self.count = 0  # tokens that were drawn
        self.has_called = False
        self.is_stopped = False

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens with these texts are parts of the text; all others are hidden."""
        own = (THINK, THOUGHT) if self._has_thinking else ()
        calls = self._calls
        return frozenset((*own, *((*calls.starts, calls.end) if calls else ())))

    @property
    def reason(self) -> str:
        """The reason for an end that is not due to a limit."""
        return TOOL_CALLS if self.has_called and not self.is_stopped else STOP

    def feed(self, data: bytes, token: Token | None = None) -> list[TextEvent]:
        """Return what is known after the bytes of a token. Nothing follows a stop string."""
        if self.is_stopped:
            return []
        self._buffer += self._decoder.decode(data)
        if token is not None:
            is_partial = self._decoder.getstate()[0] != b""  # its text is the next character
            self._tokens.append((self._place + len(self._buffer) + is_partial, token))
        return [*self._scan(is_end=False)]

    def finish(self) -> list[TextEvent]:
        """Return the rest at the end of the text. It is not known of which tokens it is."""
        if self.is_stopped:
            return []
        self._buffer += self._decoder.decode(b"", True)
        return [_with_drawn(event, _PARTIAL) for event in self._scan(is_end=True)]

    def state_drawn(self, events: Sequence[TextEvent], drawn: DrawnTokens) -> Iterator[TextEvent]:
        """Yield events of ``feed``; the last one states all tokens that were drawn until now.

        ``drawn`` are those since the last call. Nothing goes on after a stop string.
        """
        self.count += drawn.count
        held = tuple(token for _, token in self._tokens)
        self._drawn += replace(drawn, held=held)
        for event in events[:-1]:
            yield _with_drawn(event, _PARTIAL)
        if events:
            yield _with_drawn(events[-1], _PARTIAL if self.is_stopped else self._drawn)
            self._drawn = DrawnTokens()

    def go_on(self, begun: DrawnTokens, parts: Iterable[bytes]) -> None:
        """Go on after tokens that were drawn before; ``parts`` are their bytes."""
        for data in parts:
            self.feed(data)
        self._tokens.extend((self._place + len(self._buffer), token) for token in begun.held)

    def _scan(self, *, is_end: bool) -> Iterator[TextEvent]:
        while not self.is_stopped:
            if self._is_whole_call():
                self._state, self._mark = _CALL, ""
            wanted = self._wanted()
            found = min(
                (
                    (place, -len(one), one)
                    for one in wanted
                    if (place := self._buffer.find(one)) >= 0
                ),
                default=None,
            )
            if found is None:
                break
            place, _, mark = found
            yield from self._reach(place, mark)
        else:
            return
        if is_end:
            yield from self._close()
        elif self._state != _CALL:
            yield from self._release(len(self._buffer) - self._held(wanted))

    def _wanted(self) -> tuple[str, ...]:
        """Return the strings that end the present state."""
        if self._state == _CALL:
            end = self._calls.end if self._calls else ""
            return (end,) if end and self._mark else ()
        if self._state == _THINKING:
            return (*self._stop, THOUGHT)
        begins = (THINK,) if self._has_thinking and not self._is_begun else ()
        return (*self._stop, *begins, *(self._calls.starts if self._calls else ()))

    def _is_whole_call(self) -> bool:
        """Return True if the answer begins as a call without a mark does."""
        if self._state != _CONTENT or self._calls is None or not self._calls.is_whole:
            return False
        return not self._is_begun and self._buffer.lstrip().startswith("{")

    def _reach(self, place: int, mark: str) -> Iterator[TextEvent]:
        """Go on after a mark or a stop string at a place of the buffer."""
        if self._state == _CALL:
            yield from self._call(self._buffer[:place], mark)
            self._skip(place + len(mark))
            self._state, self._is_stripped = _CONTENT, True
            return
        yield from self._release(place, is_before_mark=mark not in self._stop)
        if mark in self._stop:
            self.is_stopped = True
            return
        if mark == THINK and self._is_begun:  # a mark inside the answer is text
            yield from self._release(len(mark))
            return
        self._skip(len(mark))
        self._is_stripped = True
        if mark in (THINK, THOUGHT):
            self._state = _THINKING if mark == THINK else _CONTENT
        else:
            self._state, self._mark = _CALL, mark

    def _close(self) -> Iterator[TextEvent]:
        """End the text in its present state."""
        if self._state == _CALL:
            yield from self._call(self._buffer, "")
            self._skip(len(self._buffer))
        else:
            yield from self._release(len(self._buffer))

    def _call(self, text: str, end: str) -> Iterator[TextEvent]:
        """Yield the calls in a text, or the text with its marks if it has none."""
        calls = self._calls.parse(text, self._tools) if self._calls else []
        if calls:
            self.has_called = self._is_begun = True
            yield from calls
        else:
            self._is_begun = True
            yield TextPiece(self._mark + text + end, _CONTENT, self._until(len(text) + len(end)))

    def _held(self, wanted: Sequence[str]) -> int:
        """Return the length of the end that may begin a mark, or that may be left out."""
        longest = max(map(len, wanted), default=0)
        tail = self._buffer[-longest + 1 :] if longest > 1 else ""
        places = (
            place
            for place in range(len(tail))
            if any(one.startswith(tail[place:]) for one in wanted)
        )
        held = len(tail) - next(places, len(tail))
        rest = self._buffer[: len(self._buffer) - held]
        if self._state == _THINKING or (self.marks and not self._is_begun and not rest.strip()):
            held += len(rest) - len(rest.rstrip())  # spaces beside marks are not part of the text
        return held

    def _release(self, length: int, is_before_mark: bool = False) -> Iterator[TextEvent]:
        """Yield the first characters of the buffer."""
        if not length:
            return
        text = self._buffer[:length]
        if self._is_stripped:
            text = text.lstrip()
            self._until(length - len(text))
        if is_before_mark and self._state == _THINKING:
            text = text.rstrip()
        if is_before_mark and not text.strip() and not self._is_begun:
            text = ""
        tokens = self._until(length) if text else ()
        self._skip(length)
        if not text:
            return
        self._is_stripped = False
        if self._state == _CONTENT and text.strip():
            self._is_begun = True
        yield TextPiece(text, self._state, tokens)

    def _until(self, length: int) -> tuple[Token, ...]:
        """Take the tokens that end within the first characters of the buffer."""
        end, taken = self._place + length, []
        while self._tokens and self._tokens[0][0] <= end:
            taken.append(self._tokens.popleft()[1])
        return tuple(taken)

    def _skip(self, length: int) -> None:
        self._until(length)
        self._buffer = self._buffer[length:]
        self._place += length


def _with_drawn(event: TextEvent, drawn: DrawnTokens) -> TextEvent:
    return event if isinstance(event, TextEnd) else replace(event, drawn=drawn)


def is_in_thoughts(prompt: str) -> bool:
    """Return True if a rendered prompt ends inside thoughts, as some templates begin them."""
    return prompt.rstrip().endswith(THINK)
