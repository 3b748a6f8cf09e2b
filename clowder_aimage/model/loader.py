"""Load an AImage as the pipeline that its ``model_index.json`` states, in one of the libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.formats.diffusers import FLUX2, PIPELINES, Z_IMAGE
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import MLX, NO_TUNING, TorchTuning, choose_library
from clowder_aimage.model.model_file import read_object

if TYPE_CHECKING:
    from clowder_aimage.model.flow.component import ModelComponents, NetworkKinds
    from clowder_aimage.model.flow.family import FlowFamily
    from clowder_aimage.model.flow.pipeline import FlowPipeline


def load_pipeline(
    store: BlobFiles,
    aimage: AImage,
    *,
    backend: str | None = None,
    dtype: str | None = None,
    keep_quantized: bool | None = None,
    tuning: TorchTuning = NO_TUNING,
    request: GenerateRequest | None = None,
) -> FlowPipeline:
    """Load the model on the calling thread; no other thread may use it.

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
    from clowder_aimage.model.flow.networks import FlowNetworks
    from clowder_aimage.model.flow.pipeline import FlowPipeline

    source, kind = (store, aimage), _find_kind(store, aimage)
    if choose_library(backend, tuning) == MLX:
        components, kinds = _open_mlx(kind, source, dtype, keep_quantized)
    else:
        components, kinds = _open_torch(kind, source, dtype, tuning)
    family = read_family(store, aimage)
    if request is not None:
        family.sides.check(request)
    return FlowPipeline(family, FlowNetworks(components, kinds, family))


def _find_kind(store: BlobFiles, aimage: AImage) -> str:
    """Return the family of a model. Raises ModelError, FormatError, AccessError."""
    name = read_object(store, aimage, "model_index.json").get("_class_name")
    if name not in PIPELINES:
        raise ModelError(
            f"unsupported pipeline in model_index.json: {name!r:.80}",
            hint=f"supported: {', '.join(PIPELINES)}",
        )
    return PIPELINES[name]


def read_family(store: BlobFiles, aimage: AImage) -> FlowFamily:
    """Return a model's configurations, without its weights. Raises as ``load_pipeline``."""
    from clowder_aimage.model.flux2.family import Flux2
    from clowder_aimage.model.zimage.family import ZImage

    families: dict[str, type[ZImage | Flux2]] = {Z_IMAGE: ZImage, FLUX2: Flux2}
    return families[_find_kind(store, aimage)].read(store, aimage)


def _open_mlx(
    kind: str, source: tuple[BlobFiles, AImage], dtype: str | None, keep_quantized: bool | None
) -> tuple[ModelComponents, NetworkKinds]:
    from clowder_aimage.model.backend import choose_dtype
    from clowder_aimage.model.flow.mlx_library import MlxComponents, MlxLibrary
    from clowder_aimage.model.flux2.networks import NETWORKS as FLUX2_NETWORKS
    from clowder_aimage.model.zimage.networks import NETWORKS as Z_IMAGE_NETWORKS

    kinds = {Z_IMAGE: Z_IMAGE_NETWORKS, FLUX2: FLUX2_NETWORKS}
    library = MlxLibrary(choose_dtype(dtype))
    return MlxComponents(*source, library, keep_quantized), kinds[kind]


def _open_torch(
    kind: str, source: tuple[BlobFiles, AImage], dtype: str | None, tuning: TorchTuning
) -> tuple[ModelComponents, NetworkKinds]:
    from clowder_aimage.model.torch.component import TorchComponents
    from clowder_aimage.model.torch.flux2.networks import NETWORKS as FLUX2_NETWORKS
    from clowder_aimage.model.torch.library import TorchLibrary
    from clowder_aimage.model.torch.zimage.networks import NETWORKS as Z_IMAGE_NETWORKS

    kinds = {Z_IMAGE: Z_IMAGE_NETWORKS, FLUX2: FLUX2_NETWORKS}
    return TorchComponents(*source, TorchLibrary.create(dtype, tuning)), kinds[kind]
