"""create: a model, in whatever format, becomes an AImage in a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clowder_aimage.content import ContentStore, Lease
from clowder_aimage.dialect import DEFAULT, DIALECTS
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.formats import lora
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.shard_index import is_safetensors
from clowder_aimage.importer import (
    CreatePlan,
    PackedModel,
    Provenance,
    Recipe,
    check_config,
    make_plan,
)
from clowder_aimage.importer.blob_writer import OnWritten, pack
from clowder_aimage.importer.model_source import ModelForm, take
from clowder_aimage.importer.planned_layer import layer_name
from clowder_aimage.importer.precision_scan import OnSurvey, survey_weights
from clowder_aimage.layout.stored_aimage import read_aimage, read_manifest
from clowder_aimage.oci import Descriptor, Reference, mediatype

AS_FOUND = ModelForm()


def create(
    store: ContentStore,
    reference: Reference,
    path: Path,
    *,
    form: ModelForm = AS_FOUND,
    base: Reference | None = None,
    dialect: str = DEFAULT,
    algorithm: str = "sha256",
    provenance: Provenance | None = None,
    recipe: Recipe | None = None,
    jobs: int | None = None,
    on_survey: OnSurvey = lambda _: None,
    on_surveyed: OnSurvey = lambda _: None,
    on_plan: Callable[[CreatePlan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> PackedModel:
    """Pack the model at ``path`` and name it ``reference``.

    The same model, ``form`` and ``recipe`` give the same manifest digest on every machine.
    ``algorithm`` hashes the layers and the config; the manifest is always known by its sha256, for
    registries' sake. ``base`` is what an adapter belongs to: an AImage in the store, which becomes
    its subject. Where the recipe depends on values, ``on_survey`` hears how many bytes are to be
    looked at before the plan, and ``on_surveyed`` of each tensor's.

    Raises:
        ModelError: it is not a model that can be packed, and nothing was written then; or a file
            changed, or values cannot be quantized, which is seen in the middle: blobs that were
            stored stay without a name, for gc.
        UsageError: the form or the recipe does not fit the model, or needs what is not installed.
        FormatError: it is damaged, or quantized in a way that is not known, or an adapter is for
            another model, or the provenance is not what the config's schema allows; nothing was
            written.
        NotFoundError: the base is not in the store.
        StoreError, NoSpaceError: the store cannot keep it; what was stored in full stays.
    """
    recipe = recipe or Recipe()
    recipe.check_tools()
    chosen = DIALECTS[dialect]
    inventory = take(path, form)
    _check_adapters(inventory)
    weights = {component.name: component.weights for component in inventory.components}
    exact = survey_weights(weights, recipe, jobs, on_survey, on_surveyed)
    with store.lease() as lease:
        plan = make_plan(
            inventory,
            chosen,
            provenance or Provenance(),
            algorithm,
            recipe=recipe,
            exact=exact,
            compression=form.compression,
            subject=_subject(store, base, inventory, lease) if base else None,
        )
        check_config(plan)
        on_plan(plan)
        return pack(plan, store, lease, reference, chosen, jobs=jobs, on_written=on_written)


def _subject(
    store: ContentStore, base: Reference, inventory: Inventory, lease: Lease
) -> Descriptor:
    """Return the manifest of the model that an adapter belongs to, if it fits there."""
    if "adapter" not in inventory.facts:
        raise UsageError("only an adapter has a base model, and this is not one", remedy="base")
    found = store.resolve(base)
    lease.add(found.digest)
    subject = Descriptor(found.media_type, found.digest, found.size)
    if found.media_type in mediatype.INDEXES:
        return subject
    try:
        aimage = read_aimage(store, base).aimage
    except FormatError:  # another kind of artifact, which the adapter's maker knows
        read_manifest(store, found)
        return subject
    _check(inventory, {one.name: one.shape for one in aimage.layers if one.shape}, str(base))
    return subject


def _check_adapters(inventory: Inventory) -> None:
    """Hold adapters that travel with a model next to its tensors."""
    shapes = {
        layer_name(component.name, weight.name): weight.shape
        for component in inventory.components
        for weight in component.weights
    }
    _check(inventory, shapes, "the model")


def _check(inventory: Inventory, shapes: lora.Shapes, base: str) -> None:
    if not shapes:  # whole files: what is in them is their runtime's to know
        return
    for file in inventory.files:
        if file.media_type == mediatype.AIMAGE_LORA and is_safetensors(file.path):
            lora.check_fit(str(file.path), lora.read_pairs(file.path), shapes, base)
