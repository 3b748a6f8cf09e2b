"""Files of a model: of a directory, or of the Hugging Face hub."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from clowder_aimage import __version__
from clowder_aimage.cli.console.base_repository import advise_repository
from clowder_aimage.cli.console.option import get_settings, parse_annotation
from clowder_aimage.cli.console.output import format_count, format_size, note, remark
from clowder_aimage.cli.console.progress import Progress, build_callbacks
from clowder_aimage.cli.create.result import print_packed
from clowder_aimage.create import create
from clowder_aimage.errors import UsageError
from clowder_aimage.formats.family_weights import has_gguf_transformer
from clowder_aimage.importer import PackedModel, Provenance, Recipe
from clowder_aimage.importer.hub_model import HubModel, HubName, find_model
from clowder_aimage.importer.model_source import ExtraFile, ModelForm, parse_adapter
from clowder_aimage.importer.request_default import build_request_defaults
from clowder_aimage.oci import Reference


@dataclass(frozen=True, slots=True)
class FormOptions:
    """The options about the format and the parts of a model, as on the command line."""

    format_: str | None
    whole_files: bool
    compress: str | None
    adapters: tuple[str, ...]
    layers: tuple[str, ...]
    variant: str

    def parse(self) -> ModelForm:
        """Return the form. Raises UsageError."""
        return ModelForm(
            self.format_,
            self.whole_files,
            self.compress or "",
            tuple(map(parse_adapter, self.adapters)),
            tuple(map(ExtraFile.parse, self.layers)),
            self.variant,
        )


@dataclass(frozen=True, slots=True)
class ProvenanceOptions:
    """The options about properties that files do not state, as on the command line."""

    license_: str | None
    source: str | None
    created: str | None
    annotations: tuple[str, ...]
    steps: int | None
    guidance: float | None

    def parse(self) -> Provenance:
        """Return the provenance. Raises UsageError."""
        return Provenance(
            self.license_,
            self.source,
            _parse_time(self.created),
            dict(map(parse_annotation, self.annotations)),
            build_request_defaults(self.steps, self.guidance),
        )


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The options for files of a model."""

    recipe: Recipe
    form: FormOptions
    provenance: ProvenanceOptions
    base: Reference | None
    like: Reference | None
    dialect: str
    manifest_type: str
    algorithm: str


def pack_files(reference: Reference, path: str, options: FileOptions) -> None:
    """Pack the model at ``path`` and print the result. Raises as ``create``."""
    packed, directory = pack(reference, path, options)
    print_packed(reference, packed, options.recipe)
    if options.base is not None:
        advise_repository(reference, is_pushed=False)
    from clowder_aimage.model.stored_ability import find_ability

    ability = find_ability(get_settings().layout, packed.descriptor.digest, packed.aimage)
    is_gguf = packed.aimage.properties.get("format") == "gguf"
    if is_gguf and has_gguf_transformer(directory):
        remark(
            "the file has a transformer only and cannot be run: --like REF adds other components"
        )
    elif fault := ability.find_fault():
        note(f"warning: the model is packed, but cannot run here: {fault}")


def pack(reference: Reference, path: str, options: FileOptions) -> tuple[PackedModel, Path]:
    """Pack the model at ``path``, here or on the Hugging Face hub; return it with its path here.

    Raises as ``create``.
    """
    is_custom = options.manifest_type == "custom"
    if is_custom and options.dialect != "clowder":
        raise UsageError("--manifest-type custom requires --dialect clowder")
    form, provenance = options.form.parse(), options.provenance.parse()
    hub_model = _fetch(path, form)
    directory = Path(path) if hub_model is None else hub_model.path
    origin = None if hub_model is None else hub_model.source
    with Progress("packing", reference) as progress:
        packed = create(
            get_settings().layout,
            reference,
            directory,
            form=replace(form, is_chosen=hub_model is not None),
            base=options.base,
            like=options.like,
            dialect="custom" if is_custom else options.dialect,
            algorithm=options.algorithm,
            provenance=replace(provenance, source=provenance.source or origin),
            recipe=options.recipe,
            origin=None if hub_model is None else hub_model.name.origin,
            threads=get_settings().jobs,
            **build_callbacks(progress),
        )
    if hub_model is not None:
        left_out = {*packed.left_out, *hub_model.left_out}
        packed = replace(packed, left_out=tuple(sorted(left_out)))
    return packed, directory


def _fetch(path: str, form: ModelForm) -> HubModel | None:
    """Return a model of the Hugging Face hub, fetched if need be; None for a path."""
    name = HubName.parse(path)
    if name is None:
        return None
    with Progress("fetching") as progress:

        def begin(plan: HubModel) -> None:
            progress.remark(
                f"fetching {name}: {format_count(plan.files, 'file')}, {format_size(plan.size)}"
            )
            progress.begin(plan.size)

        model = find_model(name, form, __version__, begin, progress.advance)
    remark(f"{name} is {model.source}, in {model.snapshot}")
    return model


def _parse_time(text: str | None) -> str | None:
    """Return the creation time, by default SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    if text is None:
        return _read_epoch()
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise UsageError(f"invalid --created {text!r}: expected a time like 2026-01-31T12:00:00Z")
    return _format_time(time.astimezone(UTC))


def _read_epoch() -> str | None:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if not epoch:
        return None
    try:
        return _format_time(datetime.fromtimestamp(int(epoch), UTC))
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"invalid SOURCE_DATE_EPOCH {epoch!r}: expected seconds") from None


def _format_time(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
