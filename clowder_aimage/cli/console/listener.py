"""Options and checks of the commands that serve."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clowder_aimage.cli.console.option import VerbSettings
from clowder_aimage.cli.console.output import result
from clowder_aimage.errors import UsageError

if TYPE_CHECKING:
    from clowder_aimage.engine.settings import ServerSettings
    from clowder_aimage.node.node_settings import NodeSettings
    from clowder_aimage.registry import ClientOptions

_MENDS = {errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT}  # in time, perhaps
_F = TypeVar("_F", bound=Callable[..., Any])
NODE_OPTIONS = ("desired", "prune", "high", "low", "min_age", "collect", "neighbours")
_PER_CENT = click.FloatRange(0, 100)


def spell(field: str) -> str:
    """Return the option of a field of the settings."""
    names = {"aliases": "alias", "allow_hosts": "allow-host", "neighbours": "neighbour"}
    return "--" + names.get(field, field).replace("_", "-")


def node_options(command: _F) -> _F:
    """Add the options of a node."""
    for option in reversed(
        (
            click.option(
                "--desired",
                type=click.Path(file_okay=False, path_type=Path),
                metavar="DIR",
                help="The directory of specifications of models to keep.",
            ),
            click.option(
                "--prune/--no-prune",
                default=None,
                help="Remove models that are in no specification any more. [default: keep them]",
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
                help="Time after its last use in which a model is not evicted. [default: 2m]",
            ),
            click.option(
                "--collect",
                metavar="DURATION",
                help="Interval of garbage collection. [default: 10m]",
            ),
            click.option(
                "--neighbour",
                "neighbours",
                multiple=True,
                metavar="HOST:PORT",
                help="Another node, or dns:NAME:PORT for all that a name stands for. Repeat.",
            ),
        )
    ):
        command = option(command)
    return command


def listening_options(what: str, address: str) -> Callable[[_F], _F]:
    """Return a decorator that adds the options of a server: addresses, access, shutdown and log."""

    def added(command: _F) -> _F:
        for option in reversed(_listening(what, address)):
            command = option(command)
        return command

    return added


def _listening(what: str, address: str) -> list[Callable[[_F], _F]]:
    path = click.Path(dir_okay=False, path_type=Path)
    return [
        click.option(
            "--addr",
            metavar="HOST:PORT",
            help=f"Where to listen; port 0 picks a free one. [default: {address} without --socket]",
        ),
        click.option("--socket", type=path, help="Listen on this unix socket."),
        click.option("--token-file", type=path, help="Require a token of this file."),
        click.option(
            "--allow-host",
            "allow_hosts",
            multiple=True,
            metavar="NAME",
            help=f"A host name that clients may use for this {what}. May be repeated.",
        ),
        click.option(
            "--grace",
            metavar="DURATION",
            help=f"Time for running requests when the {what} stops. [default: 30s]",
        ),
        click.option(
            "--log-format", type=click.Choice(["console", "json"]), help="[default: console]"
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="[default: info]",
        ),
    ]


@contextlib.contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Import what an extra installs. Raises UsageError: it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise UsageError(
            f"{what} needs {error.name}, which is not installed",
            hint=f"pip install 'clowder-aimage[{extra}]'",
        ) from None


def check_stores(stores: Sequence[Path]) -> None:
    """See that there can be a store at all: a server that nobody watches must not begin in vain.

    Raises:
        UsageError: one of them is no directory, or the only one is not there and cannot be made.
    """
    for store in stores:
        try:
            if not _is_directory(store) and len(stores) == 1:
                _try_to_make(store)
        except OSError as error:
            if error.errno not in _MENDS:
                raise UsageError(
                    f"{store} cannot be the store: {error.strerror or error}",
                    hint="name a directory with --store, or in AIMAGE_STORE",
                ) from None


def _is_directory(store: Path) -> bool:
    """Return whether it exists. Raises OSError: it is not a directory."""
    try:
        with os.scandir(store):
            return True
    except FileNotFoundError:
        return False
    except PermissionError:  # to be listed, not to be used
        if store.is_dir():
            return True
        raise


def _try_to_make(store: Path) -> None:
    """Make a directory where the store's first one would be made, and remove it. Raises OSError."""
    place = store.absolute()
    while not place.exists():
        place = place.parent
    Path(tempfile.mkdtemp(prefix=".aimage-", dir=place)).rmdir()


def run_server(
    said: ServerSettings, node: NodeSettings | None, chosen: VerbSettings, connection: ClientOptions
) -> None:
    """Serve as a worker, a node, or both, until interrupted."""
    from clowder_aimage.api.service import make_service
    from clowder_aimage.api.worker_role import WorkerRole
    from clowder_aimage.engine.settings import Settings as WorkerSettings
    from clowder_aimage.http.access import read_tokens
    from clowder_aimage.http.listening_socket import listen
    from clowder_aimage.http.route import Role
    from clowder_aimage.http.server import serve
    from clowder_aimage.node.daemon import Daemon

    tokens = read_tokens(said.token_file) if said.token_file else {}
    opened = listen(
        said.address,
        said.socket,
        is_default=not said.addr,
        has_tokens=bool(tokens),
        allow_hosts=said.allow_hosts,
    )
    with contextlib.closing(opened) as listeners:
        service = make_service(said, chosen.layout, connection)
        roles: list[Role] = [WorkerRole(service, makes_pictures=isinstance(said, WorkerSettings))]
        if node is not None:
            roles.insert(0, Daemon(service, node, tokens, ca_file=connection.ca_file))
        serve(
            listeners,
            *roles,
            tokens=tokens,
            grace=said.grace,
            on_ready=lambda urls: result({"urls": urls}, "\n".join(urls), as_json=chosen.as_json),
        )
