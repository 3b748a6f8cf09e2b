"""The verb ``replay``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.lora_option import (
    create_adapter_finder,
    is_file,
    lora_options,
    read_uses,
)
from clowder_aimage.cli.console.named_picture import (
    check_stdin,
    create_input_source,
    get_named_pictures,
)
from clowder_aimage.cli.console.option import (
    connection_options,
    device_option,
    get_settings,
    options,
    verb,
)
from clowder_aimage.cli.console.output import format_count, note, print_result
from clowder_aimage.cli.worker.local_model import (
    FetchedModel,
    LocalOptions,
    fetch_model,
    load_model,
    show_steps,
)
from clowder_aimage.content.store import ContentStore
from clowder_aimage.errors import AImageError, NotFoundError, UsageError, VerificationError, needs
from clowder_aimage.generation.request import ALPHA, GenerateRequest, LoraUse
from clowder_aimage.model.adapter_source import OWN
from clowder_aimage.model.library_choice import (
    BACKENDS,
    NEVER,
    NOW,
    TORCH,
    TorchTuning,
    choose_library,
    parse_backend,
    parse_compute,
)
from clowder_aimage.model.rounding import COMPILED, MIXED, Rounding
from clowder_aimage.oci import Descriptor, Digest, Reference

if TYPE_CHECKING:
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.model.picture import StoredPicture
    from clowder_aimage.registry import ClientOptions


replay_options = options(
    click.option(
        "--image",
        "images",
        metavar="SOURCE",
        multiple=True,
        help="A picture that PICTURE began with, or that was edited.",
    ),
    click.option("--mask", metavar="SOURCE", help="The mask of PICTURE."),
    click.option("--control", metavar="SOURCE", help="The picture that guided PICTURE."),
    lora_options,
    click.option(
        "--backend",
        type=click.Choice(BACKENDS),
        help="Library to compute with. [default: that of PICTURE, if it is installed]",
    ),
    device_option,
    click.option(
        "--tolerance",
        type=click.IntRange(0, 255),
        default=0,
        help="Largest difference of a value, in 1/255, at which pictures count as equal. "
        "[default: 0]",
    ),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a replay: its value as JSON, and in words."""

    is_equal: bool
    value: dict[str, Any]
    text: str


@examples("aimage replay circles.png")
@verb
@click.argument("picture")
@replay_options
@connection_options
def replay(picture: str, **values: Any) -> int:
    """Generate PICTURE again from the metadata in it, and compare the two.

    PICTURE is a PNG, JPEG or WebP file, or oci://HOST/REPO:TAG[#TITLE]. Its input pictures are read
    from the store, else --image, --mask and --control name them as for 'aimage run'; their digests
    must be those in PICTURE.

    The AImage and its adapters are pulled by their digests if the store lacks them. --lora names
    other adapters, with the strengths of those in the picture unless it has its own. The exit code
    is 5 if the pictures differ by more than the tolerance, for JPEG and WebP by more than these
    formats lose. Another library or device rounds differently: pictures may differ a little.
    """
    with needs("running a model", "mlx"):
        read = _read(picture)
    comparison = replay_picture(picture, read, **values)
    print_result(comparison.value, comparison.text)
    return 0 if comparison.is_equal else VerificationError.exit_code


def replay_picture(
    picture: str,
    read: StoredPicture,
    *,
    images: tuple[str, ...],
    mask: str | None,
    control: str | None,
    loras: tuple[str, ...],
    lora_dir: Path | None,
    backend: str | None,
    device: str | None,
    tolerance: int,
    may_pull: bool = True,
) -> Comparison:
    """Generate a picture again, and compare; ``picture`` names it. The others are options.

    Raises:
        UsageError: Its metadata are not those of a request, or the options do not fit them.
        VerificationError: It was resized, or an input has another digest.
        NotFoundError: The store lacks an input; or the AImage or an adapter, which may not be
            pulled.
    """
    with needs("running a model", "mlx"):
        from clowder_aimage.model.picture import compare_pictures

    metadata = read.metadata
    reference = _parse_reference(picture, metadata)
    request = _request(picture, metadata)
    if may_pull:
        _note_registry(picture, reference)
    request = _replace_adapters(request, read_uses(loras, lora_dir))
    _find_inputs(
        picture,
        request,
        {"image": images, "mask": _wrap_source(mask), "control": _wrap_source(control)},
    )
    connect = cache(get_settings().build_client_options if may_pull else _refuse_pull)
    finder = create_adapter_finder(lora_dir, connect)
    for use in request.adapters.loras:
        is_own = use.model.startswith(OWN)
        is_named = may_pull and not is_own and not is_file(use.model, lora_dir)
        if use.digest is not None and is_named:
            name = Reference.parse(use.model)
            _note_registry(picture, name.with_digest(Digest.parse(use.digest)))
    # Before the model, which is larger.
    finder.fetch(request)
    made = Rounding.read(metadata)
    # The library that made the picture rounds in the same way.
    made_with = str(metadata.get("backend", ""))
    backend = backend or parse_backend(made_with)
    compute = parse_compute(made_with) if backend == TORCH else None
    tuning = TorchTuning(device=device, compute=compute, batch=1)
    backend = choose_library(backend, tuning)
    fetched = fetch_model(reference, connect)
    dtype = metadata.get("dtype")
    dtype = None if dtype is None else str(dtype)
    options = LocalOptions(dtype, backend=backend, tuning=tuning)
    model = _load_as_made(made, fetched, request, options, finder)
    (rendered,) = show_steps(fetched.watch(model.generate(request)), request)
    kind, quality = read.kind, metadata.get("quality")
    comparison = compare_pictures(read.pixels, rendered.pixels, kind, quality)
    if comparison is None:
        height, width, *_ = rendered.pixels.shape
        raise VerificationError(f"{picture} was resized: expected {width}x{height}")
    is_equal = comparison.is_equal or comparison.largest <= tolerance
    again = Rounding(model.backend, rendered.forward, model.dtype, rendered.batch)
    expected = made.compute_bound(again)
    value = {
        "picture": picture,
        "digest": str(model.stored.descriptor.digest),
        "equal": is_equal,
        "backend": model.backend,
        "madeWith": metadata.get("backend"),
        "expectedDifference": expected,
        "largestDifference": comparison.largest,
        "meanDifference": comparison.mean,
        "differingShare": comparison.share,
    }
    text = f"differs: by up to {comparison.largest}/255, in {comparison.share:.2%} of the values"
    if comparison.is_equal:
        words = f" within the losses of {kind.upper()}: by {comparison.mean:.2f}/255 on average"
        text = f"equal{words if comparison.largest else ''}"
    elif is_equal:
        text = f"equal within {tolerance}/255: {text.removeprefix('differs: ')}"
    if comparison.largest and expected:
        text += f"; it was made on {made}, and again on {again}, which may differ by {expected}/255"
        if not is_equal and comparison.largest <= expected:
            text += f": --tolerance {expected} accepts it"
    return Comparison(is_equal, value, text)


def _refuse_pull() -> ClientOptions:
    """Raise NotFoundError, in place of a connection to a registry."""
    raise NotFoundError(
        "the store lacks the model of the picture, or an adapter", hint="--pull fetches it"
    )


def _load_as_made(
    made: Rounding,
    fetched: FetchedModel,
    request: GenerateRequest,
    options: LocalOptions,
    finder: AdapterFinder,
) -> RunnableModel:
    """Load the model in the form in which the picture was computed, if this machine can."""
    if options.backend != TORCH or made.forward == MIXED:
        return load_model(fetched, request, options, finder)
    compiled, eager = (
        replace(options, tuning=replace(options.tuning, compile=mode)) for mode in (NOW, NEVER)
    )
    if made.forward == COMPILED:
        try:
            return load_model(fetched, request, compiled, finder)
        except UsageError as error:
            note(f"the picture was made with compiled layers; {error.message}")
    return load_model(fetched, request, eager, finder)


def _read(picture: str) -> StoredPicture:
    """Return a picture of a file or of an artifact, with its metadata."""
    from clowder_aimage.model.picture import build_metadata_error, read_picture
    from clowder_aimage.model.picture_file import read_file

    data, stated = b"", dict[str, Any]()
    if picture.lower().startswith("oci://"):
        data, stated = create_input_source().read_made(picture)
    else:
        data = read_file(Path(picture))
    read = read_picture(data, picture)
    if not (stated or read.metadata):
        raise build_metadata_error(picture)
    file_metadata = {name: read.metadata[name] for name in ("quality",) if name in read.metadata}
    return replace(read, metadata={**stated, **file_metadata} if stated else read.metadata)


def _wrap_source(source: str | None) -> tuple[str, ...]:
    return () if source is None else (source,)


def _find_inputs(
    picture: str, request: GenerateRequest, sources_by_option: dict[str, tuple[str, ...]]
) -> None:
    """Lease the pictures that a request begins with, stated ones or those in the store.

    Raises:
        UsageError: A picture is stated, and the request has none.
        VerificationError: A stated picture has another digest.
        NotFoundError: A picture is neither stated nor in the store.
    """
    check_stdin(
        [
            f"--{name}"
            for name, sources in sources_by_option.items()
            for source in sources
            if source == "-"
        ]
    )
    files, layout, missing = get_named_pictures(), get_settings().layout, list[tuple[str, str]]()
    lease = click.get_current_context().with_resource(layout.lease())
    for name, sources in sources_by_option.items():
        digests = [
            request.collect_values()[name],
            *(request.input.references if name == "image" else ()),
        ]
        digests = [digest for digest in dict.fromkeys(digests) if digest not in (None, ALPHA)]
        if sources and not digests:
            raise UsageError(f"--{name}: {picture} was made without one")
        for source in sources:
            source_digest = str(files.read(source, f"--{name}").descriptor.digest)
            if source_digest not in digests:
                raise VerificationError(
                    f"--{name}: {source[:200]} is not the {name} that was used: it has the digest "
                    f"{source_digest}, not {' or '.join(digests)}"
                )
            files.keep(source_digest)
        for digest in digests:
            lease.add(Digest.parse(digest))
            missing += [] if _is_stored(layout, digest) else [(name, digest)]
    if missing:
        role = {"control": "control picture"}
        missing_inputs = (f"the {role.get(name, name)} {digest}" for name, digest in missing)
        options = " and ".join(f"--{name} SOURCE" for name, _ in missing)
        them = "them" if missing[1:] else "it"
        raise NotFoundError(
            f"{picture} began with pictures that the store lacks: {' and '.join(missing_inputs)}",
            hint=f"name {them} with {options}: a file, a URL or an artifact",
        )


def _is_stored(layout: ContentStore, digest: str) -> bool:
    try:
        return layout.find_path(Descriptor("", Digest.parse(digest), 0)).exists()
    except NotFoundError:
        return False


def _replace_adapters(request: GenerateRequest, uses: Sequence[LoraUse]) -> GenerateRequest:
    """Return a request with other adapters. Raises UsageError."""
    if not uses:
        return request
    if len(uses) != len(request.adapters.loras):
        count = format_count(len(request.adapters.loras), "adapter")
        raise UsageError(f"the picture has {count}, and --lora is given {len(uses)} times")
    pairs = zip(uses, request.adapters.loras, strict=True)
    loras = (
        use if use.strength is not None else replace(use, strength=old.strength)
        for use, old in pairs
    )
    return request.change(loras=tuple(loras))


def _parse_reference(picture: str, metadata: dict[str, Any]) -> Reference:
    try:
        name = re.sub("@.*", "", str(metadata["reference"]))
        return Reference.parse(name).with_digest(Digest.parse(metadata["digest"]))
    except (KeyError, AImageError) as error:
        raise UsageError(
            f"cannot read the AImage from the metadata in {picture}: {error}"
        ) from None


def _note_registry(picture: str, reference: Reference) -> None:
    """Print the registry of a missing model, unless a name in the store has its host."""
    hosts = set()
    for name, descriptor in get_settings().layout.list_tags():
        if descriptor.digest == reference.digest:
            return
        with contextlib.suppress(UsageError):
            hosts.add(Reference.parse(name).registry)
    if reference.registry is not None and reference.registry not in hosts:
        note(f"{picture} names the registry {reference.registry}, which is asked for the model")


def _request(picture: str, metadata: dict[str, Any]) -> GenerateRequest:
    try:
        return GenerateRequest.of_metadata(metadata)
    except (TypeError, UsageError) as error:
        raise UsageError(
            f"cannot read the request from the metadata in {picture}: {error}"
        ) from None
