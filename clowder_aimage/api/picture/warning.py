"""Warnings of a model about a request for pictures, which it finds when it has begun."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from clowder_aimage.engine.event import Event, StartedEvent


async def collect_warnings(
    events: AsyncGenerator[Event, None], warnings: list[str]
) -> AsyncGenerator[Event, None]:
    """Yield the events; warnings are added before the event with them."""
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, StartedEvent):
                warnings += [text for text in event.warnings if text not in warnings]
            yield event
