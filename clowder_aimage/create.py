"""create and convert: make an AImage in a store from a model, or from another AImage."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from clowder_aimage.adapter.fit import Shapes
from clowder_aimage.content import ContentStore, Lease
from clowder_aimage.dialect import DEFAULT, DIALECTS, AImage
from clowder_aimage.errors import FormatError, ModelError, NotFoundError, UsageError
from clowder_aimage.formats import controlnet, lora
from clowder_aimage.formats.detection import TRANSFORMERS
from clowder_aimage.formats.family_model import LikeModel
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.formats.shard_index import is_safetensors
from clowder_aimage.formats.stored_weights import group_weights, read_stored
from clowder_aimage.importer import (
    CreatePlan,
    PackedModel,
    Provenance,
    Recipe,
    check_config,
    make_plan,
)
from clowder_aimage.importer.blob_writer import OnWritten, pack
from clowder_aimage.importer.enhancer_plan import plan_enhancer
from clowder_aimage.importer.local_parent import ParentSearch
from clowder_aimage.importer.model_source import ModelForm, take
from clowder_aimage.importer.plan import plan_conversion
from clowder_aimage.importer.planned_layer import join_name
from clowder_aimage.importer.precision_scan import OnSurvey, survey_weights
from clowder_aimage.importer.stated_recipe import state, state_conversion
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import open_complete
from clowder_aimage.layout.stored_aimage import (
    MAX_CONFIG_SIZE,
    StoredAImage,
    read_aimage,
    read_manifest,
)
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.reference import DEFAULT_TAG
from clowder_aimage.tensor.config_fields import parse_object
from clowder_aimage.tensor.quantization_config import QuantizationConfig
from clowder_aimage.trust.lineage import Derivation, DerivationRecipe, Operation

DETECTED = ModelForm()


def create(
    store: ContentStore,
    reference: Reference,
    path: Path,
    *,
    form: ModelForm = DETECTED,
    base: Reference | None = None,
    like: Reference | None = None,
    dialect: str = DEFAULT,
    algorithm: str = "sha256",
    provenance: Provenance | None = None,
    recipe: Recipe | None = None,
    origin: Reference | None = None,
    threads: int | None = None,
    on_survey: OnSurvey = lambda _: None,
    on_surveyed: OnSurvey = lambda _: None,
    on_plan: Callable[[CreatePlan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> PackedModel:
    """Pack the model at ``path`` and name it ``reference``.

    The same model, ``form`` and ``recipe`` give the same manifest digest on every machine.
    ``algorithm`` hashes the layers and the config; the manifest always uses sha256, for registries.
    ``base`` is the model of an adapter or a ControlNet: an AImage in the store, its subject.
    ``like`` is one with the files that an image model in another layout lacks. If the recipe
    depends on values, ``on_survey`` is called with the number of bytes to scan before planning, and
    ``on_surveyed`` with the bytes of each tensor. ``origin`` is as for ``pack``.

    Raises:
        ModelError: it is not a model that can be packed, and nothing was written; or a file changed
            or values cannot be quantized, and stored blobs stay without a name, for gc.
        UsageError: the form or the recipe does not fit the model, or needs a missing package.
        FormatError: it is damaged, is quantized in an unknown way, has an adapter for another model
            or a provenance that the config's schema does not allow; nothing was written.
        NotFoundError: the base or ``like`` is not in the store.
        StoreError, NoSpaceError: the store cannot be written; complete blobs stay.
    """
    recipe = recipe or Recipe()
    recipe.check_tools()
    chosen = DIALECTS[dialect]
    with store.lease() as lease:
        if like is not None:
            form = replace(form, like=_open_like_model(store, like, lease))
        inventory = take(path, form)
        weights = {component.name: component.weights for component in inventory.components}
        shapes = {join_name(n, weight.name): weight.shape for n in weights for weight in weights[n]}
        _check(inventory, shapes, "the model")
        exact = survey_weights(weights, recipe, threads, on_survey, on_surveyed)
        subject = _resolve_subject(store, base, inventory, lease) if base else None
        make = partial(
            make_plan,
            inventory,
            chosen,
            provenance or Provenance(),
            algorithm,
            compression=form.compression,
            subject=subject,
        )
        plan = make(recipe=recipe, exact=exact)
        check_config(plan)
        on_plan(plan)

        def derive(made: AImage) -> Derivation | None:
            if not recipe.changes or not isinstance(store, ImageLayout):
                return None
            search = ParentSearch(make(), plan, recipe, exact)
            parent = search.find(store, chosen, made, threads)
            return state_conversion(parent, recipe, is_variant=False) if parent else None

        return pack(
            plan,
            store,
            lease,
            reference,
            chosen,
            threads=threads,
            on_written=on_written,
            derive=derive,
            origin=origin,
        )


def create_by_stem(store: ImageLayout, path: Path, **options: Any) -> tuple[Reference, PackedModel]:
    """Pack the model at ``path`` as ``create``; its name is that of the file.

    If another model has the name, digits of the digest follow it.
    """
    # The name until the digest is known.
    temporary = Reference(None, "unnamed", secrets.token_hex(8))
    packed = create(store, temporary, path, **options)
    descriptor = packed.descriptor
    try:
        stem = path.resolve().name if path.is_dir() else path.stem
        words = re.findall(r"[a-z0-9]+(?:[._][a-z0-9]+)*", stem.lower()[:100]) or ["model"]
        name = Reference(None, "-".join(words), DEFAULT_TAG)
        with contextlib.suppress(NotFoundError):
            # The same model again gets the same name.
            if store.resolve(name).digest != descriptor.digest:
                name = Reference(
                    None, f"{name.repository}-{descriptor.digest.encoded[:8]}", DEFAULT_TAG
                )
        store.tag(descriptor, name)
    finally:
        store.untag(temporary)
    return name, packed


def _open_like_model(store: ContentStore, reference: Reference, lease: Lease) -> LikeModel:
    """Return the model in the store that completes another one."""
    stored = open_complete(store, reference, lease)
    aimage = stored.aimage
    layers = read_stored(store, aimage, _read_quantization(store, aimage))

    def read(name: str) -> bytes:
        layer = aimage.get_layer(name)
        if layer.descriptor.size > MAX_JSON:
            raise ModelError(f"{reference}: {name} is too large for a JSON file")
        with store.open(layer.descriptor) as file:
            return file.read(layer.descriptor.size)

    family = str(aimage.properties.get("family", ""))
    return LikeModel(str(reference), family, tuple(layers), read)


def convert(
    store: ContentStore,
    reference: Reference,
    target: Reference,
    recipe: Recipe,
    *,
    is_attached: bool = False,
    threads: int | None = None,
    on_survey: OnSurvey = lambda _: None,
    on_surveyed: OnSurvey = lambda _: None,
    on_plan: Callable[[CreatePlan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> PackedModel:
    """Convert the AImage ``reference`` by ``recipe``, in its dialect, and name it ``target``.

    Unchanged layers stay the same blobs. ``create`` gives the same digest for the same weights and
    recipe, and describes the callbacks. With ``is_attached`` it is a variant of ``reference``, its
    subject, in the precision of the recipe.

    Raises:
        NotFoundError: the AImage is not in the store, or not all of it.
        UsageError: the recipe is empty, does not fit the model, or needs a package that is not
            installed; or its dialect has no variants.
        FormatError, VerificationError: a blob does not match its layer, or is damaged.
        ModelError: a value does not fit its type.
        StoreError, NoSpaceError: the store cannot be written; complete blobs stay.
    """
    if not recipe.changes:
        raise UsageError("the conversion changes nothing", remedy="nothing_to_convert")
    recipe.check_tools()
    with store.lease() as lease:
        stored = open_complete(store, reference, lease)
        if is_attached and stored.dialect.name != DEFAULT:
            raise UsageError(f"the dialect {stored.dialect.name} has no variants")
        plan = plan_convert(
            store,
            stored,
            recipe,
            is_attached=is_attached,
            threads=threads,
            on_survey=on_survey,
            on_surveyed=on_surveyed,
        )
        check_config(plan)
        on_plan(plan)
        return pack(
            plan,
            store,
            lease,
            target,
            stored.dialect,
            threads=threads,
            on_written=on_written,
            derive=lambda _: state_conversion(
                stored.descriptor.digest, recipe, is_variant=is_attached
            ),
        )


def plan_convert(
    store: ContentStore,
    stored: StoredAImage,
    recipe: Recipe,
    *,
    is_attached: bool,
    threads: int | None,
    on_survey: OnSurvey = lambda _: None,
    on_surveyed: OnSurvey = lambda _: None,
    checks_fit: bool = True,
) -> CreatePlan:
    """Return the plan of the conversion of a complete AImage. Raises as ``convert``.

    Without ``checks_fit``, values that do not fit their type are found when they are encoded.
    """
    layers = read_stored(store, stored.aimage, _read_quantization(store, stored.aimage))
    exact = survey_weights(
        group_weights(layers), recipe, threads, on_survey, on_surveyed, checks_fit=checks_fit
    )
    subject = stored.descriptor if is_attached else None
    base = subject and Descriptor(subject.media_type, subject.digest, subject.size)
    return plan_conversion(stored.aimage, layers, stored.dialect, recipe, exact, base)


def create_enhancer(
    store: ContentStore,
    base: Reference,
    target: Reference,
    weights: Reference | None = None,
    *,
    threads: int | None = None,
    on_plan: Callable[[CreatePlan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> tuple[PackedModel, tuple[str, ...]]:
    """Name ``target`` the language model that is the text encoder of ``base``.

    The blobs are those of ``base``. ``weights``, a language model or another image model with the
    same text encoder, replaces the different ones. Their names are returned.

    Raises:
        NotFoundError: An AImage is not in the store, or not all of it.
        UsageError: The last layer is damaged, also as ``plan_enhancer``.
        ModelError, FormatError: As ``plan_enhancer``.
        StoreError, NoSpaceError: The store cannot be written.
    """
    with store.lease() as lease:
        stored = open_complete(store, base, lease)
        other = None if weights is None else open_complete(store, weights, lease)
        image_model, language_model = stored.aimage, other.aimage if other else None
        enhancer = plan_enhancer(store, image_model, str(base), language_model, str(weights))
        _check_last_layer(
            store,
            language_model or image_model,
            str(weights or base),
            has_weights=bool(language_model),
        )
        check_config(enhancer.plan)
        on_plan(enhancer.plan)
        chosen = DIALECTS[DEFAULT]
        # Weights that replace nothing are not used
        digest = other.descriptor.digest if other and enhancer.replaced else None
        recipe = DerivationRecipe(Operation.EXTRACT, weights=digest)
        packed = pack(
            enhancer.plan,
            store,
            lease,
            target,
            chosen,
            threads=threads,
            on_written=on_written,
            derive=lambda _: state(stored.descriptor.digest, recipe),
        )
        return packed, enhancer.replaced


def _check_last_layer(store: ContentStore, aimage: AImage, name: str, *, has_weights: bool) -> None:
    """Raise UsageError if the last layer of a language model is damaged."""
    from clowder_aimage.model.text.last_layer import has_intact_last_layer

    component = "" if aimage.properties.get("format") == TRANSFORMERS else "text_encoder"
    if not has_intact_last_layer(store, aimage, component):
        raise UsageError(
            f"the last layer of {f'the text encoder of {name}' if component else name} is damaged, "
            "or missing",
            remedy="" if has_weights else "whole_weights",
        )


def _resolve_subject(
    store: ContentStore, base: Reference, inventory: Inventory, lease: Lease
) -> Descriptor:
    """Return the manifest of the model of an adapter or ControlNet, if they fit."""
    if "adapter" not in inventory.facts and inventory.facts.get("format") != controlnet.FORMAT:
        raise UsageError("only an adapter or a ControlNet can have a base model", remedy="base")
    descriptor = store.resolve(base)
    lease.add(descriptor.digest)
    subject = Descriptor(descriptor.media_type, descriptor.digest, descriptor.size)
    if descriptor.media_type in mediatype.INDEXES:
        return subject
    try:
        aimage = read_aimage(store, base).aimage
    except FormatError:
        # Another kind of artifact cannot be checked.
        read_manifest(store, descriptor)
        return subject
    shapes = {layer.name: layer.shape for layer in aimage.layers if layer.shape}
    _check(inventory, shapes, str(base))
    if inventory.facts.get("format") == controlnet.FORMAT:
        control_shapes = {
            layer.name: layer.shape
            for component in inventory.components
            for layer in component.weights
        }
        controlnet.check_fit(control_shapes, shapes, "the ControlNet", str(base))
    return subject


def _check(inventory: Inventory, shapes: Shapes, base: str) -> None:
    """Check that the adapters fit the tensors of ``base``. Raises FormatError."""
    configs = {
        file.path.parent: file.path for file in inventory.files if file.path.name == lora.CONFIG
    }
    # A model without shapes is of whole files, which are not inspected.
    for file in inventory.files if shapes else ():
        if file.media_type == mediatype.AIMAGE_LORA and is_safetensors(file.path):
            lora.check_fit(file.path, shapes, base, configs.get(file.path.parent))


def _read_quantization(
    store: ContentStore, aimage: AImage
) -> Callable[[str, str], tuple[str | None, int | None]]:
    """Return a function of (component, tensor) to the quantization in the configurations."""

    @cache
    def of(component: str) -> QuantizationConfig:
        config = _read_object(store, aimage, join_name(component, "config.json"))
        return QuantizationConfig(config, _read_object(store, aimage, "model_index.json"))

    return lambda component, name: of(component).of(name)


def _read_object(store: ContentStore, aimage: AImage, name: str) -> dict[str, Any]:
    """Return a JSON file of an AImage; an empty object if it is missing or too large."""
    layer = aimage.find(name)
    if layer is None or layer.descriptor.size > MAX_CONFIG_SIZE:
        return {}
    with store.open(layer.descriptor) as file:
        return parse_object(name, file.read(layer.descriptor.size))
