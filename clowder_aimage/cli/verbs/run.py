"""The verb ``run``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.lora_option import is_file, lora_options
from clowder_aimage.cli.console.named_picture import check_stdin
from clowder_aimage.cli.console.option import (
    WHERE,
    connection_options,
    get_settings,
    in_section,
    parse_reference,
    parse_with,
    remote_option,
    torch_options,
    verb,
)
from clowder_aimage.cli.console.parameter_option import parameter_options
from clowder_aimage.cli.console.picture_option import picture_options
from clowder_aimage.cli.console.picture_view import choose_protocol
from clowder_aimage.cli.console.prompt_loop import (
    PromptLoop,
    check_prompt,
    list_settable_options,
    read_prompt,
    read_prompts,
)
from clowder_aimage.cli.console.pushed_picture import check_push
from clowder_aimage.cli.console.seed_option import seed_option, sheet_option
from clowder_aimage.cli.text.enhance_option import ENHANCING, enhance_options, is_enhanced
from clowder_aimage.cli.text.option import TEXT_SETTABLE, build_text_request, text_options
from clowder_aimage.cli.worker.choice import choose_worker, find_named_worker
from clowder_aimage.cli.worker.local import LocalWorker
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.cli.worker.model_argument import ModelArgument, model_argument
from clowder_aimage.cli.worker.model_kind import check_options, is_language_model
from clowder_aimage.cli.worker.picture_order import SETTABLE, PictureOrder, order_drafts
from clowder_aimage.cli.worker.text_order import TextOrder
from clowder_aimage.content import unit
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.generation.parameter import list_parameters
from clowder_aimage.generation.request import GenerateRequest, Guidance, LoraUse, Output, Sampling
from clowder_aimage.generation.size import parse_size
from clowder_aimage.model.adapter_source import OWN
from clowder_aimage.model.batch_table import parse_batch
from clowder_aimage.model.library_choice import AUTO, BACKENDS, TorchTuning
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.cli.worker.worker import Worker
    from clowder_aimage.config.name_index import NamedModel
    from clowder_aimage.engine.worker_client import WorkerClient

# Options that a worker serves too.
_SERVED = (*SETTABLE, *ENHANCING, *TEXT_SETTABLE, "push", "local")
# Parameters of the sampling that are used every day, and the others.
_COMMON = ("steps", "seed")
_RARE = tuple({parameter.name for parameter in list_parameters(Sampling)} - {*_COMMON})


def _parse_precision(text: str) -> str:
    from clowder_aimage.tensor.quantization import parse_precision

    return parse_precision(text)


def _parse_sides(text: str) -> tuple[int, ...] | None:
    return tuple(parse_size(text.lower()).values()) or None


@examples(
    "aimage run shapes two red circles",
    "aimage run shapes 'two red circles' --seed 42 --size 128x128 -o circles.png",
    "aimage run shapes two azure circles --lora examples/shapes/azure.safetensors:0.8",
    "aimage run shapes a blue square --image circles.png --mask mask.png --paste",
    "echo two red circles | aimage run shapes - -o - > circles.png",
    "aimage run shapes 'red ball, top' --enhancer enhancer",
    "aimage run qwen3 'why is the sky blue?' --max-tokens 100",
)
@verb
@model_argument
@click.argument("words", metavar="[PROMPT...]", nargs=-1)
@in_section(
    "Picture options",
    click.option(
        "--size",
        metavar="WxH",
        type=_parse_sides,
        help="Width and height, such as 1024x768.",
    ),
    parameter_options(Output, without=("previews",)),
    parameter_options(Sampling, without=_RARE),
    seed_option,
    parameter_options(Guidance),
    parameter_options(Sampling, without=_COMMON),
)
@picture_options
@in_section(
    "Adapter options",
    lora_options,
    click.option(
        "--trigger", is_flag=True, help="Add the trigger words of adapters to the prompt."
    ),
)
@enhance_options
@text_options
@in_section(
    "Output options",
    click.option(
        "-o",
        "--output",
        type=click.Path(),
        help="A file (.png, .jpg, .webp), a directory (DIR/ is made), or - for stdout."
        " [default: ./PROMPT-SEED.png]",
    ),
    sheet_option,
    click.option(
        "--show/--no-show",
        "inline",
        default=None,
        help="Show the picture in the terminal. [default: if the terminal can]",
    ),
    click.option(
        "--open/--no-open", "show", default=None, help="Open the picture in a viewer. [macOS: open]"
    ),
    click.option(
        "--mark/--no-mark",
        "is_marked",
        default=True,
        help="Say in the file that a machine made the picture. [default: yes]",
    ),
    click.option(
        "--sign/--no-sign",
        "is_signed",
        default=True,
        help="Sign the picture, if the configuration names a key. [default: yes]",
    ),
    click.option(
        "--push",
        metavar="HOST/REPO:TAG",
        callback=parse_with(parse_reference),
        help="Push the pictures too, as an artifact whose subject is the model.",
    ),
)
@in_section(
    WHERE,
    click.option("--local", is_flag=True, help="Generate in this process, not in a worker."),
    remote_option,
    click.option(
        "--memory",
        metavar="SIZE",
        callback=parse_with(unit.parse_size),
        help="Memory for this process, such as 12GiB. [default: from the machine]",
    ),
    click.option(
        "--first",
        "precision",
        metavar="TYPE",
        callback=parse_with(_parse_precision),
        help="Use a smaller variant of REF, such as int4, if the store lacks REF.",
    ),
    click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        default=AUTO,
        help="Library to compute with. [default: auto, by what is installed and the GPU]",
    ),
    click.option(
        "--dtype",
        help="Type to compute in: float32 (f32) or bfloat16 (bf16). [default: by device]",
    ),
    torch_options,
)
@connection_options
def run(
    model: ModelArgument,
    words: tuple[str, ...],
    backend: str,
    dtype: str | None,
    memory: int | None,
    precision: str | None,
    local: bool,
    remote: bool,
    is_marked: bool,
    is_signed: bool,
    **values: Any,
) -> None:
    """Generate a picture of PROMPT, or an answer to it, with the model REF.

    An image model writes a picture, whose path is printed. A language model answers on stdout.

    PROMPT may be several words; '-' reads it from stdin. Without PROMPT on a terminal, prompts are
    read line by line, and the model stays loaded; a language model remembers the conversation.

    REF is pulled first if the store lacks it; a short name such as z-image-turbo is fetched and
    packed after a question. REF may be the path of a model, which is packed into the store, under
    the name of the file. The worker that AIMAGE_HOST names generates instead,
    or the one at 127.0.0.1:11434 ('aimage serve') if it has the same AImage, or with --remote.
    """
    start = time.monotonic()
    if local and remote:
        raise UsageError("--local cannot be combined with --remote")
    _check_stdin(words, values)
    prompt = read_prompt(words)
    if prompt is not None and not is_enhanced(values):
        check_prompt(prompt)
    # wrong values of pictures, before a registry or a worker is asked for the kind of the model
    drafts = order_drafts(values, prompt or "")
    client = find_named_worker(_SERVED, is_local=local, is_remote=remote)
    check = partial(_check_named, is_local=client is None)
    reference = model.obtain(client, is_local=local, check=check)
    if values["push"] is not None:
        check_push(values["push"], prompt, reference)
    is_text = is_language_model(reference, client, local=local)
    check_options(reference, is_text=is_text)
    # Wrong options, before a load.
    if is_text:
        build_text_request(values, [{"role": "user", "content": ""}])
    tuning = TorchTuning(
        values["compile"],
        values["attention"],
        values["device"],
        values["compute"],
        reproducible=bool(values["reproducible"]),
        batch=parse_batch(values["batch"]),
    )
    options = LocalOptions(
        dtype,
        memory,
        backend,
        tuning,
        precision,
        values["lora_dir"],
        is_last=prompt is not None,
        is_marked=is_marked,
        is_signed=is_signed,
    )
    draft = None if is_text else drafts[0]
    worker = _open_worker(reference, client, draft, options, is_local=local)
    if is_text:
        _answer(TextOrder(reference, values, worker), prompt)
        return
    order = PictureOrder(values, worker, choose_protocol(values["inline"]))
    if prompt is not None:
        order.draw(drafts, start)
        return
    # The language model can have the memory first.
    if not is_enhanced(values):
        worker.prepare(draft)
    read_prompts(order.make, values, list_settable_options((*SETTABLE, *ENHANCING)))


def _check_named(model: NamedModel, *, is_local: bool) -> None:
    """Reject the options for another kind of models, before a download. Raises UsageError."""
    if model.kind:
        check_options(Reference.parse(model.name), is_text=model.kind == "text")
    if model.kind == "image" and is_local:
        with needs("running a model", "mlx"):
            from clowder_aimage import generate  # noqa: F401


def _check_stdin(words: tuple[str, ...], values: Mapping[str, Any]) -> None:
    """Reject several that read stdin: the prompt, pictures, the password. Raises UsageError."""
    sources = [("image", image) for image in values["image"]]
    sources += [(name, values[name]) for name in ("mask", "control")]
    readers = [f"--{name}" for name, source in sources if source == "-"]
    if readers and not words:
        raise UsageError("the prompt is missing", hint="aimage run REF PROMPT")
    readers += ["--password-stdin"] if get_settings().password_stdin else []
    is_typed = not words and sys.stdin is not None and sys.stdin.isatty()
    check_stdin([*(["PROMPT"] if words in ((), ("-",)) and not is_typed else []), *readers])


def _open_worker(
    reference: Reference,
    client: WorkerClient | None,
    draft: GenerateRequest | None,
    options: LocalOptions,
    *,
    is_local: bool,
) -> Worker:
    """Return the worker that generates pictures of a draft, or answers (None)."""
    uses: Sequence[LoraUse] = () if draft is None else draft.adapters.loras
    used_models = [use.model for use in uses if not use.model.startswith(OWN)]
    if draft is not None and draft.control.network is not None:
        used_models.append(draft.control.network)
    is_local = is_local or any(is_file(use.model) for use in uses)
    remote = choose_worker(reference, client, used_models, _SERVED, is_local=is_local)
    return remote or LocalWorker(reference, options)


def _answer(order: TextOrder, prompt: str | None) -> None:
    """Print the answer to a prompt, or answers in a conversation."""
    order.worker.prepare(None)
    if prompt is not None:
        order.ask(prompt)
        return
    commands = {"/clear": ("forget the conversation", order.clear)}
    text = "Type a question. The model remembers the conversation; Ctrl-C ends an answer."
    PromptLoop(text, order.ask, order.values, list_settable_options(TEXT_SETTABLE), commands).run()
