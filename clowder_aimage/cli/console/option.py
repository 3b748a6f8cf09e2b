"""Options shared by several verbs, and their values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from clowder_aimage.cli.console.example import get_examples
from clowder_aimage.cli.console.output import (
    META,
    WORDS,
    note,
    report_limits,
    report_waits,
    report_warnings,
)
from clowder_aimage.errors import AImageError, UsageError, needs

if TYPE_CHECKING:
    from pathlib import Path

    from click.shell_completion import CompletionItem

    from clowder_aimage.cli.console.result_template import ResultTemplate
    from clowder_aimage.layout import ImageLayout
    from clowder_aimage.oci import Reference
    from clowder_aimage.registry import ClientOptions

# Seconds, in a completion.
_TAGS_TIMEOUT = 2.0
# Seconds that an unreachable collector may delay the end of a verb.
_TRACES_TIMEOUT = 2.0
_VERBOSE = "verbose"
_F = TypeVar("_F", bound=Callable[..., Any])
_Command = TypeVar("_Command", bound=click.Command)


def options(*decorators: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Return a decorator that adds options in the order of the help."""

    def add(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def parse_with(parse: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return an option's callback that parses its value; a ValueError becomes a usage error."""

    def parse_value(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return parse_value


def _check_batch(text: str) -> str:
    """Return the text of --batch. Raises ValueError."""
    from clowder_aimage.model.batch_table import parse_batch

    parse_batch(text)
    return text


device_option = click.option(
    "--device",
    metavar="NAME",
    help="Device for PyTorch: cpu, cuda, cuda:1 or mps. [default: the first GPU, else cpu]",
)
torch_options = options(
    click.option(
        "--compile",
        type=click.Choice(["never", "background", "now"]),
        help="When PyTorch compiles: never, beside the first steps, or before the model is ready. "
        "[default: background on CUDA, else never]",
    ),
    click.option(
        "--attention",
        metavar="NAME",
        help="Attention backend for PyTorch, such as flash or sage. [default: native]",
    ),
    click.option(
        "--compute",
        type=click.Choice(["fp8"]),
        help="Multiply in fp8, on NVIDIA GPUs such as Ada and Hopper (PyTorch). "
        "[default: in the type of --dtype]",
    ),
    click.option(
        "--batch",
        metavar="COUNT",
        callback=parse_with(_check_batch),
        help="Forward passes that are computed at once, for several pictures of one size: a "
        "number, off, or auto for as many as a GPU was measured to gain by (PyTorch). "
        "[default: auto]",
    ),
    click.option(
        "--reproducible",
        is_flag=True,
        default=None,
        help="Compute each picture alone and in one form, whatever else is computed.",
    ),
    device_option,
)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Store an option for the whole command line; the last occurrence takes precedence."""
    if value:
        ctx.meta[META + str(param.name)] = value


def _add_shared(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """Return an option whose value is stored in ``settings()`` and not passed to the verb."""
    return click.option(*names, callback=_remember, expose_value=False, **attributes)


def _remember_template(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    # As docker and oras spell --json.
    if value == "json":
        ctx.meta[f"{META}as_json"] = True
    elif value is not None:
        with needs("a template", "format"):
            from clowder_aimage.cli.console.result_template import ResultTemplate
        _remember(ctx, param, ResultTemplate(value))


_shared_options = options(
    _add_shared(
        "--store",
        type=click.Path(),
        # Before names in the store are looked up.
        is_eager=True,
        help="The directory of the store, an OCI image layout. [env: AIMAGE_STORE]",
    ),
    _add_shared("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option(
        "--format",
        "--template",
        "template",
        metavar="TEMPLATE",
        callback=_remember_template,
        expose_value=False,
        help="Print the result by this Jinja template, such as '{{ digest }}'; json is --json.",
    ),
    _add_shared("-q", "--quiet", is_flag=True, help="Print no progress on stderr."),
)

verbose_option = _add_shared(
    "-v", "--verbose", count=True, help="Show each request on stderr; -vv also its headers."
)


def common_options(command: _Command) -> _Command:
    """Add the options that are valid before the verb and after it, for every verb."""
    _shared_options(command)
    if not any(param.name == _VERBOSE for param in command.params):
        # A verb without requests accepts it, as it may be in an alias.
        add = click.option(
            *("-v", "--verbose", "accepts_verbose"), count=True, hidden=True, expose_value=False
        )
        add(command)
    return command


# Options of oras, crane, hf, diffusers and mflux, with their names here.
SYNONYMS = {
    "--artifact-type": "--type",
    "--cfg": "--guidance",
    "--cfg-truncation": "--guidance-end",
    "--concurrency": "--jobs",
    "--guidance-scale": "--guidance",
    "--max-workers": "--jobs",
    "--negative-prompt": "--negative",
    "--num-images": "-n",
    "--num-inference-steps": "--steps",
    "--output-dir": "--output",
    "-s": "--steps",
}

# Flags that may have a value after "=": a value after a space would be taken from the prompt.
_VALUED = {"--enhance": "--enhancer"}

# Options of other tools without an equal, with advice.
_ELSEWHERE = {
    "--artifact-type": "the type of an AImage is fixed; 'aimage attach --type' sets that of files",
    "--digests": "--no-trunc shows whole digests",
    "--oci-layout": "--store DIR uses an OCI layout in a directory",
    "--output": "'aimage export' writes the files of a model, 'aimage attach --get' those of an "
    "attachment",
    "--tls-verify": "--insecure does not verify certificates, --plain-http uses HTTP",
}


# Options of other servers for the address, in place of --addr.
_ADDRESSES = ("--address", "--bind", "--host", "--listen", "--port")
_ADDRESS_HINT = "--addr HOST:PORT sets the address and the port"

# The section of a help text for options without one, and the last section
_SECTION, _LAST_SECTION = "Options", "Registry options"
# A section of servers, which precedes these two
LOG = "Log and shutdown"


# Verbs that the policy of signatures does not stop: they list or remove content, decide about it,
# or are its publisher's, who signs what a registry has. They give out no weight.
UNCHECKED = frozenset(
    {
        *("delete", "df", "doctor", "du", "gc", "ls", "pin", "push", "referrers", "resolve"),
        *("repo ls", "rm", "sign", "tags", "trust check", "unpin"),
    }
)


class _ConnectionOption(click.Option):
    """An option of connections to registries."""

    section = _LAST_SECTION


class TextOption(click.Option):
    """An option of language models."""


class ModelParameter(click.Argument):
    """The model that a verb runs. It may be a short name, so that the verb has --yes."""


def in_section(title: str, *decorators: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Return a decorator that adds options in a section of the help."""
    add_all = options(*decorators)

    def add(function: _F) -> _F:
        present = set(map(id, _list_parameters(function)))
        function = add_all(function)
        for param in _list_parameters(function):
            if id(param) not in present:
                param.section = title
        return function

    return add


def _list_parameters(function: Any) -> list[Any]:
    """Return the parameters of a command, or of a function that will be one."""
    if isinstance(function, click.Command):
        return function.params
    return getattr(function, "__click_params__", [])


def group_records(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the options with their texts, by the sections of the help in their order."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and isinstance(param, click.Option):
            sections.setdefault(getattr(param, "section", _SECTION), []).append(record)
    for title in (LOG, _SECTION, _LAST_SECTION):
        if title in sections:
            sections[title] = sections.pop(title)
    return sections


class _Exemplified(click.Command):
    """A command with examples in its help, and its options in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, records in group_records(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if lines := get_examples(self):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in lines))


class Verb(_Exemplified):
    """A command that accepts the options of other tools under their names.

    It is a trace if it uses a registry or a worker, and warns of misspelt environment variables.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, in a span if it makes requests."""
        from clowder_aimage.config.user_directory import find_misspelt_variables

        report_warnings()
        for name, nearest in find_misspelt_variables():
            note(f"warning: unknown environment variable {name}; did you mean {nearest}?")
        if ctx.command_path.partition(" ")[2] in UNCHECKED:
            from clowder_aimage.content.gate import unchecked

            with unchecked():
                return self._invoke_traced(ctx)
        return self._invoke_traced(ctx)

    def _invoke_traced(self, ctx: click.Context) -> Any:
        has_requests = any(param.name == _VERBOSE for param in self.params)
        if not has_requests and not ctx.params.get("remote"):
            return super().invoke(ctx)
        from clowder_aimage.content import telemetry

        start_traces(_TRACES_TIMEOUT)
        with telemetry.start_span(ctx.command_path):
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = tuple(args)
        names = {name for param in self.params for name in param.opts}
        words = list(args)
        for index, word in enumerate(words):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if equals and _VALUED.get(name) in names:
                words[index] = f"{_VALUED[name]}={value}"
            if name not in names and SYNONYMS.get(name) in names:
                synonym = SYNONYMS[name]
                # A short option takes its value without "=": -n4.
                words[index] = f"{synonym}{equals if synonym[:2] == '--' else ''}{value}"
        try:
            return super().parse_args(ctx, words)
        except click.NoSuchOption as error:
            name = {"-o": "--output"}.get(error.option_name, error.option_name)
            is_address = name in _ADDRESSES and "--addr" in names
            hint = _ADDRESS_HINT if is_address else _ELSEWHERE.get(name)
            if hint is None:
                raise
            raise UsageError(f"no such option '{error.option_name}'", hint=hint) from None


class VerbGroup(_Exemplified, click.Group):
    """A group of verbs."""

    command_class = Verb


def verb(function: Callable[..., Any]) -> click.Command:
    """Return a command with the common options, without the names that it uses itself."""
    command = click.command(cls=Verb)(function)
    if any(isinstance(param, ModelParameter) for param in command.params):
        yes_option(command)
    used_names = {name for param in command.params for name in param.opts}
    common_options(command)
    for param in command.params:
        if param.name == "template":
            param.opts = [name for name in param.opts if name not in used_names]
    return command


def _add_connection(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    return _add_shared(*names, cls=_ConnectionOption, **attributes)


_pem_file = click.Path(exists=True, dir_okay=False)

# The options of daemons: these connect to many registries.
daemon_connection_options = options(
    _add_connection(
        "--plain-http", is_flag=True, help="Use HTTP instead of HTTPS. [default for loopback hosts]"
    ),
    _add_connection(
        "--insecure",
        is_flag=True,
        help="Accept any TLS certificate of the registry; the connection can be intercepted.",
    ),
    _add_connection("--ca-file", type=_pem_file, help="Trust the certificates in this PEM file."),
)

remote_option = click.option(
    "--remote",
    is_flag=True,
    is_eager=True,
    help="Use the worker in AIMAGE_HOST. [default: 127.0.0.1:11434]",
)

login_connection_options = options(
    daemon_connection_options,
    _add_connection("--cert-file", type=_pem_file, help="Present this client certificate (PEM)."),
    _add_connection(
        "--key-file",
        type=_pem_file,
        help="The key of the certificate. [default: in the certificate's file]",
    ),
    _add_connection(
        "-H",
        "--header",
        "headers",
        multiple=True,
        metavar="'NAME: VALUE'",
        help="Send this header with each request. May be repeated.",
    ),
    _add_connection(
        "--resolve",
        multiple=True,
        metavar="HOST:PORT:ADDRESS",
        help="Connect to ADDRESS when HOST:PORT is requested. May be repeated.",
    ),
    verbose_option,
)

connection_options = options(
    _add_connection(
        "-u", "--username", help="Log in with this username instead of the stored credentials."
    ),
    _add_connection(
        "-p",
        "--password",
        help="The password; other users of this machine can see it, so prefer --password-stdin.",
    ),
    _add_connection("--password-stdin", is_flag=True, help="Read the password from stdin."),
    login_connection_options,
)


def parse_reference(text: str) -> Reference:
    """Parse the name of an AImage. Raises UsageError."""
    from clowder_aimage.oci import Reference

    try:
        return Reference.parse(text)
    except UsageError:
        if not text.startswith(("./", "../", "/", "~/")):
            raise
        message = f"{text} is a path, where the name of an AImage is expected"
        raise UsageError(message, remedy="pack_path", path=text) from None


def parse_annotation(text: str) -> tuple[str, str]:
    """Return the parts of ``KEY=VALUE``. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"invalid --annotation {text!r}: expected KEY=VALUE")
    return key, value


def tag_reference(text: str) -> Reference:
    """Parse the name for a new tag. Raises UsageError if it has a digest."""
    reference = parse_reference(text)
    if reference.digest is not None:
        raise UsageError(f"{text} names a digest: a tag is needed", hint="omit the @DIGEST")
    return reference


def complete_name(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names in the store, and the tags of a repository in a registry."""
    from click.shell_completion import CompletionItem

    names: set[str] = set()
    # A message would appear in the line that is being completed.
    with ctx, contextlib.suppress(AImageError, OSError):
        chosen = get_settings()
        if any(root.is_dir() for root in chosen.stores):
            names.update(name for name, _ in chosen.layout.list_tags())
        if ":" in incomplete.rpartition("/")[2] and "/" in incomplete:
            names.update(_list_tags(incomplete.rpartition(":")[0]))
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def complete_path(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _list_tags(repository: str) -> list[str]:
    """Return the tags of a repository with its name; empty if they do not arrive in time."""
    from clowder_aimage.oci import Reference
    from clowder_aimage.registry import Repository, is_generated

    reference = Reference.parse(repository)
    if reference.registry is None:
        return []
    connection, names = get_settings().build_client_options(), list[str]()

    def fetch() -> None:
        with contextlib.suppress(AImageError), Repository(reference, connection) as remote:
            tags = [tag for tag in remote.list_tag_names() if not is_generated(tag)]
            names.extend(f"{reference.name}:{tag}" for tag in tags)

    # A registry that does not answer must not block the shell.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(_TAGS_TIMEOUT)
    return names


reference_argument = click.argument(
    "reference", metavar="REF", type=parse_reference, shell_complete=complete_name
)

jobs_option = _add_shared(
    "--jobs",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Number of concurrent layers. [default: 8, or from the configuration]",
)

# The section of the verbs that run models
WHERE = "Where it runs"

yes_option = in_section(
    WHERE,
    _add_shared(
        "-y", "--yes", is_flag=True, help="Fetch a model by its short name without asking."
    ),
)

output_option = click.option(
    "-o",
    "--output",
    "file",
    default="-",
    metavar="FILE",
    help="The file to write; - is stdout. [default: -]",
)

transfer_options = options(jobs_option, connection_options)


def references_argument(*, required: bool) -> Callable[[_F], _F]:
    """Return an argument for any number of names."""
    metavar = "REF..." if required else "[REF...]"
    return click.argument(
        "references",
        metavar=metavar,
        nargs=-1,
        required=required,
        type=parse_reference,
        shell_complete=complete_name,
    )


def list_explicit_options(*exclude: str) -> list[str]:
    """Return the verb's options on the command line, except those of these names."""
    context = click.get_current_context()
    return [
        max(option.opts, key=len)
        for option in context.command.params
        if isinstance(option, click.Option)
        and not option.hidden
        and option.name not in exclude
        and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]


def start_traces(seconds: float | None = None) -> None:
    """Record traces if the environment names a collector; warn if the extra is missing.

    ``seconds`` is the time for sending them.
    """
    from clowder_aimage import __version__
    from clowder_aimage.cli.console.output import note
    from clowder_aimage.cli.console.remedy import format_advice
    from clowder_aimage.content import telemetry

    if telemetry.is_enabled():
        try:
            with needs("OpenTelemetry", "otel"):
                telemetry.start(version=__version__, seconds=seconds)
        except UsageError as error:
            note(f"warning: {error.message}; no traces are sent\n  {format_advice(error)}")


class VerbSettings(NamedTuple):
    """The values of the shared options."""

    store: Path | None = None
    as_json: bool = False
    template: ResultTemplate | None = None
    quiet: bool = False
    jobs: int | None = None
    yes: bool = False
    plain_http: bool = False
    insecure: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    headers: tuple[str, ...] = ()
    resolve: tuple[str, ...] = ()
    username: str | None = None
    password: str | None = None
    password_stdin: bool = False
    verbose: int = 0

    @property
    def stores(self) -> tuple[Path, ...]:
        """The directories of the store: the first is written. Raises UsageError without any."""
        from clowder_aimage.config.user_directory import list_default_stores

        return (self.store,) if self.store else list_default_stores()

    @property
    def layout(self) -> ImageLayout:
        from clowder_aimage.layout import ImageLayout, LayeredStore

        report_waits()
        root, *more_roots = stores = self.stores
        report_limits(stores)
        return LayeredStore(stores) if more_roots else ImageLayout(root)

    @property
    def has_connection(self) -> bool:
        """Return True if a connection option is given."""
        # The fields from plain_http on are those of connections; the last one is for all verbs.
        return any(self[VerbSettings._fields.index("plain_http") : -1])

    def build_client_options(self, *registries: str | None) -> ClientOptions:
        """Return the client options from the command line and the environment.

        ``registries`` are those that the verb connects to, if there may be several.

        Raises:
            UsageError: the options contradict each other, secrets would be sent to several
                registries, or AIMAGE_CONFIG names no file.
        """
        from clowder_aimage.cli.console import connection
        from clowder_aimage.config.user_directory import read_client_options

        if self.plain_http and (self.insecure or self.ca_file or self.cert_file):
            raise UsageError(
                "--plain-http cannot be combined with --insecure, --ca-file or --cert-file"
            )
        if self.insecure:
            note("warning: TLS certificate not verified; the connection can be intercepted")
        return read_client_options(
            plain_http=self.plain_http or None,
            insecure=self.insecure,
            ca_file=self.ca_file,
            connections_override=self.jobs or 0,
            **connection.build_options(
                registries,
                username=self.username,
                password=self.password,
                password_stdin=self.password_stdin,
                headers=self.headers,
                resolve=self.resolve,
                cert_file=self.cert_file,
                key_file=self.key_file,
                verbose=self.verbose,
            ),
        )

    def build_server_options(self) -> ClientOptions:
        """Return the client options of a server: it logs the warnings that a verb prints."""
        from dataclasses import replace

        from clowder_aimage.registry.credential_trace import WarningLog

        return replace(self.build_client_options(), on_credential=WarningLog())


def get_settings() -> VerbSettings:
    """Return the shared options, given before the verb or after it."""
    from pathlib import Path

    meta = click.get_current_context().meta
    stated = {key.removeprefix(META): meta[key] for key in meta if key.startswith(META)}
    store = stated.pop("store", None)
    return VerbSettings(Path(store) if store else None, **stated)
