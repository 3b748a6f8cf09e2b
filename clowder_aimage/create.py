"""create: a model directory becomes an AImage in a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clowder_aimage.content import ContentStore
from clowder_aimage.dialect import DEFAULT, DIALECTS
from clowder_aimage.importer import (
    Packed,
    Plan,
    Provenance,
    Recipe,
    check_config,
    make_plan,
    pack,
    take_inventory,
)
from clowder_aimage.importer.survey import OnSurvey, survey_weights
from clowder_aimage.importer.write import OnWritten
from clowder_aimage.model import blas
from clowder_aimage.oci import Reference

Created = Packed


def create(
    store: ContentStore,
    reference: Reference,
    directory: Path,
    *,
    dialect: str = DEFAULT,
    algorithm: str = "sha256",
    provenance: Provenance | None = None,
    recipe: Recipe | None = None,
    jobs: int | None = None,
    on_survey: OnSurvey = lambda _: None,
    on_surveyed: OnSurvey = lambda _: None,
    on_plan: Callable[[Plan], None] = lambda _: None,
    on_written: OnWritten = lambda _: None,
) -> Created:
    """Pack the model in ``directory`` and name it ``reference``.

    The same directory and ``recipe`` give the same manifest digest on every machine. ``algorithm``
    hashes the layers and the config; the manifest is always known by its sha256, for registries'
    sake. Where the recipe depends on values, ``on_survey`` hears how many bytes are to be looked at
    before the plan, and ``on_surveyed`` of each tensor's.

    Raises:
        ModelError: the directory is not a model that can be packed; nothing was written then,
            unless a file changed in the middle.
        UsageError: the recipe does not fit the model, or needs what is not installed.
        FormatError: it is quantized in a way that is not known, or the provenance is not what the
            config's schema allows; nothing was written.
        StoreError, NoSpaceError: the store cannot keep it; what was stored in full stays.
    """
    recipe = recipe or Recipe()
    recipe.check_tools()
    chosen = DIALECTS[dialect]
    inventory = take_inventory(directory)
    weights = {component.name: component.weights for component in inventory.components}
    exact = survey_weights(weights, recipe, jobs, on_survey, on_surveyed)
    plan = make_plan(
        inventory, chosen, provenance or Provenance(), algorithm, recipe=recipe, exact=exact
    )
    check_config(plan)
    on_plan(plan)
    if recipe.quantize:
        blas.preload()  # before MLX is imported: this process may run models later
    with store.lease() as lease:
        return pack(plan, store, lease, reference, chosen, jobs=jobs, on_written=on_written)
