"""``aimage node``: keep models on this machine, and show the status of a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    VerbGroup,
    common_options,
    daemon_connection_options,
    get_settings,
    list_explicit_options,
)
from clowder_aimage.cli.console.output import (
    clean_line,
    format_count,
    format_fields,
    format_size,
    format_table,
    note,
)
from clowder_aimage.cli.console.watch import Reading, show, watch_option
from clowder_aimage.cli.console.worker_connection import (
    create_client,
    refuse_options,
)
from clowder_aimage.cli.verbs.serve import listening_options, node_options, run_server, spell
from clowder_aimage.config.user_directory import find_config_file, read_worker_host
from clowder_aimage.errors import FormatError, NetworkError, NotFoundError, UsageError, needs

if TYPE_CHECKING:
    from clowder_aimage.engine.endpoint import Endpoint

PORT = 8050
DEFAULT_NODE = f"127.0.0.1:{PORT}"
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_Json = Mapping[str, Any]


@examples(
    "aimage node --desired ./desired",
    "aimage node --desired ./desired --neighbour dns:nodes.example.com:8050",
)
@common_options
@click.group(cls=VerbGroup, invoke_without_command=True, short_help="Keep models on this machine.")
@listening_options("node", "127.0.0.1:8050")
@node_options
@daemon_connection_options
@click.pass_context
def node(context: click.Context, /, **options: Any) -> None:
    """Keep the models that the files in --desired list on this machine, until interrupted.

    Models are pulled from their registries, or from other nodes (--neighbour), and pulled again
    when their tags move. The node serves its blobs to other nodes, and its status under /v1/node:
    see 'aimage node status'. The URL is printed when requests are accepted.

    Options that are not given come from the environment (AIMAGE_NODE_ADDR and so on), then from
    "node" in the configuration: see 'aimage config show'.
    """
    if context.invoked_subcommand is not None:
        if stated := list_explicit_options():
            raise UsageError(f"{stated[0]} cannot be combined with a verb of 'aimage node'")
        return
    with needs("a node", "worker"):
        from clowder_aimage.engine.settings import gather
        from clowder_aimage.node.settings import NodeSettings
    config, _ = gather(NodeSettings, options, find_config_file(), spell)
    run_server(config, config)


@examples("aimage node status", "aimage node status --addr 127.0.0.1:8050 --json")
@common_options
@node.command(short_help="Show the models of a node and their states.")
@click.option(
    "--addr",
    metavar="HOST:PORT",
    help=f"Address of the node. [env: AIMAGE_HOST; default: {DEFAULT_NODE}]",
)
@watch_option
def status(addr: str | None, watch: float | None) -> None:
    """Show each model of a node: its state, the sources of its bytes, and the last change."""
    refuse_options("omit it: the store of the node is shown", exclude=("addr", "watch"))
    node_endpoint = resolve_endpoint(addr)
    show(lambda: _read_status(node_endpoint), watch)


def _read_status(node_endpoint: Endpoint) -> Reading:
    answer = ask(node_endpoint)
    try:
        text = format_status(answer, datetime.now(UTC))
        warnings = [_format_line(warning) for warning in answer["warnings"]]
        charts = _list_charts(answer)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise FormatError(
            f"the status that {node_endpoint} sent cannot be read",
            hint="compare the versions of 'aimage' here and there",
        ) from None
    for warning in () if get_settings().as_json else warnings:
        note(f"warning: {warning}")
    return Reading(answer, text, charts)


def _list_charts(answer: _Json) -> dict[str, tuple[float | None, str]]:
    models, disk = answer["models"], answer["disk"]
    present = sum(model["state"] == "present" for model in models)
    rate = sum(model["rate"] for model in models if model["state"] == "pulling")
    free = disk["free"] if disk else None
    charts: dict[str, tuple[float | None, str]] = {
        "present": (present, f"{present} of {len(models)}"),
        "pulling": (rate, f"{format_size(rate)}/s"),
    }
    return charts if free is None else charts | {"free": (free, format_size(free))}


def resolve_endpoint(addr: str | None) -> Endpoint:
    """Return the address of the node, with the default port if it has none. Raises UsageError."""
    from clowder_aimage.engine.endpoint import Endpoint

    if not addr:
        return Endpoint.parse(read_worker_host() or DEFAULT_NODE)
    parsed = Endpoint.parse(addr)
    has_port = parsed.scheme != "http" or urlsplit(f"//{addr.partition('//')[2] or addr}").port
    return parsed if has_port else Endpoint("http", parsed.host, PORT)


def ask(node_endpoint: Endpoint) -> dict[str, Any]:
    """Return the node's status.

    Raises:
        NotFoundError: a worker is there that is not a node.
        AImageError: as ``WorkerClient``.
    """
    try:
        answer = create_client(str(node_endpoint)).ask("GET", "/v1/node")
    except NetworkError as error:
        message = error.message.replace("the worker at", "the node at")
        raise NetworkError(
            message, hint="start 'aimage node' there, or choose another node with --addr"
        ) from None
    except NotFoundError:
        raise NotFoundError(
            f"the server at {node_endpoint} is not a node",
            hint="start it with 'aimage serve --node', or choose a node with --addr",
        ) from None
    if not isinstance(answer, dict) or "models" not in answer:
        raise FormatError(
            f"the server at {node_endpoint} is not a node", hint="choose one with --addr"
        )
    return answer


def format_status(answer: _Json, time: datetime) -> list[str]:
    """Return a node's status as text."""
    facts = [
        ("node", _describe_node(answer, time)),
        ("desired", _describe_desired(answer["desired"], time)),
        ("disk", _describe_disk(answer["disk"])),
        *_describe_neighbours(answer["neighbours"]),
    ]
    head = format_fields([(name, _format_line(text)) for name, text in facts if text])
    rows = sorted(_format_row(model, time) for model in answer["models"])
    if not rows:
        return [*head, "", "no models are specified"]
    titles = ("NAME", "DIGEST", "SOURCE", "CHANGED", "STATE")
    return [*head, "", *format_table([titles, *rows], ("SOURCE", "CHANGED"))]


def _describe_node(answer: _Json, time: datetime) -> str:
    reasons = [
        f"{reason['reason']} ({reason['model']})" if "model" in reason else reason["reason"]
        for reason in answer["reasons"]
    ]
    why = f": {'; '.join(reasons)}" if reasons else ""
    state = "ready" if answer["ready"] else f"not ready{why}"
    return f"{answer['id']}, {state}, started {_format_age(answer['started'], time)}"


def _describe_desired(desired: _Json, time: datetime) -> str:
    parts = [desired["directory"] or "no directory", format_count(desired["files"], "file")]
    if desired["loaded"]:
        parts.append(f"loaded {_format_age(desired['loaded'], time)}")
    if not desired["valid"]:
        fallback = " (the last valid state is used)" if desired["loaded"] else ""
        parts.append(f"INVALID{fallback}: {desired['error']}")
    return ", ".join(parts)


def _describe_disk(disk: _Json) -> str:
    if disk["total"] is None:
        # The store cannot be read.
        return ""
    return (
        f"{format_size(disk['free'])} free of {format_size(disk['total'])}, "
        f"{_format_percent(disk['used'])} used; models are evicted at "
        f"{_format_percent(disk['high'])}, down to {_format_percent(disk['low'])}"
    )


def _format_percent(fraction: float) -> str:
    return f"{int(fraction * 100 + 1e-9)} %"


def _describe_neighbours(neighbours: list[_Json]) -> list[tuple[str, str]]:
    if not neighbours:
        return []
    counts = sorted(Counter(neighbour["state"] for neighbour in neighbours).items())
    facts = [("neighbours", ", ".join(f"{count} {state}" for state, count in counts))]
    for neighbour in neighbours:
        if neighbour["state"] != "live":
            why = f": {neighbour['reason']}" if neighbour.get("reason") else ""
            facts.append(("", f"{neighbour['url']} is {neighbour['state']}{why}"))
    return facts


def _format_row(model: _Json, time: datetime) -> tuple[str, ...]:
    digest = _shorten_digest(model["digest"]) if model["digest"] else "-"
    sources, changed = _format_sources(model["sources"]), _format_age(model["changed"], time)
    return model["ref"], digest, sources, changed, _format_line(describe_state(model, time))


def describe_state(model: _Json, time: datetime) -> str:
    """Return the state of a model in words."""
    state: str = model["state"]
    parts = [model["reason"]] if model["reason"] else []
    if model["next"]:
        parts.append(f"next try {_format_delay(model['next'], time)}")
    if state == "pulling":
        return state + _format_progress(model)
    if state == "present":
        drift = (
            [f"the tag now refers to {_shorten_digest(model['drift'])}"] if model["drift"] else []
        )
        return "; ".join([state, *drift, *parts])
    return f"{state}: {'; '.join(parts)}" if parts else state


def _format_progress(model: _Json) -> str:
    done, total, rate = model["completed"], model["total"], model["rate"]
    text = f" {done * 100 // total} %" if total else ""
    if rate >= 2**20:
        return f"{text} at {rate / 2**20:.0f} MiB/s"
    return f"{text} at {rate / 2**10:.0f} KiB/s" if rate else text


def _format_sources(sources: Mapping[str, int]) -> str:
    """Format the sources of the bytes, largest first, with fractions if there are several."""
    counts = sorted((-count, name) for name, count in sources.items() if count)
    total = sum(sources.values())
    if len(counts) < 2:
        return counts[0][1] if counts else "-"
    return ", ".join(f"{name} {max(1, -count * 100 // total)} %" for count, name in counts)


def _format_line(text: str) -> str:
    """Format a text on one line, as it may contain a registry's message."""
    return clean_line(text.replace("\n", " "))


def _shorten_digest(digest: str) -> str:
    return digest.partition(":")[2][:12]


def _format_age(moment: str, time: datetime) -> str:
    seconds = (time - datetime.fromisoformat(moment)).total_seconds()
    return "just now" if seconds < 1 else f"{_format_span(seconds)} ago"


def _format_delay(moment: str, time: datetime) -> str:
    seconds = (datetime.fromisoformat(moment) - time).total_seconds()
    return "now" if seconds < 1 else f"in {_format_span(seconds)}"


def _format_span(seconds: float) -> str:
    """Format the largest whole unit: 12 s, 4 min, 3 h or 5 d."""
    length, unit = next((span for span in _SPANS if seconds >= span[0]), _SPANS[-1])
    return f"{int(seconds // length)} {unit}"
