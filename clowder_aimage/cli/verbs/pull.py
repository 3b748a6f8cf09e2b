"""The verb ``pull``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    get_settings,
    parse_with,
    references_argument,
    remote_option,
    transfer_options,
    verb,
    yes_option,
)
from clowder_aimage.cli.console.output import format_count, format_size, print_result, remark
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.worker_connection import (
    connect_worker,
    list_models,
    refuse_options,
)
from clowder_aimage.cli.worker.remote_name import obtain_remotely, pull_remotely
from clowder_aimage.content import Rate
from clowder_aimage.content.platform import ManifestSelector, Platform
from clowder_aimage.dialect.selection import LayerSelection
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Reference
from clowder_aimage.oci.descriptor import to_plain

if TYPE_CHECKING:
    from clowder_aimage.pull import PullOptions, PullResult
    from clowder_aimage.registry import ClientOptions


def _parse_rate(text: str) -> int:
    from clowder_aimage.registry.host_settings import parse_rate

    return parse_rate(text)


@examples(
    f"aimage pull {NAME}",
    f"aimage pull {NAME} --component vae --limit-rate 20M",
    f"aimage pull {NAME} --dry-run",
    "aimage pull z-image-turbo:int8",
)
@verb
@references_argument(required=True)
@click.option(
    "--platform", metavar="OS/ARCH", help="From an index, choose the manifest for this platform."
)
@click.option(
    "--variant", metavar="NAME", help="From an index, choose the manifest of this variant."
)
@click.option("--whole", is_flag=True, help="Pull all manifests of an index.")
@click.option(
    "--component",
    "components",
    metavar="NAME",
    multiple=True,
    help="Only this component, and top-level files such as model_index.json. May be repeated.",
)
@click.option(
    "--include",
    "patterns",
    metavar="GLOB",
    multiple=True,
    help="Only layers whose name matches ('vae/*', '*.json'). May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be fetched, without fetching it.")
@yes_option
@remote_option
@click.option(
    "--limit-rate",
    "limit",
    callback=parse_with(_parse_rate),
    metavar="RATE",
    help="Total bytes per second, such as 500k or 20M. [default: from the configuration]",
)
@transfer_options
def pull(
    references: tuple[Reference, ...],
    platform: str | None,
    variant: str | None,
    whole: bool,
    components: tuple[str, ...],
    patterns: tuple[str, ...],
    dry_run: bool,
    remote: bool,
    limit: int | None,
) -> None:
    """Pull the AImages REF... from the registries in their names; print a digest for each.

    Every byte is verified before a blob gets its name in the store. Blobs that the store already
    has are not fetched. From an index, one AImage is pulled: the one that the options choose, else
    the one for this machine.

    With --component or --include only a part is pulled: the config, and the layers that any of
    them chooses. REF is marked as partial until a pull without them has fetched the rest.

    A short name, such as z-image-turbo, has no registry: the variant that fits into the memory, or
    that the tag names, is fetched after a question, from the Hugging Face hub or from a registry.

    With --remote a worker pulls REF into its own store. The first error ends the command.
    """
    if remote:
        for reference in references:
            _pull_remotely(reference)
        return
    from clowder_aimage.pull import PullOptions

    options = PullOptions(
        selector=_build_selector(platform, variant, whole),
        layers=_build_selection(components, patterns, whole),
        is_dry_run=dry_run,
        rate=Rate(limit) if limit else None,
    )
    chosen = get_settings()
    layout = chosen.layout
    connection = chosen.build_client_options(*(reference.registry for reference in references))
    selecting = {
        "--platform": platform,
        "--variant": variant,
        "--whole": whole,
        "--component": components,
        "--include": patterns,
        "--limit-rate": limit,
    }
    conflict = next((name for name, value in selecting.items() if value), None)
    for reference in references:
        if _pull_named(reference, connection, conflict, is_dry_run=dry_run):
            continue
        again = _format_command(reference, platform, variant)
        _pull(reference, layout, connection, options, again)


def _pull(
    reference: Reference,
    layout: ImageLayout,
    connection: ClientOptions,
    options: PullOptions,
    again: str,
) -> None:
    from clowder_aimage.pull import pull as pull_aimage

    if options.is_dry_run:
        _print_plan(pull_aimage(reference, layout, connection, options), layout)
        return
    with Progress("pulling", reference) as progress:
        options = replace(options, on_event=progress.on_event)
        pulled = pull_aimage(reference, layout, connection, options)
    progress.summarize("pulled")
    _print_result(pulled, again, progress)


def _pull_named(
    reference: Reference,
    connection: ClientOptions,
    conflict: str | None,
    *,
    is_dry_run: bool,
) -> bool:
    """Fetch a model by its short name and print its digest; return False for other names.

    ``conflict`` is an option that such a model does not accept.
    """
    if reference.registry is not None:
        return False
    from clowder_aimage.cli.create.named_model import (
        find_named,
        is_stored,
        make_offer,
        obtain_variant,
        show_offer,
    )

    model = find_named(reference, lambda: connection, is_pull=True)
    if model is None:
        return False
    if conflict:
        raise UsageError(
            f"{conflict} applies to registries; {reference} is a short name",
            hint=f"a tag chooses a variant: {reference.repository}:{model.variants[-1].name}",
        )
    if is_stored(reference):
        remark(f"{reference} is in the store already; 'aimage rm {reference}' removes it")
        descriptor = get_settings().layout.resolve(reference)
    elif is_dry_run:
        show_offer(offer := make_offer(reference, model, connection))
        value = {"reference": str(reference), "variant": offer.variant.name}
        print_result(value | {"download": offer.variant.download}, offer.variant.name)
        return True
    else:
        descriptor = obtain_variant(reference, model, connection)
    value = {"reference": str(reference), **to_plain(descriptor)}
    print_result(value, str(descriptor.digest))
    return True


def _pull_remotely(reference: Reference) -> None:
    refuse_options("omit --remote to pull into a store on this machine")
    client = connect_worker()
    name = obtain_remotely(client, reference, lambda _: None)
    if name is None:
        pull_remotely(client, name := reference)
    for model in list_models(client, "/api/tags"):
        if model["name"] == str(name) or model["digest"] == str(name.digest):
            value = {key: model[key] for key in ("digest", "size")}
            print_result({"reference": str(name), **value}, model["digest"])
            return
    raise NotFoundError(f"the worker at {client.endpoint} pulled {name}, but does not list it")


def _format_command(reference: Reference, platform: str | None, variant: str | None) -> str:
    options = {"--platform": platform, "--variant": variant}
    words = [word for option in options.items() if option[1] is not None for word in option]
    return shlex.join(["aimage", "pull", str(reference), *map(str, words)])


def _print_result(pulled: PullResult, again: str, progress: Progress) -> None:
    name, missing = pulled.name, pulled.missing
    value = {"reference": str(name), **to_plain(pulled.root)}
    if missing:
        value |= {"partial": True, "missing": _sum_blobs(missing)}
        progress.remark(
            f"{name} is partial: {format_count(len(missing), 'blob')} "
            f"({format_size(_sum_blobs(missing)['size'])}) left out; to complete it: {again}"
        )
    print_result(value, str(pulled.root.digest))


def _build_selector(
    platform: str | None, variant: str | None, is_index: bool
) -> ManifestSelector | None:
    """Return the selector for an index; None selects all of it. Raises UsageError."""
    if not is_index:
        return ManifestSelector(variant, None if platform is None else Platform.parse(platform))
    if platform is not None or variant is not None:
        raise UsageError("--whole cannot be combined with --platform or --variant")
    return None


def _build_selection(
    components: tuple[str, ...], patterns: tuple[str, ...], is_index: bool
) -> LayerSelection | None:
    if not components and not patterns:
        return None
    if is_index:
        raise UsageError(
            "--whole cannot be combined with --component or --include",
            hint="choose the AImage with --variant or --platform",
        )
    return LayerSelection(components, patterns)


def _sum_blobs(blobs: Sequence[Descriptor]) -> dict[str, int]:
    return {"blobs": len(blobs), "size": sum(blob.size for blob in blobs)}


def _print_plan(planned: PullResult, layout: ImageLayout) -> None:
    plan, left_out = planned.plan, planned.missing
    missing = plan.list_missing(layout)
    needed = sum(layout.compute_missing_size(blob) for blob in missing)
    present = sum(blob.size for blob in plan.blobs) - sum(blob.size for blob in missing)
    value = {
        "reference": str(planned.name),
        **to_plain(plan.root),
        "fetch": {"blobs": len(missing), "size": needed},
        "alreadyThere": {"blobs": len(plan.blobs) - len(missing), "size": present},
    }
    text = (
        f"{plan.root.digest}: {format_count(len(missing), 'blob')} ({format_size(needed)}) "
        f"to fetch, {len(plan.blobs) - len(missing)} ({format_size(present)}) already there"
    )
    if left_out:
        value |= {"partial": True, "missing": _sum_blobs(left_out)}
        text += f", {len(left_out)} ({format_size(_sum_blobs(left_out)['size'])}) left out"
    print_result(value, text)
