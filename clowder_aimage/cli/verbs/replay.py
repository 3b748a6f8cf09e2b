"""The verb ``replay``."""

from __future__ import annotations

import contextlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from clowder_aimage.cli.console.option import connection_options, needs, settings, verb
from clowder_aimage.cli.console.output import note, result
from clowder_aimage.cli.verbs.run import fetch_model, load_model, render
from clowder_aimage.errors import AImageError, UsageError, VerificationError
from clowder_aimage.oci import Digest, Reference


@verb
@click.argument("picture", type=click.Path(path_type=Path))
@connection_options
def replay(picture: Path) -> int:
    """Generate PICTURE again from the facts in it, and compare the two.

    The AImage is pulled by its digest if the store lacks it. The exit code is 5 if the pictures
    differ.
    """
    with needs("running a model", "mlx"):
        import numpy as np

        from clowder_aimage.model.picture import load_picture

    pixels, facts = load_picture(picture)
    reference = _reference(picture, facts)
    request = _request(picture, facts)
    _note_registry(picture, reference)
    fetched = fetch_model(reference)
    dtype = facts.get("dtype")
    model = load_model(fetched, request, dtype=None if dtype is None else str(dtype))
    (rendered,) = render(fetched.watch(model.generate(request)), request)
    again = rendered.pixels
    if again.shape != pixels.shape:
        height, width, *_ = again.shape
        raise VerificationError(f"{picture} was resized: expected {width}x{height}")
    difference = np.abs(again.astype(np.int16) - pixels.astype(np.int16))
    largest, share = int(difference.max()), float((difference > 0).mean())
    value = {
        "picture": str(picture),
        "digest": str(model.stored.descriptor.digest),
        "equal": largest == 0,
        "largestDifference": largest,
        "differingShare": share,
    }
    text = f"differs: by up to {largest}/255, in {share:.2%} of the values"
    result(value, text if largest else "equal")
    return VerificationError.exit_code if largest else 0


def _reference(picture: Path, facts: dict[str, Any]) -> Reference:
    try:
        name = re.sub("@.*", "", str(facts["reference"]))
        return Reference.parse(name).with_digest(Digest.parse(facts["digest"]))
    except (KeyError, AImageError) as error:
        raise UsageError(f"cannot read the AImage from the facts in {picture}: {error}") from None


def _note_registry(picture: Path, reference: Reference) -> None:
    """Say which registry is asked for a missing model, unless a name in the store has its host."""
    hosts = set()
    for name, descriptor in settings().layout.tags():
        if descriptor.digest == reference.digest:
            return
        with contextlib.suppress(UsageError):
            hosts.add(Reference.parse(name).registry)
    if reference.registry is not None and reference.registry not in hosts:
        note(f"{picture} names the registry {reference.registry}, which is asked for the model")


def _request(picture: Path, facts: dict[str, Any]) -> Any:
    from clowder_aimage.model.pipeline import GenerateRequest

    names = {field.name for field in fields(GenerateRequest)} - {"n"}
    known = {key: value for key, value in facts.items() if key in names and value is not None}
    try:
        return GenerateRequest(**known)
    except TypeError as error:
        raise UsageError(f"cannot read the request from the facts in {picture}: {error}") from None
