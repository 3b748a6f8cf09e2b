"""convert: an AImage in a store becomes another one, with other types of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from clowder_aimage.content import ContentStore
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.formats.stored_weights import read_stored, weights_of
from clowder_aimage.importer import CreatePlan, PackedModel, Recipe, check_config
from clowder_aimage.importer.blob_writer import OnWritten, pack
from clowder_aimage.importer.create_plan import plan_conversion
from clowder_aimage.importer.planned_layer import layer_name
from clowder_aimage.importer.precision_scan import OnSurvey, survey_weights
from clowder_aimage.layout.completeness import require_complete
from clowder_aimage.layout.stored_aimage import hold, inflate, read_aimage
from clowder_aimage.oci import Reference
from clowder_aimage.tensor.config_fields import parse_object
from clowder_aimage.tensor.quantization_config import QuantizationConfig

_LARGEST = 16 * 1024 * 1024  # bytes of a configuration


def convert(
    store: ContentStore,
    reference: Reference,
    target: Reference,
    recipe: Recipe,
    *,
    jobs: int | None = None,
    on_survey: OnSurvey = lambda _: None,
    on_surveyed: OnSurvey = lambda _: None,
    on_plan: Callable[[CreatePlan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> PackedModel:
    """Convert the AImage ``reference`` as ``recipe`` asks, in its dialect, and name it ``target``.

    Layers in which nothing changes are the same blobs in both. ``create`` gives the same digest
    from the same weights with the same recipe, and describes the callbacks.

    Raises:
        NotFoundError: the AImage is not in the store, or not all of it.
        UsageError: the recipe asks for nothing, does not fit the model, or needs what is not
            installed.
        FormatError, VerificationError: a blob is not what its layer says, or damaged.
        ModelError: a value does not fit its type.
        StoreError, NoSpaceError: the store cannot keep it; what was stored in full stays.
    """
    if not recipe.changes:
        raise UsageError("the conversion changes nothing", remedy="nothing_to_convert")
    recipe.check_tools()
    with store.lease() as lease:
        hold(store, reference, lease)
        stored = read_aimage(store, reference)
        lease.add(*(layer.descriptor.digest for layer in stored.aimage.layers))
        require_complete(store, reference, stored)
        inflate(store, stored)
        layers = read_stored(store, stored.aimage, _configured(store, stored.aimage))
        exact = survey_weights(weights_of(layers), recipe, jobs, on_survey, on_surveyed)
        plan = plan_conversion(stored.aimage, layers, stored.dialect, recipe, exact)
        check_config(plan)
        on_plan(plan)
        return pack(plan, store, lease, target, stored.dialect, jobs=jobs, on_written=on_written)


def _configured(
    store: ContentStore, aimage: AImage
) -> Callable[[str, str], tuple[str | None, int | None]]:
    """Return a function of (component, tensor) to the quantization in the configurations.

    They are read when it is called first.
    """

    @cache
    def of(component: str) -> QuantizationConfig:
        config = _object(store, aimage, layer_name(component, "config.json"))
        return QuantizationConfig(config, _object(store, aimage, "model_index.json"))

    return lambda component, name: of(component).of(name)


def _object(store: ContentStore, aimage: AImage, name: str) -> dict[str, Any]:
    """Return a JSON file of an AImage; nothing if it has none, or one that is too large."""
    for layer in aimage.layers:
        if layer.name == name and layer.descriptor.size <= _LARGEST:
            with store.open(layer.descriptor) as file:
                return parse_object(name, file.read(layer.descriptor.size))
    return {}
