"""Load an AImage as the pipeline that its ``model_index.json`` states, in one of the libraries."""

from __future__ import annotations

from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.formats.diffusers import FLUX2, PIPELINES, Z_IMAGE
from clowder_aimage.model.library_choice import MLX, NO_TUNING, TorchTuning, choose_library
from clowder_aimage.model.pipeline import GenerateRequest, Pipeline
from clowder_aimage.model.weights import read_object


def load_pipeline(
    store: BlobFiles,
    aimage: AImage,
    *,
    backend: str | None = None,
    dtype: str | None = None,
    keep_quantized: bool | None = None,
    tuning: TorchTuning = NO_TUNING,
    request: GenerateRequest | None = None,
) -> Pipeline:
    """Load the model on the calling thread, which must be the only one to use it.

    backend: "mlx", "torch", or None for the one that suits this machine.
    dtype: "float32", "bfloat16", or None for bfloat16 on a GPU and float32 on a CPU.
    keep_quantized: keep weights quantized, with MLX; None for True on a GPU and False on a CPU.
    tuning: options of PyTorch. request: the first one, whose sides are checked before weights are
    read.

    Raises:
        UsageError: The dtype is unsupported (float16 overflows in these models), or the sides or
            options are; or the backend is not installed.
        ModelError: The kind of model is unsupported, or its components do not match.
        FormatError: A blob is invalid.
        AccessError: A blob is not in the store.
    """
    name = read_object(store, aimage, "model_index.json").get("_class_name")
    if name not in PIPELINES:
        raise ModelError(
            f"unsupported pipeline in model_index.json: {name!r:.80}",
            hint=f"supported: {', '.join(PIPELINES)}",
        )
    place, family = (store, aimage), PIPELINES[name]
    library = choose_library(backend, tuning)
    if library == MLX:
        kind, components = _of_mlx(family, place, dtype, keep_quantized)
    else:
        kind, components = _of_torch(family, place, dtype, tuning)
    return kind.load(components, request)  # type: ignore[no-any-return]


def _of_mlx(
    family: str, place: tuple[BlobFiles, AImage], dtype: str | None, keep_quantized: bool | None
) -> tuple[Any, Any]:
    from clowder_aimage.model.backend import compute_dtype
    from clowder_aimage.model.flow.mlx_library import MlxComponents, MlxLibrary
    from clowder_aimage.model.flux2.pipeline import Flux2KleinPipeline
    from clowder_aimage.model.zimage.pipeline import ZImagePipeline

    library = MlxLibrary(compute_dtype(dtype))
    kinds = {Z_IMAGE: ZImagePipeline, FLUX2: Flux2KleinPipeline}
    return kinds[family], MlxComponents(*place, library, keep_quantized=keep_quantized)


def _of_torch(
    family: str, place: tuple[BlobFiles, AImage], dtype: str | None, tuning: TorchTuning
) -> tuple[Any, Any]:
    from clowder_aimage.model.torch.component import TorchComponents
    from clowder_aimage.model.torch.flux2 import TorchFlux2Pipeline
    from clowder_aimage.model.torch.library import TorchLibrary
    from clowder_aimage.model.torch.zimage import TorchZImagePipeline

    kinds = {Z_IMAGE: TorchZImagePipeline, FLUX2: TorchFlux2Pipeline}
    return kinds[family], TorchComponents(*place, TorchLibrary.create(dtype, tuning))
