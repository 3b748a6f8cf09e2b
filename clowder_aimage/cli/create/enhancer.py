"""Text encoders of image models, as language models that enhance prompts."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from clowder_aimage.cli.console.option import get_settings, list_explicit_options
from clowder_aimage.cli.console.output import format_count, print_result, remark
from clowder_aimage.cli.console.progress import Progress, build_callbacks, build_write_callbacks
from clowder_aimage.cli.console.stored_name import resolve_reference
from clowder_aimage.cli.create.result import encode_result, format_result
from clowder_aimage.create import create, create_enhancer
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.importer import Recipe
from clowder_aimage.oci import Reference


def pack_enhancer(
    target: Reference, base: Reference | None, weights: str | None, *, is_enhancer: bool
) -> None:
    """Pack the text encoder of ``base`` as a language model. Raises as ``create_enhancer``.

    ``weights`` is a directory or an AImage with tensors that differ.
    """
    if not is_enhancer:
        raise UsageError("--weights requires --enhancer")
    if base is None:
        raise UsageError("--enhancer requires --from")
    allowed = ("from_", "enhancer", "weights", "store", "jobs", "as_json", "template", "quiet")
    if conflicting := list_explicit_options(*allowed):
        raise UsageError(f"{conflicting[0]} cannot be combined with --enhancer")
    layout, jobs = get_settings().layout, get_settings().jobs
    with contextlib.ExitStack() as stack:
        replacement = None if weights is None else _open_weights(weights, stack)
        stack.enter_context(needs("--enhancer", "mlx"))
        progress = stack.enter_context(Progress("packing", target))
        packed, replaced = create_enhancer(
            layout, base, target, replacement, threads=jobs, **build_write_callbacks(progress)
        )
    value = encode_result(target, packed) | {"replaced": [*replaced]}
    remark(format_result(value, packed, Recipe()))
    if replaced:
        names = ", ".join(replaced)[:200]
        remark(f"replaced {format_count(len(replaced), 'tensor')} by those of {weights}: {names}")
    print_result(value, str(packed.descriptor.digest))


def _open_weights(name: str, stack: contextlib.ExitStack) -> Reference:
    """Return the name of an AImage in the store; a directory gets one until the stack closes."""
    if not Path(name).is_dir():
        return resolve_reference(name)
    layout = get_settings().layout
    reference = Reference(None, "enhancer-weights", secrets.token_hex(8), None)
    with Progress("reading", reference) as progress:
        create(
            layout, reference, Path(name), threads=get_settings().jobs, **build_callbacks(progress)
        )
    stack.callback(layout.untag, reference)
    return reference
