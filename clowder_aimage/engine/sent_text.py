"""The part of a text that its client has, while the text is generated a second time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.language_model import TextEvent, TextPiece, ToolCall


@dataclass(slots=True)
class _Passage:
    """Pieces of one kind that follow each other."""

    kind: str
    texts: list[str] = field(default_factory=list)
    tokens: int = 0

    def add(self, piece: TextPiece) -> None:
        self.texts.append(piece.text)
        self.tokens += len(piece.tokens)


class SentText:
    """The events that were passed on. After ``repeat``, as much is left out of the next events."""

    def __init__(self) -> None:
        self._sent: list[_Passage | ToolCall] = []
        self._due: deque[_Passage | ToolCall] = deque()  # what the repetition has not reached

    def repeat(self) -> None:
        """Begin to compare: the text is generated again from its beginning."""
        self._due = deque(
            replace(one, texts=["".join(one.texts)]) if isinstance(one, _Passage) else one
            for one in self._sent
        )

    def new(self, event: TextEvent) -> TextEvent | None:
        """Return the part of an event that was not passed on before, which it is then; else None.

        Pieces need not be divided as they were. Raises ModelError if the text is another one.
        """
        if isinstance(event, TextPiece) and not event.text:
            return None  # a turn of other requests
        found = self._without_due(event) if self._due else event
        if isinstance(found, TextPiece):
            self._record(found)
        elif isinstance(found, ToolCall):
            self._sent.append(found)
        return found

    def _record(self, piece: TextPiece) -> None:
        last = self._sent[-1] if self._sent else None
        if not isinstance(last, _Passage) or last.kind != piece.kind:
            last = _Passage(piece.kind)
            self._sent.append(last)
        last.add(piece)

    def _without_due(self, event: TextEvent) -> TextEvent | None:
        due = self._due[0]
        if isinstance(event, ToolCall) and event == due:
            self._due.popleft()
            return None
        if not (isinstance(event, TextPiece) and isinstance(due, _Passage)):
            raise _differs()
        (wanted,) = due.texts
        length = min(len(wanted), len(event.text))
        if event.kind != due.kind or event.text[:length] != wanted[:length]:
            raise _differs()
        count = min(due.tokens, len(event.tokens))
        due.texts, due.tokens = [wanted[length:]], due.tokens - count
        if length == len(wanted):
            self._due.popleft()
        rest = replace(event, text=event.text[length:], tokens=event.tokens[count:])
        if rest.text and self._due:  # something else followed
            raise _differs()
        return rest if rest.text else None


def _differs() -> ModelError:
    return ModelError(
        "the model process ended; the text was generated again, but it differs from the part "
        "that was sent",
        hint="try again",
    )
