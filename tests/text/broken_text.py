"""Texts whose process dies: another one goes on with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from clowder_aimage.engine.sent_text import SentText
from clowder_aimage.model.text.language_model import (
    DrawnTokens,
    LanguageModel,
    TextDelta,
    TextEnd,
    TextEvent,
    TextNotice,
    TextRequest,
    join_deltas,
)


def write_whole(model: LanguageModel, request: TextRequest) -> list[TextEvent]:
    """Return the events of a text, its pieces joined."""
    return _joined(model.generate(request))


def write_broken(
    model: LanguageModel, request: TextRequest, *counts: int
) -> tuple[list[TextEvent], list[DrawnTokens]]:
    """Return the same of a text whose processes die when they have drawn so many of its tokens.

    Also return what each of its processes began with.
    """
    sent, passed, begun = SentText(), list[TextEvent](), list[DrawnTokens]()
    for count in counts:
        for event in model.generate(replace(request, max_tokens=count)):
            if not isinstance(event, TextEnd | TextNotice):
                passed += sent.add(event, 0.0)
        request = sent.continue_request(request)
        begun.append(request.begun)
    for event in model.generate(request):
        if not isinstance(event, TextNotice):
            passed += sent.add(event, 0.0)
    return _joined(passed), begun


def _joined(events: Iterable[TextEvent]) -> list[TextEvent]:
    return [*join_deltas(one for one in events if one != TextDelta(""))]
