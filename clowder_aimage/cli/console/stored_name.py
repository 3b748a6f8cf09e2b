"""Arguments for AImages in the store: names, the first digits of a digest, paths of models."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import complete_name, get_settings, parse_reference
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.console.progress import Progress, build_callbacks
from clowder_aimage.errors import ModelError, NotFoundError, UsageError
from clowder_aimage.oci import Digest, Reference

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient

_SUFFIXES = (".safetensors", ".gguf")
_RUNNABLE = ("diffusers", "image-model", "transformers", "gguf")
_PREFIX = re.compile(r"(sha256:|sha512:)?[0-9a-f]{4,128}")


def resolve_reference(text: str) -> Reference:
    """Parse the name of an AImage in the store, or return the first name of a digest.

    A name in the store takes precedence. Raises UsageError: several digests begin with ``text``.
    """
    reference, match = _find(text)
    if match is None:
        return reference
    digest, names = match
    return names[0] if names else Reference(None, digest.short, None, digest)


def resolve_unique_name(text: str) -> Reference:
    """Parse a name in the store, or return the only name of a digest.

    Raises UsageError: it has several, or none.
    """
    reference, match = _find(text)
    if match is None:
        return reference
    digest, names = match
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{digest.short} has no name in the store")
    listed = ", ".join(map(str, names))
    raise UsageError(f"{digest.short} has several names: {listed}", hint="use one of them")


def _find(text: str) -> tuple[Reference, tuple[Digest, list[Reference]] | None]:
    """Return the parsed text and, if it begins a digest in the store, that with its names."""
    reference = parse_reference(text)
    # --remote is eager: it is parsed before names.
    is_remote = click.get_current_context().params.get("remote")
    if is_remote or _PREFIX.fullmatch(text) is None:
        return reference, None
    layout, matches = get_settings().layout, dict[Digest, list[Reference]]()
    with contextlib.suppress(NotFoundError):
        layout.resolve(reference)
        return reference, None
    for name, descriptor in layout.iter_entries():
        if str(descriptor.digest).startswith(text) or descriptor.digest.encoded.startswith(text):
            names = matches.setdefault(descriptor.digest, [])
            # The digest has no name, or a name of another tool.
            with contextlib.suppress(UsageError):
                names.append(parse_reference(name))
    if len(matches) > 1:
        listed = (
            f"{digest.short} ({', '.join(map(str, match_names))})"
            for digest, match_names in matches.items()
        )
        raise UsageError(
            f"several digests begin with {text}: {', '.join(sorted(listed))}",
            hint="use more digits, or a name",
        )
    return reference, next(
        ((digest, sorted(match_names, key=str)) for digest, match_names in matches.items()), None
    )


def resolve_model_or_path(text: str) -> Reference | Path:
    """Parse the name of a model, or the path of one: a directory, or a file with its suffix.

    Names in the store take precedence, and those of a worker. Raises UsageError, NotFoundError.
    """
    path = Path(text)
    is_model = path.suffix.lower() in _SUFFIXES or os.sep in text
    is_path = path.is_dir() or (is_model and path.is_file())
    # --remote is eager: it is parsed before names.
    is_remote = click.get_current_context().params.get("remote")
    has_worker = bool(is_remote or os.environ.get("AIMAGE_HOST"))
    # A worker elsewhere has its own names.
    try:
        reference = (parse_reference if has_worker else resolve_reference)(text)
    except UsageError:
        if is_path:
            return path
        if text.startswith(("./", "../", "/")):
            raise NotFoundError(f"{text} does not exist") from None
        raise
    if not is_path or has_worker or reference.registry is not None:
        return reference
    with contextlib.suppress(NotFoundError):
        get_settings().layout.resolve(reference)
        return reference
    return path


def pack_path(path: Path, client: WorkerClient | None) -> Reference:
    """Pack a model under the name of its file, and return that.

    Raises:
        UsageError: A worker (``client``) is to run it: a worker has its own models.
        ModelError: It cannot be run, or packed; the others of ``create``.
    """
    from clowder_aimage.cli.console.left_out_text import describe_left_out
    from clowder_aimage.create import create_by_stem
    from clowder_aimage.formats.detection import detect
    from clowder_aimage.formats.family_weights import has_gguf_transformer

    pack = f"aimage create NAME {path}"
    if client is not None:
        raise UsageError(
            f"{path} is a path of this machine, and the worker at {client.endpoint} has models "
            "of its own",
            hint=f"run it here with --local, or pack it for the worker: {pack}",
        )
    kind = detect(path)
    if kind == "lora":
        raise ModelError(
            f"{path} is an adapter, not a model", remedy="use_adapter", reference=str(path)
        )
    if kind not in _RUNNABLE:
        raise ModelError(
            f"{path} is a model that cannot be run ({kind})", hint=f"to pack it: {pack}"
        )
    if kind == "gguf" and has_gguf_transformer(path):
        raise ModelError(
            f"{path} is a transformer alone, without the other parts of an image model",
            hint=f"a complete model in the store can complete it: {pack} --like REF",
        )
    with Progress("packing") as progress:
        reference, packed = create_by_stem(get_settings().layout, path, **build_callbacks(progress))
    remark(
        f"{path} is packed as {reference}: 'aimage run {reference}' runs it again, "
        f"'aimage rm {reference}' removes it"
    )
    for line in describe_left_out(packed.left_out):
        remark(line)
    return reference


def stored_argument(
    name: str = "reference",
    metavar: str | None = "REF",
    parse: Callable[[str], object] = resolve_reference,
    **attributes: Any,
) -> Callable[[Any], Any]:
    """Return an argument for an AImage in the store, or with ``nargs`` -1 for several."""
    return click.argument(
        name, metavar=metavar, type=parse, shell_complete=complete_name, **attributes
    )


def stored_arguments(
    *, required: bool, parse: Callable[[str], Reference] = resolve_reference
) -> Callable[[Any], Any]:
    """Return an argument for any number of AImages in the store."""
    metavar = "REF..." if required else "[REF...]"
    return stored_argument("references", metavar, parse, nargs=-1, required=required)
