"""``aimage ps``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import verb, verbose_option
from clowder_aimage.cli.console.output import (
    build_table,
    format_duration,
    format_size,
    note_left_out,
)
from clowder_aimage.cli.console.watch import Reading, show, watch_option
from clowder_aimage.cli.console.worker_connection import (
    connect_worker,
    get_detail,
    list_models,
    refuse_options,
)
from clowder_aimage.errors import describe_each

# Seconds; ollama sends a later time for ever.
_FOR_EVER = 100 * 365 * 24 * 3600


@examples("aimage ps")
@verb
@verbose_option
@watch_option
def ps(watch: float | None) -> None:
    """List the models that a worker has in memory.

    AImages that differ in their adapters only are one model; VARIANTS are their other names.

    The worker is the one in AIMAGE_HOST, or the one at 127.0.0.1:11434.
    """
    refuse_options("omit it: the memory of the worker is listed", exclude=("watch",))
    show(_read, watch)


def _read() -> Reading:
    time = datetime.now(UTC)

    def format_cells(row: dict[str, Any]) -> tuple[str, ...]:
        left = _format_expiry(row["until"], time)
        adapters = ", ".join(row["adapters"]) or "-"
        variants = [", ".join(row["variants"]) or "-"] if has_variants else []
        facts = (
            row["reference"],
            row["digest"][7:19],
            format_size(row["size"]),
            row["device"] or "?",
        )
        return *facts, left, adapters, *variants

    models = list_models(connect_worker(), "/api/ps")
    listed = [*describe_each(models, _build_row, note_left_out)]
    has_variants = any(row["variants"] for row in listed)
    rows, lines = build_table(
        ("NAME", "DIGEST", "SIZE", "DEVICE", "UNTIL", "ADAPTERS", *["VARIANTS"] * has_variants),
        listed,
        format_cells,
        ("DIGEST", "DEVICE"),
    )
    value = [row | {"until": row["until"] and row["until"].isoformat()} for row in rows]
    size = sum(row["size"] for row in rows)
    return Reading(value, lines, {"memory": (size, format_size(size))})


def _build_row(model: dict[str, Any]) -> dict[str, Any]:
    device = model.get("device") or get_detail(model, "device")
    return {
        "reference": model["name"],
        "digest": model["digest"],
        "size": model["size"],
        "device": device if isinstance(device, str) else None,
        "adapters": _list_adapters(model.get("loras")),
        "variants": _list_names(model.get("variants")),
        "until": _parse_expiry(model.get("expires_at")),
    }


def _list_names(names: Any) -> list[str]:
    """Return the other names that a model serves."""
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _list_adapters(uses: Any) -> list[str]:
    """Return the adapters of the last request with their strengths, such as ``style:v1:0.8``."""
    described = [use for use in uses if isinstance(use, dict)] if isinstance(uses, list) else []
    return [f"{use.get('model')}:{use.get('strength')}" for use in described]


def _parse_expiry(text: Any) -> datetime | None:
    """Return when an idle model is unloaded; None for never, or if the worker does not send it."""
    try:
        until = datetime.fromisoformat(text)
    except (TypeError, ValueError, OverflowError):
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    is_far = (until - datetime.now(UTC)).total_seconds() > _FOR_EVER
    return None if is_far else until


def _format_expiry(until: datetime | None, time: datetime) -> str:
    return (
        "forever"
        if until is None
        else f"in {format_duration(max(0.0, (until - time).total_seconds()))}"
    )
