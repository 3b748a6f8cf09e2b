"""``aimage node status``"""

from __future__ import annotations

import os
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from clowder_aimage.cli.console.option import common_options, settings
from clowder_aimage.cli.console.output import note, plural, printable, result, size, table
from clowder_aimage.cli.console.remote_worker import refuse_options
from clowder_aimage.errors import FormatError, NetworkError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clowder_aimage.engine.endpoint import Endpoint

PORT = 8050
DEFAULT_NODE = f"127.0.0.1:{PORT}"
PATH = "/v1/node"
_LONGEST = 300  # characters of what a node says about one thing
_SOURCES = ("registry", "mirror", "neighbour", "cache")
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_Object = dict[str, Any]


@click.command(short_help="Show what a node keeps, and what it lacks.")
@click.option(
    "--addr",
    metavar="HOST:PORT",
    help=f"The node to ask. [env: AIMAGE_HOST; default: {DEFAULT_NODE}]",
)
@common_options
def status(addr: str | None) -> None:
    """Show each model that a node is to keep: whether it is there, or how far it is and why, where
    its bytes came from, and when that changed."""
    refuse_options("leave it out: it is the node's store that is shown", but=("addr",))
    show(*node(addr), as_json=settings().as_json)


def node(addr: str | None) -> tuple[Endpoint, str | None]:
    """Where the node is that was meant, and the token for it. Raises UsageError."""
    from clowder_aimage.engine.endpoint import Endpoint

    token = os.environ.get("AIMAGE_TOKEN", "").strip() or None
    if not addr:
        return Endpoint.parse(os.environ.get("AIMAGE_HOST", "").strip() or DEFAULT_NODE), token
    place = Endpoint.parse(addr)  # it says what is odd
    has_port = place.scheme != "http" or urlsplit(f"//{addr.partition('//')[2] or addr}").port
    return place if has_port else Endpoint("http", place.host, PORT), token


def show(place: Endpoint, token: str | None, *, as_json: bool) -> None:
    """Ask a node how it is, and print that; what it warns of on stderr, too.

    Raises:
        NotFoundError: a worker is there that is no node.
        AImageError: as ``worker.client.Client``.
    """
    answer = ask(place, token)
    result(answer, "\n".join(lines(answer, datetime.now(UTC))), as_json=as_json)
    for each in () if as_json else warnings(answer):
        note(f"warning: {each}")


def ask(place: Endpoint, token: str | None) -> _Object:
    """What the node says of itself. Raises as ``show``."""
    from clowder_aimage.engine.worker_client import WorkerClient

    try:
        answer = WorkerClient(str(place), token).ask("GET", PATH)
    except NetworkError as error:
        raise NetworkError(
            error.message,
            hint="see that 'aimage node' runs there, or name another one with --addr",
        ) from None
    except NotFoundError:
        raise NotFoundError(
            f"the worker at {place} is no node: it keeps no models",
            hint="begin it with 'aimage serve --node', or name a node with --addr",
        ) from None
    models = answer.get("models") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(map(_is_model, models)):
        raise FormatError(f"what answers at {place} is no node", hint="name one with --addr")
    found: _Object = answer
    return found


def warnings(answer: Mapping[str, Any]) -> list[str]:
    """What a node warns of, though requests may go there."""
    said = answer.get("warnings")
    return [text for each in said if (text := clean(each))] if isinstance(said, list) else []


def _is_model(item: Any) -> bool:
    is_object = isinstance(item, dict)
    return is_object and isinstance(item.get("ref"), str) and isinstance(item.get("state"), str)


def lines(answer: Mapping[str, Any], now: datetime) -> list[str]:
    """What a node says, for people. Nothing in it but ``models`` is relied on."""
    facts = [
        ("node", _node(answer, now)),
        ("desired", _desired(_object(answer.get("desired")), now)),
        ("disk", _disk(_object(answer.get("disk")))),
        *_neighbours(answer.get("neighbours")),
    ]
    width = max(len(name) for name, _ in facts)
    head = [f"{name:<{width}}  {text}" for name, text in facts if text]
    rows = sorted((_row(model, now) for model in answer["models"]), key=lambda row: row[0])
    if not rows:
        return [*head, "", "nothing is wanted here"]
    titles = ("NAME", "DIGEST", "SOURCE", "CHANGED", "STATE")
    return [*head, "", *table([titles, *rows]).split("\n")]


# -- the node


def _node(answer: Mapping[str, Any], now: datetime) -> str:
    reasons = answer.get("reasons")
    said = [_reason(each) for each in reasons] if isinstance(reasons, list) else []
    state = "ready" if answer.get("ready") is True else "not ready"
    why = f": {'; '.join(filter(None, said))}" if any(said) and state != "ready" else ""
    since = ago(answer.get("started"), now)
    return f"{clean(answer.get('id')) or '?'}, {state}{why}" + (
        f", began {since}" if since != "?" else ""
    )


def _reason(value: Any) -> str:
    """As ``/readyz`` has them: an object with a reason, and perhaps a model."""
    found = _object(value)
    reason, model = clean(found.get("reason")), clean(found.get("model"))
    return f"{reason} ({model})" if reason and model else reason or clean(value)


def _desired(desired: _Object, now: datetime) -> str:
    if not desired:
        return ""
    parts = [clean(desired.get("directory")) or "no directory"]
    if (files := _count(desired.get("files"))) is not None:
        parts.append(plural(files, "file"))
    if (loaded := ago(desired.get("loaded"), now)) != "?":
        parts.append(f"loaded {loaded}")
    if desired.get("valid") is False:
        why = clean(desired.get("error"))
        kept = "" if desired.get("loaded") is None else " (what it said last holds)"
        parts.append(f"INVALID{kept}" + (f": {why}" if why else ""))
    return ", ".join(parts)


def _disk(disk: _Object) -> str:
    total, free, used = _count(disk.get("total")), _count(disk.get("free")), _part(disk.get("used"))
    if total is None or free is None:
        return ""
    text = f"{size(free)} free of {size(total)}" + (f", {used} used" if used else "")
    high, low = _part(disk.get("high")), _part(disk.get("low"))
    return f"{text}; models are removed from {high} on, down to {low}" if high and low else text


def _part(value: Any) -> str:
    """A part of one, as percent; empty where it is none."""
    is_part = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return f"{int(value * 100 + 1e-9)} %" if is_part else ""


def _neighbours(value: Any) -> list[tuple[str, str]]:
    """How many there are of each kind, and each that is of no use."""
    found = [_object(each) for each in value] if isinstance(value, list) else []
    states = Counter(clean(each.get("state")) or "unknown" for each in found)
    if not states:
        return []
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return [("neighbours", counted)] + [
        ("", f"{clean(each.get('url')) or '?'} is {_silence(each)}")
        for each in found
        if each.get("state") != "live"
    ]


def _silence(neighbour: _Object) -> str:
    state, reason = clean(neighbour.get("state")) or "unknown", clean(neighbour.get("reason"))
    return f"{state}: {reason}" if reason else state


# -- one model


def _row(model: _Object, now: datetime) -> tuple[str, ...]:
    digest = clean(model.get("digest"))
    return (
        clean(model["ref"]),
        digest.partition(":")[2][:12] or "-",
        _sources(_object(model.get("sources"))),
        ago(model.get("changed"), now) if model.get("changed") is not None else "-",
        state_of(model, now),
    )


def state_of(model: Mapping[str, Any], now: datetime) -> str:
    """How a model is, in words."""
    state = clean(model["state"])
    why = clean(model.get("reason")) or clean(model.get("code"))
    after = _after(model.get("next"), now)
    if state == "pulling":
        return f"pulling{_progress(model)}"
    if state in ("waiting", "failed"):
        more = "; ".join(filter(None, (why, after and f"next try {after}")))
        return f"{state}: {more}" if more else state
    if state != "present":
        return f"{state}: {why}" if why else state
    words = [state]
    if drift := clean(model.get("drift")):
        words.append(f"the tag means {drift.partition(':')[2][:12] or drift} now")
    if why:  # of what is present: why its tag cannot be followed
        words += [why, f"next try {after}" if after else ""]
    return "; ".join(filter(None, words))


def _progress(model: Mapping[str, Any]) -> str:
    """How much of it is here, and how fast more comes; never 100 % of what lacks a byte."""
    done, total = _count(model.get("completed")), _count(model.get("total"))
    text = f" {min(done * 100 // total, 100)} %" if done is not None and total else ""
    rate = model.get("rate")
    is_rate = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < 2**60
    return text + (f" at {_speed(rate)}" if is_rate and rate is not None else "")


def _speed(rate: float) -> str:
    """Bytes per second as the node's own limits are set: in powers of 1024."""
    if rate >= 2**20:
        return f"{rate / 2**20:.0f} MiB/s"
    return f"{rate / 2**10:.0f} KiB/s"


def _sources(sources: _Object) -> str:
    """Where its bytes came from, the most first, with the parts where there are several."""
    counts = {name: _count(sources.get(name)) or 0 for name in _SOURCES}
    found = sorted((-count, name) for name, count in counts.items() if count)
    total = sum(counts.values())
    if len(found) < 2:
        return found[0][1] if found else "-"
    return ", ".join(f"{name} {max(1, -count * 100 // total)} %" for count, name in found)


# -- words


def clean(value: Any) -> str:
    """A text of a node's on one line, without control characters, and not endless; empty where it
    is no text."""
    if not isinstance(value, str):
        return ""
    text = printable(value.replace("\n", " ").strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def ago(value: Any, now: datetime) -> str:
    """How long ago a moment was; ? where it is none."""
    moment = _moment(value)
    if moment is None:
        return "?"
    seconds = (now - moment).total_seconds()
    return "just now" if seconds < 1 else f"{_span(seconds)} ago"


def _after(value: Any, now: datetime) -> str:
    moment = _moment(value)
    if moment is None:
        return ""
    seconds = (moment - now).total_seconds()
    return "now" if seconds < 1 else f"in {_span(seconds)}"


def _span(seconds: float) -> str:
    """12 s, 4 min, 3 h, 5 d: the largest unit of which there is one whole."""
    length, unit = next((each for each in _SPANS if seconds >= each[0]), _SPANS[-1])
    return f"{int(seconds // length)} {unit}"


def _moment(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _object(value: Any) -> _Object:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
