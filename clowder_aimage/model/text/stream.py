"""The bytes of tokens as deltas of text, thoughts and calls.

Text that may be the beginning of a mark or of a stop string is held back until the next tokens.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from clowder_aimage.model.text.language_model import (
    STOP,
    TOOL_CALLS,
    DrawnTokens,
    TextDelta,
    TextEvent,
    Token,
    ToolCall,
)
from clowder_aimage.model.text.thought_format import PLAIN, ThoughtFormat
from clowder_aimage.model.text.tool_call_format import CallFormat, Tools

_CONTENT, _THINKING, _CALL, _HEADER = "content", "thinking", "call", "header"
# Characters of a header: a longer one is text
_MAX_HEADER = 256
# Bytes of a text that are read at once when it goes on
_SLICE = 256
# The function that a message is sent to; messages to others are no calls
_RECIPIENT = re.compile(r"\bto=([\w.:-]{1,256})")
_NO_FUNCTIONS = frozenset(("", "self", "user", "assistant"))
_PARTIAL = DrawnTokens(is_partial=True)


class TextStream:
    """The text of one request.

    Args:
        stop: Strings that end the text and are not part of it.
        calls: The format of calls; None for a text without calls.
        tools: The functions that may be called.
        format_: The marks of thoughts and answers.
        opened: The mark of thoughts, or of an answer, that the prompt ends with.
        in_header: The prompt ends in the header of a message.
        is_begun: The text continues an answer.
        is_stripped: Spaces at the beginning are not part of the text.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        *,
        calls: CallFormat | None = None,
        tools: Tools = (),
        format_: ThoughtFormat = PLAIN,
        opened: str = "",
        in_header: bool = False,
        is_begun: bool = False,
        is_stripped: bool = False,
    ) -> None:
        self._stop, self._calls, self._tools = tuple(stop), calls, tools
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._format = format_
        end = format_.thoughts.get(opened)
        self._thought_ends: tuple[str, ...] = () if end is None else (end,)
        self._answer_end = format_.answers.get(opened, "")
        # Marks that end thoughts which began without a mark
        self._unopened = frozenset[str]() if opened or is_begun else format_.unopened
        call_marks = (*calls.starts, calls.end) if calls else ()
        self.marks = frozenset((*format_.marks, *format_.shown, *call_marks)) - {""}
        """Texts of the special tokens that are passed on; all others are hidden."""
        self._state = _THINKING if self._thought_ends else _CONTENT
        self._function = ""  # the recipient of a call
        if in_header and not opened:
            self._state = _HEADER
        self._is_stripped = is_stripped
        self._is_begun = is_begun  # the answer has begun
        self._buffer, self._mark = "", ""
        self._offset = 0  # characters before the buffer
        # Tokens with the offsets of their ends: several tokens can be a character of the text
        self._tokens: deque[tuple[int, Token]] = deque()
        self._drawn = DrawnTokens()  # since the last event
        self.count = 0  # tokens that were drawn
        self.has_called = False
        self.is_stopped = False

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
            # A long text is read as it came: the time of a search is that of its buffer
            for start in range(0, len(data), _SLICE):
                self.feed(data[start : start + _SLICE])
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
            if match is not None:
                offset, _, mark = match
                yield from self._reach(offset, mark)
            elif self._state == _HEADER and (is_end or len(self._buffer) > _MAX_HEADER):
                yield from self._release_header(len(self._buffer))
            else:
                break
        else:
            return
        if is_end:
            yield from self._close()
        elif self._state not in (_CALL, _HEADER) and not self._is_held:
            yield from self._release(len(self._buffer) - self._compute_held_length(marks))

    @property
    def _is_held(self) -> bool:
        """Return True while the text may turn out to be thoughts that began without a mark."""
        return bool(self._unopened) and self._state == _CONTENT and not self._is_begun

    @property
    def _state_ends(self) -> tuple[str, ...]:
        """Return the strings that end the present state."""
        form = self._format
        if self._state == _HEADER:
            return (form.headers.end,) if form.headers else ()
        if self._state == _CALL:
            if self._function:
                return form.headers.closes if form.headers else ()
            end = self._calls.end if self._calls else ""
            return (end,) if end and self._mark else ()
        if self._state == _THINKING:
            return (*self._stop, *self._thought_ends)
        marks = [*self._stop, *(self._calls.starts if self._calls else ())]
        if not self._is_begun:
            marks += [*form.thoughts, *form.answers, *self._unopened]
        if form.headers is not None:
            marks += [*form.headers.starts, *form.headers.closes]
        return (*marks, self._answer_end) if self._answer_end else tuple(marks)

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
            self._function = ""
            return
        if self._state == _HEADER:
            yield from self._read_header(offset, mark)
            return
        # Without a mark before them, it is clear only now that these were thoughts
        if self._is_held and mark in self._unopened:
            self._state = _THINKING
        yield from self._release(offset, is_before_mark=mark not in self._stop)
        if mark in self._stop:
            self.is_stopped = True
            return
        # A mark inside the answer is text: an answer can be about these marks
        if self._is_begun and mark in {*self._format.thoughts, *self._format.answers}:
            yield from self._release(len(mark))
            return
        self._enter(mark)

    def _enter(self, mark: str) -> None:
        """Skip a mark at the beginning of the buffer, and enter the state after it."""
        form = self._format
        was_thinking = self._state == _THINKING
        self._skip(len(mark))
        self._is_stripped, self._state = True, _CONTENT
        if form.headers is not None and mark in form.headers.starts:
            self._state, self._mark = _HEADER, mark
        elif was_thinking:
            self._unopened = frozenset()
        elif mark in form.thoughts:
            self._state, self._thought_ends = _THINKING, (form.thoughts[mark],)
        elif mark in form.answers:
            self._answer_end = form.answers[mark]
        elif mark == self._answer_end:
            self._answer_end = ""
        elif self._calls is not None and mark in self._calls.starts:
            self._state, self._mark = _CALL, mark

    def _read_header(self, offset: int, end: str) -> Iterator[TextEvent]:
        """Enter the state of the message after a header, which the buffer begins with."""
        length, header = offset + len(end), self._buffer[:offset]
        match = _RECIPIENT.search(header)
        recipient = match[1] if match else ""
        is_thought = recipient == "self" or "analysis" in header
        if recipient not in _NO_FUNCTIONS and not is_thought:
            if self._calls is None:
                yield from self._release_header(length)
                return
            self._state, self._function = _CALL, recipient.removeprefix("functions.")
            self._mark += self._buffer[:length]
        elif is_thought and self._format.headers is not None:
            headers = self._format.headers
            self._state, self._thought_ends = _THINKING, (*headers.starts, *headers.closes)
        else:
            self._state = _CONTENT
        self._skip(length)
        self._is_stripped = True

    def _release_header(self, length: int) -> Iterator[TextEvent]:
        """Yield a header, with its marks, as text of the answer: its meaning is unknown."""
        text = self._mark + self._buffer[:length]
        tokens = self._take_tokens(length)
        self._skip(length)
        self._state, self._mark, self._is_begun = _CONTENT, "", True
        if text:
            yield TextDelta(text, _CONTENT, tokens)

    def _close(self) -> Iterator[TextEvent]:
        """End the text in its present state."""
        if self._state == _CALL:
            yield from self._call(self._buffer, "")
            self._skip(len(self._buffer))
        else:
            yield from self._release(len(self._buffer))

    def _call(self, text: str, end: str) -> Iterator[TextEvent]:
        """Yield the calls in a text, or the text with its marks if it has none."""
        calls: list[ToolCall] = []
        if self._calls is not None:
            calls = self._calls.parse(text, self._tools, self._function)
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
    return replace(event, drawn=drawn) if isinstance(event, TextDelta | ToolCall) else event
