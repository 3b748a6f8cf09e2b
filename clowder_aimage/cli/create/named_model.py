"""Models of the index of names: shown, asked for, and fetched into the store."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console import column
from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.output import (
    META,
    WORDS,
    format_size,
    format_table,
    note,
    note_once,
    remark,
)
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Descriptor, Reference

if TYPE_CHECKING:
    from clowder_aimage.config.name_index import NamedModel, NameIndex, Variant
    from clowder_aimage.config.variant_offer import Offer
    from clowder_aimage.registry import ClientOptions

# Options whose values are not repeated in a message.
_SECRETS = ("-p", "--password", "-H", "--header")
_UNKNOWN = "unknown"


def find_named(
    reference: Reference, connect: Callable[[], ClientOptions], *, is_pull: bool = False
) -> NamedModel | None:
    """Return the model of the index that a name means, with the variants of its tag, or None.

    The default registry precedes the list of the package.

    Raises:
        UsageError: A list of names is not valid.
        NotFoundError: The model has no such variant, or the name resembles one of the index; with
            ``is_pull`` the latter is a UsageError.
    """
    if reference.registry is not None or reference.digest is not None:
        return None
    from clowder_aimage.config.name_index import read_index

    index = read_index()
    model = index.find(reference)
    if model is None or not model.origin:
        options = connect()
        if model is None and options.default_registry:
            return None
        if _is_in_registry(options.expand(reference), options):
            return None
    if model is None:
        _suggest(reference, index, is_pull=is_pull)
        return None
    if origin := index.clashes.get(model.name):
        note_once(
            f"warning: the name {model.name} in {origin} is ignored: it is a name of "
            f"{model.origin or 'aimage'}; names.yaml can replace it"
        )
    return model.select(reference.tag)


def is_stored(reference: Reference) -> bool:
    """Return True if the store has a name."""
    from clowder_aimage.config.variant_offer import is_stored

    return is_stored(get_settings().layout, reference)


def _is_in_registry(reference: Reference, options: ClientOptions) -> bool:
    """Return True if the default registry has a name. Raises as ``Repository.resolve``."""
    from clowder_aimage.registry import Repository

    if reference.registry is None:
        return False
    with contextlib.suppress(NotFoundError), Repository(reference, options) as repository:
        repository.resolve(reference)
        return True
    return False


def _suggest(reference: Reference, index: NameIndex, *, is_pull: bool) -> None:
    """Raise the error for an unknown name if it resembles one of the index."""
    nearest = index.find_nearest(reference.repository)
    if nearest is None:
        return
    if is_pull:
        raise UsageError(
            f"{reference} has no registry host: it names an AImage in the local store",
            hint=f"did you mean {nearest}? Otherwise use a name with a host, such as "
            f"registry.example.com/{reference}",
        )
    if not is_stored(reference):
        raise NotFoundError(
            f"{reference} not found in the store {get_settings().layout.root}",
            hint=f"did you mean {nearest}? 'aimage ls' lists the names in the store",
        )


def make_offer(reference: Reference, model: NamedModel, connection: ClientOptions) -> Offer:
    """Choose the variant that fits into the free memory. Raises as ``variant_offer.make_offer``."""
    from clowder_aimage.config import variant_offer
    from clowder_aimage.engine import machine

    memory = machine.read_available_memory() or machine.read_memory_limit()
    return variant_offer.make_offer(get_settings().layout, reference, model, connection, memory)


def show_offer(offer: Offer) -> None:
    """Print the variants of a model, and which one is chosen."""
    model, width = offer.model, column.get_width()
    head, choice = (
        column.wrap(text, width) if width else [text]
        for text in (_describe_model(model), _describe_choice(offer))
    )
    rows: list[tuple[str, ...]] = [("", "variant", "download", "in the store", "memory", "source")]
    rows += [_build_row(variant, offer) for variant in model.variants]
    note("\n".join([*head, *format_table(rows), *choice]))


def _describe_model(model: NamedModel) -> str:
    kind = f", {'an' if model.kind == 'image' else 'a'} {model.kind} model" if model.kind else ""
    text = f" ({model.description})" if model.description else ""
    origin = f", from {model.origin}" if model.origin else ""
    return f"{model.name}{text}{kind}, license: {model.license or _UNKNOWN}{origin}"


def _build_row(variant: Variant, offer: Offer) -> tuple[str, ...]:
    model = offer.model
    revision = f"@{model.revision}" if model.revision != "main" else ""
    source = str(variant.reference) if variant.reference else f"hf://{model.hub}{revision}"
    sizes = (variant.download, variant.size, variant.needed_memory)
    cells = (_UNKNOWN if size is None else format_size(size) for size in sizes)
    return ("*" if variant == offer.variant else "", variant.name, *cells, source)


def _describe_choice(offer: Offer) -> str:
    name, needed = offer.variant.name, offer.variant.needed_memory
    if offer.memory is None or needed is None:
        what = "the free memory" if offer.memory is None else f"the memory of {name}"
        text = f"{name} is chosen: {what} is unknown"
        free = "" if offer.memory is None else f", {format_size(offer.memory)} are free"
        return text + free
    fits = "fits in" if offer.fits else f"needs {format_size(needed)} and does not fit in"
    text = f"{name} {fits} the {format_size(offer.memory)} of memory that are free"
    if not offer.fits and offer.model.kind == "image":
        text += ": networks are loaded one after another, or layer by layer, which is slow"
    elif offer.fits and offer.model.kind == "image" and sys.platform != "darwin":
        text += "; PyTorch and CPUs hold weights in BF16 or F32, which may take more"
    return text


def ask(offer: Offer) -> None:
    """Show a model, and ask if it is to be fetched, unless the user has agreed.

    Raises UsageError without a terminal, and Exit with code 1 if the user declines.
    """
    show_offer(offer)
    download = offer.variant.download
    size = "an unknown size" if download is None else format_size(download)
    if get_settings().yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"fetching {offer.reference} ({size}) needs a confirmation, but there is no terminal",
            hint=f"to fetch it without asking: {_format_confirmed(offer.reference)}",
        )
    question = f"Fetch {offer.variant.name} ({size}) as {offer.reference}?"
    if not click.confirm(question, default=offer.fits is not False, err=True):
        note("nothing was fetched")
        raise click.exceptions.Exit(1)


def _format_confirmed(reference: Reference) -> str:
    """Return the command of the user with --yes."""
    context = click.get_current_context()
    words = [str(word) for word in context.meta.get(WORDS, ())]
    if not words or any(word.startswith(_SECRETS) for word in words):
        words = [str(reference)]
    store = context.meta.get(f"{META}store")
    if store and not any(word.startswith("--store") for word in words):
        words = ["--store", str(store), *words]
    return shlex.join(["aimage", str(context.info_name), "--yes", *words])


def fetch(offer: Offer, connection: ClientOptions) -> Descriptor:
    """Fetch the chosen variant and name it as asked for; return its manifest.

    Raises as ``create`` and ``pull``.
    """
    variant, reference = offer.variant, offer.reference
    if variant.reference is not None:
        return _pull(connection.expand(variant.reference), reference, connection)
    from clowder_aimage.cli.create.model_files import (
        FileOptions,
        FormOptions,
        ProvenanceOptions,
        pack,
    )
    from clowder_aimage.cli.create.result import report_packed
    from clowder_aimage.importer import Recipe

    recipe = Recipe.parse(variant.dtype, variant.quantize)
    options = FileOptions(
        recipe,
        FormOptions(None, False, None, (), (), ""),
        ProvenanceOptions(None, None, None, (), None, None),
        base=None,
        like=None,
        dialect="clowder",
        manifest_type="oci",
        algorithm="sha256",
    )
    model = offer.model
    packed, _ = pack(reference, f"hf://{model.hub}@{model.revision}", options)
    report_packed(reference, packed, recipe)
    return packed.descriptor


def _pull(source: Reference, name: Reference, connection: ClientOptions) -> Descriptor:
    from clowder_aimage.config.variant_offer import pull_as

    with Progress("pulling", source) as progress:
        layout = get_settings().layout
        descriptor = pull_as(layout, source, name, connection, progress.on_event)
    progress.summarize("pulled")
    remark(f"{source} is {name} in the store")
    return descriptor


def obtain(reference: Reference, check: Callable[[NamedModel], None]) -> Reference:
    """Return the name in the store of a model that the index has; fetch it if the user agrees.

    A name that the store has, or the index lacks, is returned as it is. ``check`` raises the errors
    of the verb before the user is asked. A declined question ends the command with exit code 1.
    """
    connect = get_settings().build_client_options
    if is_stored(reference) or (model := find_named(reference, connect)) is None:
        return reference
    from clowder_aimage.config.variant_offer import find_stored_variant

    if stored := find_stored_variant(get_settings().layout, reference, model):
        remark(f"{stored} in the store is used")
        return stored
    check(model)
    obtain_variant(reference, model, connect())
    return reference


def obtain_variant(
    reference: Reference, model: NamedModel, connection: ClientOptions
) -> Descriptor:
    """Offer a model, and fetch the chosen variant. Raises as ``ask`` and ``fetch``."""
    offer = make_offer(reference, model, connection)
    ask(offer)
    return fetch(offer, connection)
