"""``aimage serve``, and the options and server shared with ``aimage node``."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.fleet_access import (
    ACCESS_OPTIONS,
    FLEET,
    build_fleet_access,
    fleet_key_option,
    fleet_options,
)
from clowder_aimage.cli.console.option import (
    LOG,
    daemon_connection_options,
    get_settings,
    in_section,
    options,
    start_traces,
    torch_options,
    verb,
    yes_option,
)
from clowder_aimage.cli.console.output import note, print_result
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.config.user_directory import find_config_file
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.api.service import Service
    from clowder_aimage.engine.settings import ServerSettings, Settings
    from clowder_aimage.fleet.link import FleetAccess
    from clowder_aimage.http.local_call import LocalCalls
    from clowder_aimage.http.route import Role
    from clowder_aimage.node.settings import NodeSettings

_F = TypeVar("_F", bound=Callable[..., Any])
_FILE = click.Path(dir_okay=False, path_type=Path)
_PER_CENT = click.FloatRange(0, 100)
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT}  # may recover

# Sections of the help of servers
ACCESS, LIMITS, NODE = "Address and access", "Limits of requests", "Node"

node_options = in_section(
    NODE,
    click.option(
        "--desired",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Directory with specifications of the models to keep.",
    ),
    click.option(
        "--prune/--no-prune",
        default=None,
        help="Remove models that no specification lists any more. [default: keep them]",
    ),
    click.option(
        "--high",
        type=_PER_CENT,
        metavar="PERCENT",
        help="Disk usage at which unused models are evicted. [default: 85]",
    ),
    click.option(
        "--low",
        type=_PER_CENT,
        metavar="PERCENT",
        help="Disk usage at which eviction ends. [default: 80]",
    ),
    click.option(
        "--min-age",
        metavar="DURATION",
        help="Time since the last use before a model may be evicted. [default: 2m]",
    ),
    click.option(
        "--collect", metavar="DURATION", help="Interval of garbage collection. [default: 10m]"
    ),
    click.option(
        "--neighbour",
        "neighbours",
        multiple=True,
        metavar="HOST:PORT",
        help="Another node, or dns:NAME:PORT for all addresses of a name. May be repeated.",
    ),
)
NODE_OPTIONS = ("desired", "prune", "high", "low", "min_age", "collect", "neighbours")


def option(name: str, *, prefix: str = "", **attributes: Any) -> Callable[[_F], _F]:
    """Return an option; ``prefix`` is that of its environment variable, if it has one."""
    variable = prefix + name.strip("-").replace("-", "_").upper() if prefix else None
    return click.option(name, envvar=variable, show_envvar=bool(prefix), **attributes)


def metrics_and_log_options(prefix: str = "") -> Callable[[_F], _F]:
    """Return a decorator that adds them; ``prefix`` is that of their environment variables."""
    levels = click.Choice(["debug", "info", "warning", "error"])
    return in_section(
        LOG,
        option(
            "--metrics-addr",
            prefix=prefix,
            metavar="HOST:PORT",
            help="Serve /metrics at this address too, without a token.",
        ),
        option(
            "--log-format",
            prefix=prefix,
            type=click.Choice(["console", "json"]),
            help="Format of the log. [default: console]",
        ),
        option(
            "--log-level",
            prefix=prefix,
            type=levels,
            help="Lowest level that is logged. [default: info]",
        ),
    )


def listening_options(server: str, address: str) -> Callable[[_F], _F]:
    """Return a decorator that adds the options of a server: addresses, access, shutdown and log."""
    access = in_section(
        ACCESS,
        click.option(
            "--addr",
            metavar="HOST:PORT",
            help="Address to listen on; port 0 selects a free one. "
            f"[default: {address} without --socket]",
        ),
        click.option("--socket", type=_FILE, help="Listen on this unix socket."),
        click.option("--token-file", type=_FILE, help="Require a token from this file."),
        click.option(
            "--allow-remote",
            is_flag=True,
            help="Accept requests from other machines without a token.",
        ),
        click.option(
            "--allow-host",
            "allow_hosts",
            multiple=True,
            metavar="NAME",
            help=f"A host name that clients may use for this {server}. May be repeated.",
        ),
    )
    shutdown = in_section(
        LOG,
        click.option(
            "--grace",
            metavar="DURATION",
            help=f"Time for running requests when the {server} stops. [default: 30s]",
        ),
    )
    return options(access, shutdown, metrics_and_log_options())


def caller_options(stored: str) -> Callable[[_F], _F]:
    """Return a decorator that adds the bounds of each token; ``stored`` is a default."""
    return options(
        click.option(
            "--caller-bytes",
            metavar="SIZE",
            help=f"Maximum size of the files of a token. [default: {stored}]",
        ),
        click.option(
            "--caller-batches",
            type=click.IntRange(1),
            help="Maximum number of open batches of a token. [default: 100]",
        ),
        click.option(
            "--caller-body-bytes",
            metavar="SIZE",
            help="Maximum size of the requests of a token in progress. [default: 256MiB]",
        ),
    )


def spell(field: str) -> str:
    """Return the option for a field of a server's settings."""
    names = {"aliases": "alias", "allow_hosts": "allow-host", "allow_origins": "allow-origin"}
    names |= {"neighbours": "neighbour", "allow_inputs": "allow-input"}
    return "--" + names.get(field, field).replace("_", "-")


allow_origin_option = click.option(
    "--allow-origin",
    "allow_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of this origin generate pictures, such as https://app.example. Loopback "
    "origins are always allowed. May be repeated.",
)


@examples(
    "aimage serve --default-model shapes",
    "aimage serve --addr 127.0.0.1:11435 --keep-alive 1h",
    "aimage serve --node --desired ./desired",
)
@verb
@listening_options("worker", "127.0.0.1:11434")
@in_section(
    ACCESS,
    allow_origin_option,
    click.option(
        "--public-url",
        metavar="URL",
        help="Base URL of links to pictures. [default: the address of the request]",
    ),
    click.option(
        "--page/--no-page", default=None, help="Serve the page for browsers at /. [default: yes]"
    ),
    click.option("--open", "opens", is_flag=True, help="Open the page in the browser."),
)
@in_section(
    "Models",
    click.option("--default-model", metavar="REF", help="Model for requests that name none."),
    click.option(
        "--default-for",
        multiple=True,
        metavar="PATTERN",
        help="Names that mean the default model. May be repeated. "
        "[default: dall-e-2, dall-e-3, gpt-image-*, chatgpt-image-*]",
    ),
    click.option("--enhancer", metavar="REF", help="Language model that enhances prompts."),
    click.option(
        "--alias",
        "aliases",
        multiple=True,
        metavar="NAME=REF",
        help="Another name of a model. May be repeated.",
    ),
    click.option(
        "--wanted",
        multiple=True,
        metavar="REF",
        help="Pull this model before the worker is ready. May be repeated.",
    ),
    click.option(
        "--pull",
        type=click.Choice(["never", "if-missing", "always"]),
        help="When to pull the model of a request. [default: if-missing]",
    ),
    click.option(
        "--first",
        metavar="TYPE",
        help="Use a smaller variant, such as int4, while the model of a request is pulled.",
    ),
    click.option(
        "--lora-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Offer the adapters in this directory: 'styles/ink' is styles/ink.safetensors in it.",
    ),
    yes_option,
)
@in_section(
    "Memory",
    click.option(
        "--memory",
        metavar="SIZE",
        help="Memory for models, such as 12GiB. [default: from the machine]",
    ),
    click.option(
        "--max-models",
        type=click.IntRange(1),
        help="Maximum number of loaded models. [default: as many as the memory has room for]",
    ),
    click.option(
        "--keep-alive",
        metavar="DURATION",
        help="Time until an idle model is unloaded, such as 5m; 0 for at once, -1 for never. "
        "[default: 5m]",
    ),
    click.option(
        "--text-encoder",
        type=click.Choice(["auto", "keep", "release"]),
        help="Keep the text encoder between prompts, or load it again. "
        "[default: auto, by --memory]",
    ),
    click.option(
        "--context",
        type=click.IntRange(16),
        metavar="TOKENS",
        help="Maximum number of tokens of a prompt and its text. [default: the model's]",
    ),
    click.option(
        "--parallel",
        type=click.IntRange(1, 256),
        help="Maximum number of requests that a language model serves at once. [default: 16]",
    ),
)
@in_section(
    LIMITS,
    click.option(
        "--queue",
        type=click.IntRange(0),
        help="Number of requests that may wait, however long it takes. [default: 8]",
    ),
    click.option(
        "--max-wait",
        metavar="DURATION",
        help="Let further requests wait while the estimated wait is shorter than this; 0 for none. "
        "[default: 30s]",
    ),
    click.option("--deadline", metavar="DURATION", help="Time limit of a request. [default: none]"),
    click.option(
        "--text-deadline",
        metavar="DURATION",
        help="Time that a text may be computed; 0 for no limit. [default: 10m]",
    ),
    click.option(
        "--picture-deadline",
        type=click.FloatRange(0, 1e6),
        metavar="FACTOR",
        help="The same of pictures, times their estimated time; 0 for no limit. [default: 20]",
    ),
    click.option(
        "--allow-input",
        "allow_inputs",
        multiple=True,
        metavar="HOST",
        help="Let requests name pictures at https://HOST/: HOST, HOST:PORT or *.DOMAIN. "
        "May be repeated. [default: none]",
    ),
    click.option(
        "--reserve",
        metavar="SIZE",
        help="Space of the disk that files and batches leave free, at most a twentieth of it. "
        "[default: 1GiB]",
    ),
    caller_options("10GiB"),
)
@in_section(
    "Answers",
    click.option(
        "--stream-format",
        type=click.Choice(["auto", "openai", "openai+progress", "ollama"]),
        help="Format of streamed events, unless the request has one. [default: auto, by client]",
    ),
    click.option(
        "--png-facts/--no-png-facts",
        default=None,
        help="Write prompt, seed and other metadata into picture files. [default: yes]",
    ),
    click.option(
        "--mark/--no-mark",
        default=None,
        help="Say in picture files that a machine made them. [default: yes]",
    ),
    click.option(
        "--sign/--no-sign",
        default=None,
        help="Sign picture files, if the configuration names a key. [default: yes]",
    ),
)
@in_section(
    "Computation",
    click.option(
        "--backend",
        type=click.Choice(["auto", "mlx", "torch"]),
        help="Library of image models. [default: auto, by what is installed and the GPU]",
    ),
    torch_options,
    click.option("--dtype", help="Type to compute in: float32 (f32) or bfloat16 (bf16)."),
)
@in_section(
    FLEET,
    click.option(
        "--join",
        metavar="URL",
        help="Also take the jobs of a fleet, from NATS at this URL: see 'aimage gateway'.",
    ),
    click.option(
        "--worker-name",
        metavar="NAME",
        help="Name in the fleet, which no other worker has. "
        "[default: the machine's, with the port]",
    ),
    fleet_key_option,
)
@fleet_options
@in_section(
    NODE,
    click.option("--node", "is_node", is_flag=True, help="Also run a node: see 'aimage node'."),
)
@node_options
@daemon_connection_options
def serve(aliases: tuple[str, ...], is_node: bool, opens: bool, **options: Any) -> None:
    """Serve models to clients until interrupted.

    A browser shows the page at the URL, which is printed when requests are accepted. The APIs are
    OpenAI's and ollama's for images, and Clowder's: /docs shows them.

    The default model, the enhancer and models of --wanted may be short names: on a terminal they
    are fetched after a question, before the start.

    Options that are not given come from the environment (AIMAGE_SERVE_ADDR and so on), then from
    "worker" in the configuration: see 'aimage config show'.
    """
    with needs("a worker", "mlx,worker"):
        from clowder_aimage.engine.settings import Settings, gather
        from clowder_aimage.node.settings import NodeSettings

    node_values = {name: options.pop(name) for name in NODE_OPTIONS}
    access_options = {name: options.pop(name) for name in ACCESS_OPTIONS if name in options}
    if not is_node and (odd := next((key for key, value in node_values.items() if value), None)):
        raise UsageError(f"{spell(odd)} requires --node")
    options["aliases"] = ",".join(aliases) or None
    config, _ = gather(Settings, options, find_config_file(), spell)
    if opens and not (config.page and config.address):
        raise UsageError("--open requires the page, and an address to listen on")
    node = gather(NodeSettings, node_values, find_config_file(), spell)[0] if is_node else None
    access = None
    if config.join:
        with needs("a worker of a fleet", "worker,fleet"):
            from clowder_aimage.fleet.name import WORKER
            from clowder_aimage.fleet.permission import is_worker_name

            access = build_fleet_access(config.join, access_options, WORKER)
        if config.worker_name and not is_worker_name(config.worker_name):
            raise UsageError(f"--worker-name: a worker may not be named {config.worker_name!r}")
    run_server(_with_signing(_obtain_models(config)), node, access, opens=opens)


def _with_signing(config: Settings) -> Settings:
    """Return settings with the key that signs pictures, if there is one. Raises UsageError."""
    from clowder_aimage.document.schema import read_configuration
    from clowder_aimage.pictures.provenance.signing_settings import parse_signing

    file = find_config_file()
    signing = read_configuration(file, lambda document: parse_signing(document, file))
    if signing is None or not (config.mark and config.sign):
        return config
    from clowder_aimage.pictures.provenance.signer import PictureSigner

    PictureSigner.open(signing, note).check()
    return config.with_signing(signing)


def _obtain_models(config: Settings) -> Settings:
    """Return settings with models in the store: short names are fetched if the user agrees.

    A service without a terminal starts without them, and warns.
    """
    if not (get_settings().yes or (sys.stdin is not None and sys.stdin.isatty())):
        return config
    from clowder_aimage.cli.create.named_model import obtain
    from clowder_aimage.cli.worker.enhancer import check_enhancer
    from clowder_aimage.config.name_index import NamedModel, read_index

    index = read_index()

    def obtain_name(name: str, check: Callable[[NamedModel], None] = lambda _: None) -> str:
        reference = Reference.parse(config.aliases.get(name, name))
        return name if index.find(reference) is None else str(obtain(reference, check))

    obtained = {
        "default_model": config.default_model and obtain_name(config.default_model),
        "enhancer": config.enhancer and obtain_name(config.enhancer, check_enhancer),
        "wanted": tuple(map(obtain_name, config.wanted)),
    }
    return config.model_copy(update=obtained)


def check_stores(stores: Sequence[Path]) -> None:
    """Verify that a store is available before a server starts.

    Raises:
        UsageError: one is not a directory, or the only one is absent and cannot be made.
    """
    for store in stores:
        try:
            if not _is_directory(store) and len(stores) == 1:
                _try_to_make(store)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise UsageError(
                    f"cannot use the store {store}: {error.strerror or error}",
                    hint="choose a directory with --store or AIMAGE_STORE",
                ) from None


def _is_directory(store: Path) -> bool:
    """Return True if it exists. Raises OSError if it is not a directory."""
    try:
        with os.scandir(store):
            return True
    except FileNotFoundError:
        return False
    except PermissionError:
        # Not readable, but possibly accessible.
        if store.is_dir():
            return True
        raise


def _try_to_make(store: Path) -> None:
    """Create a directory at the place of the store and remove it. Raises OSError."""
    path = store.absolute()
    while not path.exists():
        path = path.parent
    Path(tempfile.mkdtemp(prefix=".aimage-", dir=path)).rmdir()


def open_page(urls: Sequence[str]) -> threading.Thread | None:
    """Open the page in the browser of this user, at the first address that a browser can open.

    Return the thread that does so, or None without such an address.
    """
    import webbrowser

    url = next((candidate for candidate in urls if candidate.startswith("http")), None)
    if url is None:
        return None
    thread = threading.Thread(target=webbrowser.open, args=(url,), daemon=True)
    thread.start()
    return thread


def run_server(
    config: ServerSettings,
    node: NodeSettings | None,
    fleet: FleetAccess | None = None,
    *,
    opens: bool = False,
) -> None:
    """Serve as a worker, a node, or both, until interrupted; ``opens`` the page when ready."""
    from clowder_aimage.api.service import make_service
    from clowder_aimage.api.worker_role import WorkerRole
    from clowder_aimage.engine.settings import Settings as WorkerSettings
    from clowder_aimage.http import log, server
    from clowder_aimage.http.listening_socket import listen, listen_tcp_only
    from clowder_aimage.http.metrics_role import MetricsRole
    from clowder_aimage.http.token_file import TokenFile
    from clowder_aimage.node.daemon import Daemon

    chosen = get_settings()
    start_traces()
    check_stores(chosen.stores)
    log.configure(config.log_format, "warning" if chosen.quiet else config.log_level)
    connection = chosen.build_server_options()
    tokens = TokenFile(config.token_file) if config.token_file else {}
    opened = listen(
        config.address,
        config.socket,
        is_default=not config.addr,
        has_tokens=bool(tokens),
        allow_remote=config.allow_remote,
        allow_hosts=config.allow_hosts,
    )

    def report_ready(urls: list[str]) -> None:
        print_result({"urls": urls}, urls)
        if opens:
            open_page(urls)

    with contextlib.ExitStack() as stack:
        listeners = stack.enter_context(contextlib.closing(opened))
        service = make_service(config, chosen.layout, connection)
        is_worker = isinstance(config, WorkerSettings)
        worker_role = WorkerRole(
            service, makes_pictures=is_worker, advice=format_advice, tokens=tokens
        )
        roles: list[Role] = [worker_role]
        if fleet is not None:
            roles.insert(0, _join_fleet(service, worker_role.calls, fleet, listeners.urls))
        if node is not None:
            roles.insert(0, Daemon(service, node, tokens, ca_file=connection.ca_file))
        metrics_endpoint = None
        if config.metrics_addr:
            metrics_listeners = stack.enter_context(
                contextlib.closing(listen_tcp_only(config.metrics_addr))
            )
            metrics_endpoint = metrics_listeners, MetricsRole(service.metrics.format_text)
        server.serve(
            listeners,
            *roles,
            separate=metrics_endpoint,
            advice=format_advice,
            tokens=tokens,
            grace=config.grace,
            origins=config.allow_origins if isinstance(config, WorkerSettings) else None,
            on_ready=report_ready,
        )


def _join_fleet(
    service: Service, calls: LocalCalls, fleet: FleetAccess, urls: Sequence[str]
) -> Role:
    """Return the role of a worker that takes the jobs of a fleet."""
    from clowder_aimage.fleet.joined_worker import JoinedWorker, WorkerIdentity
    from clowder_aimage.fleet.link import FleetLink
    from clowder_aimage.fleet.name import WORKER, make_worker_name

    port = urls[0].rpartition(":")[2] if urls and urls[0].startswith("http") else str(os.getpid())
    name = service.settings.worker_name or make_worker_name(platform.node(), port)
    link = FleetLink(fleet, WORKER, name)
    return JoinedWorker(link, service, calls, WorkerIdentity(name, urls[0] if urls else ""))
