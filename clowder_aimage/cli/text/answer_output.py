"""The answer of a language model: printed as it arrives, with its statistics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage.cli.console.output import (
    format_count,
    is_quiet,
    remark,
    wants_value,
    write_piece,
)
from clowder_aimage.model.text.language_model import LENGTH, TextDelta, TextEnd, TextEvent


@dataclass(slots=True)
class AnswerOutput:
    """An answer that is being printed: the text on stdout, the thoughts of the model on stderr.

    With ``--json`` or a template nothing is printed before the end.
    """

    text: str = ""
    thinking: str = ""
    end: TextEnd | None = None
    # Seconds until the first piece.
    latency: float | None = None
    _begun: float = field(default_factory=time.monotonic)
    # The kind of the line that has no end yet.
    _is_open: str = ""

    def show(self, events: Iterable[TextEvent]) -> None:
        """Print the deltas; after an interrupt or an error, ``text`` has those that have come."""
        try:
            for event in events:
                if isinstance(event, TextDelta):
                    self._add(event)
                elif isinstance(event, TextEnd):
                    self.end = event
        finally:
            self._close()

    def to_json(self) -> dict[str, Any]:
        """Return the answer and its statistics for ``--json``."""
        value: dict[str, Any] = {"text": self.text}
        if self.thinking:
            value["thinking"] = self.thinking
        if self.end is None:
            return value
        end = self.end
        counts = {"promptTokens": end.prompt_tokens, "cachedTokens": end.cached_tokens}
        seconds = {
            "promptSeconds": round(end.prompt_seconds, 4),
            "seconds": round(end.seconds, 4),
        }
        latency = {} if self.latency is None else {"firstPieceSeconds": round(self.latency, 4)}
        return {**value, "reason": end.reason, **counts, "tokens": end.tokens, **seconds, **latency}

    def format_statistics(self) -> list[str]:
        """Return the counts of tokens and their rates as lines."""
        if self.end is None:
            return []
        end = self.end
        cached = f" ({end.cached_tokens} from the cache)" if end.cached_tokens else ""
        new = end.prompt_tokens - end.cached_tokens
        lines = [
            f"prompt: {format_count(end.prompt_tokens, 'token')}{cached}"
            f"{_format_rate(new, end.prompt_seconds)}",
            f"answer: {format_count(end.tokens, 'token')}{_format_rate(end.tokens, end.seconds)}",
        ]
        lines += [] if self.latency is None else [f"first piece after {self.latency:.2f} s"]
        return lines

    def warn_of_cut(self) -> None:
        """Print that the answer is not complete."""
        if self.end is not None and self.end.reason == LENGTH:
            remark(f"the answer is cut off after {format_count(self.end.tokens, 'token')}")

    def _add(self, piece: TextDelta) -> None:
        if self.latency is None and piece.text:
            self.latency = time.monotonic() - self._begun
        if piece.kind == "content":
            self.text += piece.text
        else:
            self.thinking += piece.text
        if wants_value() or not piece.text:
            return
        is_thought = piece.kind != "content"
        if is_thought and is_quiet():
            return
        if self._is_open not in ("", piece.kind):
            self._close()
        if is_thought:
            write_piece(piece.text, is_aside=True)
        else:
            write_piece(piece.text)
        self._is_open = "" if piece.text.endswith("\n") else piece.kind

    def _close(self) -> None:
        """End the line that is open."""
        if self._is_open:
            write_piece("\n", is_aside=self._is_open != "content")
        self._is_open = ""


def _format_rate(count: int, seconds: float) -> str:
    return f" in {seconds:.2f} s ({count / seconds:.1f} tokens/s)" if seconds > 0 else ""
