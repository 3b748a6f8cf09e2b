"""The memory of this machine and of the control group of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clowder_aimage.cli.console.output import format_size
from clowder_aimage.cli.doctor.finding import Finding, Level, MachineCheck
from clowder_aimage.engine.machine import (
    read_available_memory,
    read_group_limit,
    read_physical_memory,
)

# Bytes; a small language model needs as much.
_LITTLE = 2 * 10**9


@dataclass(frozen=True, slots=True)
class MemoryCheck(MachineCheck):
    """The functions return bytes; 0 or None if a size is unknown, or there is no limit."""

    name = "memory"
    read_total: Callable[[], int] = read_physical_memory
    read_available: Callable[[], int | None] = read_available_memory
    read_limit: Callable[[], int | None] = read_group_limit

    def run(self) -> Iterator[Finding]:
        total, available, limit = self.read_total(), self.read_available(), self.read_limit()
        facts = {"total": total or None, "available": available, "limit": limit}
        parts = [f"{format_size(total)} in all"] if total else []
        if available is not None:
            parts.append(f"{format_size(available)} available")
        is_limited = limit is not None and (not total or limit < total)
        if limit is not None and is_limited:
            parts.append(f"the control group allows {format_size(limit)}")
        message = ", ".join(parts) or "unknown"
        if available is None or available >= _LITTLE:
            yield Finding(Level.OK, message, facts=facts)
            return
        advice = "end other programs; 'aimage ps' lists the models that a worker has loaded"
        if limit is not None and is_limited and limit < _LITTLE:
            advice = "raise the limit of memory of the container or unit"
        yield Finding(Level.WARNING, f"{message}: too little for most models", advice, facts)
