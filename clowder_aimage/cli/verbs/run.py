"""The verb ``run``."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.adapter_source import OWN, find_control
from clowder_aimage.cli.console.later_model import LaterModel
from clowder_aimage.cli.console.lora_option import (
    adapter_finder,
    is_file,
    lora_options,
    offer,
    to_worker,
    with_tags,
)
from clowder_aimage.cli.console.option import (
    connection_options,
    needs,
    parse_reference,
    parsed,
    remote_option,
    settings,
    verb,
)
from clowder_aimage.cli.console.output import (
    is_quiet,
    is_verbose,
    note,
    plural,
    remark,
    result,
    size,
    wants_json,
    wants_value,
)
from clowder_aimage.cli.console.picture_file import PictureOutput
from clowder_aimage.cli.console.picture_option import (
    input_pictures,
    picture_options,
    picture_parameters,
    to_request,
)
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.prompt_loop import read_prompts
from clowder_aimage.cli.console.remote_worker import (
    RemotePicture,
    default_worker,
    local_options,
    pictures,
    prefers_worker,
    refuse_options,
    worker,
    worker_host,
)
from clowder_aimage.cli.console.seed_option import seed_options, seed_runs
from clowder_aimage.cli.console.stored_name import stored_argument, stored_reference
from clowder_aimage.content.unit import parse_size
from clowder_aimage.errors import AImageError, NotFoundError, UsageError
from clowder_aimage.model.pipeline import (
    PARAMETERS,
    GenerateRequest,
    LoraUse,
    check_parameters,
    ignored_image,
)
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.adapter_source import AdapterFinder
    from clowder_aimage.engine.worker_client import WorkerClient
    from clowder_aimage.generate import FetchedAImage, RunnableModel
    from clowder_aimage.model.pipeline import Image, PipelineEvent
    from clowder_aimage.registry import ClientOptions

_OPTIONS = tuple(name for name in PARAMETERS if name != "prompt")
_OUTPUT = ("seeds", "sheet", "count", "output", "show", "inline")
_SETTABLE = (*_OPTIONS, "trigger", "size", *_OUTPUT)  # between prompts
_MAX_PROMPT = 1 << 20  # bytes of stdin
# Options, prompt, seed, number, format, and a function that is called before the first picture
_Render = Callable[
    [Mapping[str, Any], int, str, Callable[[str], None]], Generator[RemotePicture, None, None]
]


def _model(text: str) -> Reference:
    """Parse the name of a model. Raises UsageError, for a directory with advice."""
    try:  # a worker elsewhere has its own names, also with --remote
        return (parse_reference if os.environ.get("AIMAGE_HOST") else stored_reference)(text)
    except UsageError:
        if not Path(text).is_dir():
            raise
        raise UsageError(
            f"{text} is a directory, not the name of an AImage", hint=_pack(text)
        ) from None


def _pack(directory: str) -> str:
    return f"to run a directory, pack it first: aimage create NAME {directory}"


def _precision(text: str) -> str:
    from clowder_aimage.tensor.quantization import parse_precision

    return parse_precision(text)


def _sides(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})[xX]([0-9]{1,5})", text, re.ASCII)
    if found is None:
        raise ValueError(f"expected WIDTHxHEIGHT, such as 1024x768, not {text!r}")
    return int(found[1]), int(found[2])


# The value of an option is None if it was not given; the AImage has the default.


@verb
@stored_argument(parse=_model)
@click.argument("words", metavar="[PROMPT...]", nargs=-1)
@click.option(
    "--size", metavar="WxH", callback=parsed(_sides), help="Width and height, such as 1024x768."
)
@click.option(
    "--width", type=int, help="Pixels, for most models a multiple of 16. [default: the model's]"
)
@click.option(
    "--height", type=int, help="Pixels, for most models a multiple of 16. [default: the model's]"
)
@click.option("--steps", type=int, help="Denoising steps. [default: 8]")
@seed_options
@click.option("--negative", metavar="TEXT", help="What to avoid; requires --guidance.")
@click.option("--guidance", type=float, help="Guidance scale (CFG). [default: 0]")
@click.option("--guidance-end", type=float, help="Part of the way that is guided. [default: 1]")
@click.option(
    "--cfg-normalization",
    type=float,
    help="Longest guided step, in unguided ones; 0 for no limit. [default: 0]",
)
@click.option("--shift", type=float, help="Shift of the noise schedule. [default: the model's]")
@click.option("--cache-threshold", type=float, help="Skip steps that change less. [default: 0]")
@picture_options
@lora_options
@click.option("--trigger", is_flag=True, help="Add the trigger words of adapters to the prompt.")
@click.option(
    "--dtype", help="Type to compute in: float32 (f32) or bfloat16 (bf16). [default: by device]"
)
@click.option(
    "-n",
    "count",
    type=int,
    default=1,
    show_default=True,
    help="Number of pictures, with increasing seeds.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="A file (.png, .jpg, .webp), a directory (DIR/ is made), or - for stdout."
    " [default: ./PROMPT-SEED.png]",
)
@click.option(
    "--push",
    metavar="HOST/REPO:TAG",
    callback=parsed(parse_reference),
    help="Push the pictures too, as an artifact whose subject is the model.",
)
@click.option(
    "--open/--no-open", "show", default=None, help="Open the picture in a viewer. [macOS: open]"
)
@click.option(
    "--show/--no-show",
    "inline",
    default=None,
    help="Draw the picture in the terminal. [default: if it can]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=parsed(parse_size),
    help="Memory for this process, such as 12GiB. [default: from the machine]",
)
@click.option(
    "--first",
    "precision",
    metavar="TYPE",
    callback=parsed(_precision),
    help="Use a smaller variant of REF, such as int4, if the store lacks REF.",
)
@click.option("--local", is_flag=True, help="Generate in this process, not in a worker.")
@remote_option
@connection_options
def run(
    reference: Reference,
    words: tuple[str, ...],
    dtype: str | None,
    memory: int | None,
    precision: str | None,
    local: bool,
    remote: bool,
    **values: Any,
) -> None:
    """Generate a picture of PROMPT with the model REF; print the path of the file.

    PROMPT may be several words; '-' reads it from stdin. Without PROMPT on a terminal, prompts are
    read line by line, and the model stays loaded.

    REF is pulled first if the store lacks it. The worker that AIMAGE_HOST names generates the
    picture instead, or the one at 127.0.0.1:11434 ('aimage serve') if it has the same AImage, or
    with --remote.
    """
    begun = time.monotonic()
    prompt = _read_prompt(words)
    _check_push(values["push"], prompt, reference)
    first = _check(values, prompt or "") | {"n": values["count"]}
    is_last = prompt is not None and len(_runs(values)) == 1
    load = partial(load_model, dtype=dtype, memory=memory, is_last=is_last)
    here = partial(_here, reference, load, precision, first, values["lora_dir"])
    here_only = [name for name in ("control", "expand", "upscale") if first.get(name)]
    if here_only and remote:
        raise UsageError(f"--{here_only[0]} is not sent to a worker", hint="omit --remote")
    is_here = bool(here_only) or any(is_file(use.model) for use in first["loras"])
    local = local or (not remote and is_here)
    render = _renderer(reference, here, local, remote, first["loras"])
    order = _Order(values, render, _protocol(values["inline"]))
    if prompt is not None:
        order.make(prompt, begun)
        return
    command = click.get_current_context().command
    options = {
        max(option.opts, key=len).lstrip("-"): option
        for option in command.params
        if isinstance(option, click.Option) and option.name in _SETTABLE
    }
    read_prompts(order.make, values, options)


def _read_prompt(words: tuple[str, ...]) -> str | None:
    """Return the prompt in the arguments or on stdin; None for a terminal. Raises UsageError."""
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not words and has_terminal:
        if not sys.stdout.isatty():
            raise UsageError("the prompt is missing", hint="aimage run REF PROMPT")
        return None
    prompt = " ".join(words)
    if words in ((), ("-",)):
        prompt = _standard_input()
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint="aimage run REF PROMPT")
    return prompt


def _check_push(target: Reference | None, prompt: str | None, model: Reference) -> None:
    """Reject a name to which the pictures cannot be pushed, before they are generated."""
    if target is None:
        return
    from clowder_aimage.pictures.picture_artifact import check_target

    if prompt is None:
        raise UsageError("--push requires PROMPT: each prompt would replace the last pictures")
    check_target(target, _connection(model, target))


def _connection(*names: Reference) -> ClientOptions:
    """Return the options for the registries of names. Raises UsageError."""
    return settings().connection(*dict.fromkeys(filter(None, (one.registry for one in names))))


def _standard_input() -> str:
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    if len(data) > _MAX_PROMPT:
        raise UsageError(f"the prompt on stdin exceeds {_MAX_PROMPT} bytes")
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not valid UTF-8 text") from None


def _check(values: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Return the parameters of pictures of a prompt. Raises UsageError, StoreError."""
    output = PictureOutput(values["output"])
    if values["negative"] is not None and not values["guidance"]:
        raise UsageError("--negative requires --guidance above 0", hint="try --guidance 4")
    if output.is_stdout and (wants_value() or values["show"]):
        option = "--open" if not wants_value() else "--json" if wants_json() else "--format"
        raise UsageError(f"{option} cannot be combined with -o -")
    runs = _runs(values)
    pictures = sum(count for _, count in runs)
    output.check(pictures)
    if values["sheet"]:
        if output.is_stdout:
            raise UsageError("--sheet cannot be combined with -o -")
        with needs("making a sheet", "mlx"):
            import PIL  # noqa: F401 (before pictures are generated)
    parameters = {name: values[name] for name in _OPTIONS}
    text, loras = with_tags(prompt, values["loras"], values["lora_dir"])
    parameters |= {"prompt": text, "loras": loras}
    if values["size"] is not None:
        if parameters["width"] is not None or parameters["height"] is not None:
            raise UsageError("--size cannot be combined with --width or --height")
        parameters["width"], parameters["height"] = values["size"]
    has_size = parameters["width"] is not None or parameters["height"] is not None
    parameters |= picture_parameters(values, has_size=has_size)
    given = {name: value for name, value in parameters.items() if value is not None}
    for seed, count in runs:
        check_parameters(GenerateRequest(**given | {"seed": seed or 0}, n=count))
    return parameters


def _runs(values: Mapping[str, Any]) -> list[tuple[int | None, int]]:
    """Return the first seed and the number of pictures of each run. Raises UsageError."""
    return seed_runs(values["seed"], values["seeds"] or (), values["count"])


def _protocol(is_shown: bool | None) -> str:
    """Return the protocol for pictures in the terminal; empty if none are drawn."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and sys.stderr.isatty()
    if is_shown is False or not is_terminal or wants_value() or is_quiet():
        return ""
    from clowder_aimage.cli.console.terminal_picture import find_protocol

    return find_protocol(os.environ)


@dataclass(frozen=True, slots=True)
class _Order:
    """The options of pictures, which may change between prompts."""

    values: dict[str, Any]
    render: _Render
    protocol: str  # for pictures in the terminal

    def make(self, prompt: str, begun: float | None = None) -> tuple[str, ...]:
        """Generate, write and print the pictures of a prompt; return their paths."""
        begun = time.monotonic() if begun is None else begun
        options, runs = _check(self.values, prompt), _runs(self.values)
        options["trigger"] = self.values["trigger"]
        output, count = PictureOutput(self.values["output"]), sum(each for _, each in runs)
        written, facts = list[dict[str, Any]](), dict[str, Any]()
        kept: list[RemotePicture] = []
        for picture in self._pictures(options, runs, output.kind):
            path = output.write(picture.data, options["prompt"], picture.seed, len(written), count)
            facts = facts or {**picture.facts}
            if path is not None:
                written.append({"path": str(path), "seed": picture.seed})
                self._show(path)
            if self.values["sheet"] or self.values["push"]:
                kept.append(picture)
        paths = [str(each["path"]) for each in written]
        if self.values["sheet"]:
            from clowder_aimage.model.picture import contact_sheet

            sheet = contact_sheet([(one.seed, one.data) for one in kept])
            path = output.write_sheet(sheet, options["prompt"])
            facts["sheet"] = str(path)
            paths.append(str(path))
        if not output.is_stdout and self.values["inline"] is not False:
            for name in paths:
                self._draw(Path(name))
        value, lines = facts | {"pictures": written}, paths
        if self.values["push"]:
            pushed = self._push(kept, output.kind)
            value, lines = value | {"pushed": pushed}, [*paths, pushed["reference"]]
        if not output.is_stdout:
            result(value, lines)
        remark(f"{plural(count, 'picture')} in {time.monotonic() - begun:.1f} s")
        return tuple(paths)

    def _pictures(
        self, options: dict[str, Any], runs: list[tuple[int | None, int]], kind: str
    ) -> Iterator[RemotePicture]:
        """Yield the pictures of runs of seeds; say the seed that is drawn, and the place once."""
        is_first = True

        def announce(text: str) -> None:
            nonlocal is_first
            if seed is None:
                note(f"seed {options['seed']}")
            if is_first:
                remark(text)
            is_first = False

        for seed, count in runs:
            options["seed"] = secrets.randbits(32) if seed is None else seed
            with contextlib.closing(self.render(options, count, kind, announce)) as made:
                yield from made

    def _push(self, made: list[RemotePicture], kind: str) -> dict[str, str]:
        """Push the pictures as one artifact; return its name and digest."""
        from clowder_aimage.pictures.picture_artifact import MadePicture, push_pictures

        target: Reference = self.values["push"]
        model = Reference.parse(str(made[0].facts["reference"])) if made[0].facts else target
        connection = _connection(model, target)
        pictures = [MadePicture(one.data, one.seed, kind, one.facts) for one in made]
        with Progress("pushing", target) as progress:
            on_event, layout = progress.on_event, settings().layout
            sent = push_pictures(pictures, target, layout, connection, on_event=on_event)
        progress.summarize("pushed")
        digest = str(sent.digest)
        return {"reference": f"{connection.expand(target)}@{digest}", "digest": digest}

    def _draw(self, path: Path) -> None:
        """Draw a picture in the terminal."""
        if not self.protocol:
            if self.values["inline"]:
                remark("warning: the output is not a terminal that can show pictures")
            return
        from clowder_aimage.cli.console.terminal_picture import escape_picture

        with contextlib.suppress(OSError, ImportError):  # the picture has been written
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(escape_picture(path.read_bytes(), self.protocol, columns or 80))
            sys.stderr.flush()

    def _show(self, path: Path) -> None:
        show = self.values["show"]
        if show if show is not None else (sys.platform == "darwin" and sys.stdout.isatty()):
            click.launch(str(path))


def _renderer(
    reference: Reference,
    here: Callable[[], _Render],
    local: bool,
    remote: bool,
    loras: Iterable[LoraUse],
) -> _Render:
    """Return the function that generates pictures: in a worker, or in this process by ``here``."""
    if local and remote:
        raise UsageError("--local cannot be combined with --remote")
    but = (*_SETTABLE, "push", "local")
    if remote or (not local and worker_host()):
        other = "omit --remote" if remote else "use --local"
        refuse_options(f"omit it, or {other} to generate the picture in this process", but=but)
        client = worker()
        return partial(_by_worker, client, reference, f"worker at {client.endpoint}")
    names = (use.model for use in loras if not use.model.startswith(OWN))
    if (
        not local
        and not local_options(*but)
        and (found := default_worker(reference, map(parse_reference, names)))
    ):
        client, has_same = found
        if has_same or prefers_worker():
            place = f"worker at {client.endpoint}; --local generates in this process"
            return partial(_by_worker, client, reference, place)
        if not wants_value():
            where = f"a worker is running at {client.endpoint}"
            remark(f"{where}; --remote generates the picture there")
    return here()


def _here(
    reference: Reference,
    load: Callable[..., RunnableModel],
    precision: str | None,
    first: Mapping[str, Any],
    lora_dir: Path | None,
) -> _Render:
    """Return a function that generates pictures in this process; load the model by ``load``.

    ``first`` has the parameters of the first request, checked before the model is loaded.
    """
    connect = cache(settings().connection)
    with needs("running a model", "mlx"):
        finder = adapter_finder(lora_dir, connect)
    for use in first["loras"]:  # before the model, which is larger
        if not use.model.startswith(OWN):
            finder.find(use)
    if first.get("controlnet") is not None:
        find_control(first["controlnet"], finder.open_stored)
    try:
        used = _variant(reference, precision, connect) if precision else reference
        fetched = fetch_model(used, connect)
    except NotFoundError as error:
        if reference.registry is None and Path(reference.repository).is_dir():
            error.hint, error.remedy = _pack(f"./{reference.repository}"), ""
        raise
    model = _LocalModel(reference, partial(load, finder=finder), first, connect, fetched, finder)
    model.load(fetched)
    if not first["prompt"]:  # prompts are typed below the bar
        fetched.end()
    if used != reference and not first["prompt"]:
        model.later = LaterModel(reference, settings().layout, connect(), str(precision))
    return model.generate


@dataclass(slots=True)
class _LocalModel:
    """A model in this process; ``later`` replaces it between two requests."""

    reference: Reference
    load_model: Callable[..., RunnableModel]
    first: Mapping[str, Any]
    connect: Callable[[], ClientOptions]
    fetched: FetchedModel
    finder: AdapterFinder
    later: LaterModel | None = None
    _loaded: list[RunnableModel] = field(default_factory=list)

    def load(self, fetched: FetchedModel) -> None:
        """Load a model for the parameters ``first`` and others."""
        aimage = fetched.found.stored.aimage
        weights = sum(layer.descriptor.size for layer in aimage.layers if layer.is_tensor)
        fetched.progress.remark(f"loading {size(weights)}")
        request = GenerateRequest.for_model(aimage, **self.first)
        check_parameters(request)  # the steps may be the model's
        _warn(request)
        self._loaded = [self.load_model(fetched, request)]
        self.fetched = fetched

    def generate(
        self, options: Mapping[str, Any], count: int, kind: str, announce: Callable[[str], None]
    ) -> Generator[RemotePicture, None, None]:
        from clowder_aimage import adapter_source
        from clowder_aimage.cli.console.installation import install_command
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.model.backend import SLOW
        from clowder_aimage.model.picture import encode_picture

        if self.later is not None and self.later.is_done:
            self._replace(self.later)
        if not self._loaded:  # the load was interrupted
            self.load(self.fetched)
        (model,) = self._loaded
        given = {name: value for name, value in options.items() if name != "trigger"}
        request = GenerateRequest.for_model(model.stored.aimage, **given, n=count)
        found = self.finder.find_all(request, model.stored.aimage)
        pairs = adapter_source.own_adapters(self.fetched.found.files, model.stored.aimage)
        packed = [adapter for adapter, _ in pairs]
        request = adapter_source.resolve(request, found, packed, adds_words=options["trigger"])
        offer(adapter_source.missing(request.prompt, [*packed, *found]))
        input_pictures().keep(request.image, request.mask, request.control)
        events = model.generate(request)
        facts = describe_picture(self.reference, model, request)
        with contextlib.closing(events):
            begun = self.fetched.watch(events)
            announce(f"rendering on {model.backend}")
            if model.backend == SLOW:
                remark("warning: this takes many times longer than with OpenBLAS; to install it:")
                remark(f"  {install_command('mlx')}")
            for picture in render(begun, request):
                own = facts | {"seed": picture.seed}
                data = encode_picture(picture.pixels, own, kind)
                yield RemotePicture(data, picture.seed, picture.picture, own)

    def _replace(self, later: LaterModel) -> None:
        """Load the AImage itself in place of its variant, or say why it cannot be used."""
        try:
            later.end()
            wanted = fetch_model(self.reference, self.connect)
            self._loaded = []  # the memory is free before the load
            self.load(wanted)
        except AImageError as error:
            message = f"{self.reference} cannot be used instead of its variant: {error.message}"
            note(f"warning: {message}")
        else:
            note(f"{self.reference} has been pulled and is used instead of its variant")
        self.later = None


def _warn(request: GenerateRequest) -> None:
    """Say if the image of a request has no effect."""
    if reason := ignored_image(request):
        note(f"warning: {reason}")


def _variant(
    reference: Reference, precision: str, connect: Callable[[], ClientOptions]
) -> Reference:
    """Return the variant of an AImage that the store lacks, else ``reference``."""
    from clowder_aimage.layout.completeness import check_stored
    from clowder_aimage.layout.stored_aimage import read_aimage
    from clowder_aimage.variant import find_variant

    if reference.digest is not None:
        raise UsageError("--first cannot be combined with a digest, which names one AImage")
    layout = settings().layout
    with contextlib.suppress(NotFoundError):
        if check_stored(layout, read_aimage(layout, reference)).is_complete:
            return reference
    if connect().expand(reference).registry is None:
        return reference
    found = find_variant(reference, connect(), precision)
    if found is None:
        remark(f"{reference} has no variant {precision}: it is used itself")
        return reference
    remark(f"the store lacks {reference}: its variant {precision} is used")
    return found


def _by_worker(
    client: WorkerClient,
    reference: Reference,
    place: str,
    options: Mapping[str, Any],
    count: int,
    kind: str,
    announce: Callable[[str], None],
) -> Generator[RemotePicture, None, None]:
    """Generate the pictures in a worker."""
    # png_facts: so that it can be replayed
    if options["steps"] is not None:  # else the worker's model has them
        known = {name: options[name] for name in PARAMETERS if options[name] is not None}
        _warn(GenerateRequest(**known))
    sent = {**options, "png_facts": True, "output_format": kind}
    sent |= {name: options[name] or None for name in ("fine", "paste", "crop")}
    prompt = None if options["trigger"] else options["prompt"]
    sent["loras"] = to_worker(client, options["loras"], prompt) or None
    sent["trigger"] = options["trigger"] or None
    sent |= to_request(options)
    yield from pictures(
        client,
        reference,
        sent,
        count,
        on_accepted=lambda: announce(f"rendering on the {place}"),
    )


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """An AImage that may still be arriving, and the bar of its pull."""

    found: FetchedAImage
    progress: Progress
    bar: contextlib.ExitStack

    def watch(self, events: Iterator[PipelineEvent]) -> Iterator[PipelineEvent]:
        """Return the events, once the first one is there if the model is still arriving."""
        first = [next(events)] if self.found.is_arriving else []
        self.bar.close()
        return chain(first, events)

    def end(self) -> None:
        """Wait until the AImage is in the store. Raises as ``pull``."""
        self.found.end()
        self.bar.close()


def fetch_model(
    reference: Reference, connect: Callable[[], ClientOptions] | None = None
) -> FetchedModel:
    """Return an AImage, pulled where the store lacks it; the lease is held until the verb ends.

    A pull may still be running; it is stopped when the verb ends.

    Raises:
        UsageError: The extra [mlx] is not installed.
    """
    with needs("running a model", "mlx"):
        from clowder_aimage import generate
    chosen = settings()
    layout, connect = chosen.layout, connect or cache(chosen.connection)
    if chosen.has_connection:  # refuse invalid options at once
        connect()
    context, progress = click.get_current_context(), Progress("pulling", reference)
    bar = context.with_resource(contextlib.ExitStack())
    bar.enter_context(progress)
    lease = context.with_resource(layout.lease())
    fetching = generate.fetch(layout, reference, connect, lease, on_event=progress.on_event)
    return FetchedModel(context.with_resource(fetching), progress, bar)


def load_model(
    fetched: FetchedModel,
    request: GenerateRequest,
    *,
    dtype: str | None,
    memory: int | None = None,
    is_last: bool = True,
    finder: AdapterFinder | None = None,
) -> RunnableModel:
    """Load a model for ``request``, and for others unless it is the last one.

    ``memory`` limits this process; None for all the memory of the machine.
    """
    from clowder_aimage import generate
    from clowder_aimage.engine import machine
    from clowder_aimage.model.memory_budget import AUTO, device_memory

    found = fetched.found
    place = found.files, found.stored
    model = generate.load(*place, dtype=dtype, request=request, end=found.end, finder=finder)
    total = device_memory() or machine.memory()
    is_last = is_last and not request.upscale  # each tile uses all networks
    model.pipeline.set_memory(AUTO, memory or total, total, limit=memory, is_last=is_last)
    model.pipeline.check(request)
    plan = model.preload(request)
    if is_verbose():
        note(f"memory: {plan}")
    return model


def render(events: Iterable[PipelineEvent], request: GenerateRequest) -> Iterator[Image]:
    """Yield the pictures of a run as they are completed; show a bar of its steps."""
    from clowder_aimage.model.pipeline import Image, Step

    with Progress("rendering", unit="steps") as progress:
        progress.begin(request.steps * request.n)
        for event in events:
            if isinstance(event, Image):
                progress.rename("rendering")
                yield event
                continue
            if isinstance(event, Step) and (event.index, event.picture) == (1, 0):
                progress.begin(event.total * request.n)  # fewer with an image, more in tiles
            progress.advance(1)
            if isinstance(event, Step) and event.index == event.total:
                progress.rename("decoding")
