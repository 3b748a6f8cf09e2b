"""The bytes of tokens as deltas of text, thoughts and calls.

Text that may be the beginning of a mark or of a stop string is held back until the next tokens.
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
    TextDelta,
    TextEnd,
    TextEvent,
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
        self._offset = 0  # characters before the buffer
        # Tokens with the offsets of their ends: several tokens can be a character of the text
        self._tokens: deque[tuple[int, Token]] = deque()
        self._drawn = DrawnTokens()  # since the last event
        self.count = 0  # tokens that were drawn
        self.has_called = False
        self.is_stopped = False

    @property
    def marks(self) -> frozenset[str]:
        """Texts of the special tokens that belong to the text; all others are hidden."""
        thinking = (THINK, THOUGHT) if self._has_thinking else ()
        calls = self._calls
        return frozenset((*thinking, *((*calls.starts, calls.end) if calls else ())))

    @property
    def reason(self) -> str:
        """The reason for an end that is not due to a limit."""
        return TOOL_CALLS if self.has_called and not self.is_stopped else STOP

    def feed(self, data: bytes, token: Token | None = None) -> list[TextEvent]:
        """Return the events after the bytes of a token, none after a stop string."""
        if self.is_stopped:
            return []
        self._buffer += self._decoder.decode(data)
        if token is not None:
            # A token that ends within a character belongs to the text of this character
            is_partial = self._decoder.getstate()[0] != b""
            self._tokens.append((self._offset + len(self._buffer) + is_partial, token))
        return [*self._scan(is_end=False)]

    def finish(self) -> list[TextEvent]:
        """Return the remaining events at the end of the text, without their tokens."""
        if self.is_stopped:
            return []
        self._buffer += self._decoder.decode(b"", True)
        return [_with_drawn(event, _PARTIAL) for event in self._scan(is_end=True)]

    def attach_drawn(self, events: Sequence[TextEvent], drawn: DrawnTokens) -> Iterator[TextEvent]:
        """Yield events of ``feed``; the last one states all tokens that were drawn so far.

        ``drawn`` are the tokens since the last call. A text cannot continue after a stop string.
        """
        self.count += drawn.count
        held = tuple(token for _, token in self._tokens)
        self._drawn += replace(drawn, held=held)
        # Only the last event has the tokens: a text that continues elsewhere begins after all
        # events of a token, or before all of them
        for event in events[:-1]:
            yield _with_drawn(event, _PARTIAL)
        if events:
            yield _with_drawn(events[-1], _PARTIAL if self.is_stopped else self._drawn)
            self._drawn = DrawnTokens()

    def resume(self, drawn: DrawnTokens, token_bytes: Iterable[bytes]) -> None:
        """Continue after tokens that were drawn before."""
        for data in token_bytes:
            self.feed(data)
        self._tokens.extend((self._offset + len(self._buffer), token) for token in drawn.held)

    def _scan(self, *, is_end: bool) -> Iterator[TextEvent]:
        while not self.is_stopped:
            if self._is_bare_call():
                self._state, self._mark = _CALL, ""
            marks = self._state_ends
            # Of marks at the same offset the longest: one can begin with another
            match = min(
                (
                    (offset, -len(mark), mark)
                    for mark in marks
                    if (offset := self._buffer.find(mark)) >= 0
                ),
                default=None,
            )
            if match is None:
                break
            offset, _, mark = match
            yield from self._reach(offset, mark)
        else:
            return
        if is_end:
            yield from self._close()
        elif self._state != _CALL:
            yield from self._release(len(self._buffer) - self._compute_held_length(marks))

    @property
    def _state_ends(self) -> tuple[str, ...]:
        """Return the strings that end the present state."""
        if self._state == _CALL:
            end = self._calls.end if self._calls else ""
            return (end,) if end and self._mark else ()
        if self._state == _THINKING:
            return (*self._stop, THOUGHT)
        begins = (THINK,) if self._has_thinking and not self._is_begun else ()
        return (*self._stop, *begins, *(self._calls.starts if self._calls else ()))

    def _is_bare_call(self) -> bool:
        """Return True if the answer begins with JSON and may be a call without a mark."""
        if self._state != _CONTENT or self._calls is None or not self._calls.is_whole:
            return False
        return not self._is_begun and self._buffer.lstrip().startswith("{")

    def _reach(self, offset: int, mark: str) -> Iterator[TextEvent]:
        """Yield the text before a mark or a stop string, and enter the next state."""
        if self._state == _CALL:
            yield from self._call(self._buffer[:offset], mark)
            self._skip(offset + len(mark))
            self._state, self._is_stripped = _CONTENT, True
            return
        yield from self._release(offset, is_before_mark=mark not in self._stop)
        if mark in self._stop:
            self.is_stopped = True
            return
        # A mark inside the answer is text: an answer can be about these marks
        if mark == THINK and self._is_begun:
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
            yield TextDelta(
                self._mark + text + end, _CONTENT, self._take_tokens(len(text) + len(end))
            )

    def _compute_held_length(self, marks: Sequence[str]) -> int:
        """Return the length of the buffer's end that may begin a mark, or be stripped."""
        longest = max(map(len, marks), default=0)
        tail = self._buffer[-longest + 1 :] if longest > 1 else ""
        offsets = (
            offset
            for offset in range(len(tail))
            if any(mark.startswith(tail[offset:]) for mark in marks)
        )
        held = len(tail) - next(offsets, len(tail))
        head = self._buffer[: len(self._buffer) - held]
        # Spaces beside marks are not part of the text
        if self._state == _THINKING or (self.marks and not self._is_begun and not head.strip()):
            held += len(head) - len(head.rstrip())
        return held

    def _release(self, length: int, is_before_mark: bool = False) -> Iterator[TextEvent]:
        """Yield the first characters of the buffer."""
        if not length:
            return
        text = self._buffer[:length]
        if self._is_stripped:
            text = text.lstrip()
            self._take_tokens(length - len(text))
        if is_before_mark and self._state == _THINKING:
            text = text.rstrip()
        if is_before_mark and not text.strip() and not self._is_begun:
            text = ""
        tokens = self._take_tokens(length) if text else ()
        self._skip(length)
        if not text:
            return
        self._is_stripped = False
        if self._state == _CONTENT and text.strip():
            self._is_begun = True
        yield TextDelta(text, self._state, tokens)

    def _take_tokens(self, length: int) -> tuple[Token, ...]:
        """Take the tokens that end within the first characters of the buffer."""
        end, tokens = self._offset + length, []
        while self._tokens and self._tokens[0][0] <= end:
            tokens.append(self._tokens.popleft()[1])
        return tuple(tokens)

    def _skip(self, length: int) -> None:
        self._take_tokens(length)
        self._buffer = self._buffer[length:]
        self._offset += length


def _with_drawn(event: TextEvent, drawn: DrawnTokens) -> TextEvent:
    return event if isinstance(event, TextEnd) else replace(event, drawn=drawn)


def is_in_thoughts(prompt: str) -> bool:
    """Return True if a rendered prompt ends inside thoughts, as some templates begin them."""
    return prompt.rstrip().endswith(THINK)
