"""Text encoders of image models, as language models that enhance prompts."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from clowder_aimage.cli.console.option import explicit_options, needs, settings
from clowder_aimage.cli.console.output import plural, remark, result
from clowder_aimage.cli.console.progress import Progress, callbacks, writing
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.cli.create.result import summary, text
from clowder_aimage.create import create, create_enhancer
from clowder_aimage.errors import UsageError
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
    if conflicting := explicit_options(*allowed):
        raise UsageError(f"{conflicting[0]} cannot be combined with --enhancer")
    layout, jobs = settings().layout, settings().jobs
    with contextlib.ExitStack() as stack:
        replacement = None if weights is None else _open_weights(weights, stack)
        stack.enter_context(needs("--enhancer", "mlx"))
        progress = stack.enter_context(Progress("packing", target))
        packed, replaced = create_enhancer(
            layout, base, target, replacement, threads=jobs, **writing(progress)
        )
    value = summary(target, packed) | {"replaced": [*replaced]}
    remark(text(value, packed, Recipe()))
    if replaced:
        names = ", ".join(replaced)[:200]
        remark(f"replaced {plural(len(replaced), 'tensor')} by those of {weights}: {names}")
    result(value, str(packed.descriptor.digest))


def _open_weights(name: str, stack: contextlib.ExitStack) -> Reference:
    """Return the name of an AImage in the store; a directory gets one until the stack closes."""
    if not Path(name).is_dir():
        return stored_reference(name)
    layout = settings().layout
    reference = Reference(None, "enhancer-weights", secrets.token_hex(8), None)
    with Progress("reading", reference) as progress:
        create(layout, reference, Path(name), threads=settings().jobs, **callbacks(progress))
    stack.callback(layout.untag, reference)
    return reference
