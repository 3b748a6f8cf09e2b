"""Load an AImage as the pipeline that its ``model_index.json`` states."""

from __future__ import annotations

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError
from clowder_aimage.formats.diffusers import FLUX2, PIPELINES, Z_IMAGE
from clowder_aimage.model.backend import compute_dtype
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.flux2.pipeline import Flux2KleinPipeline
from clowder_aimage.model.pipeline import GenerateRequest, Pipeline
from clowder_aimage.model.weights import read_object
from clowder_aimage.model.zimage.pipeline import ZImagePipeline

_KINDS: dict[str, type[FlowPipeline]] = {Z_IMAGE: ZImagePipeline, FLUX2: Flux2KleinPipeline}


def load_pipeline(
    store: BlobFiles,
    aimage: AImage,
    *,
    dtype: str | None = None,
    keep_quantized: bool | None = None,
    request: GenerateRequest | None = None,
) -> Pipeline:
    """Load the model on the calling thread, which must be the only one to use it.

    dtype: "float32", "bfloat16", or None for bfloat16 on a GPU and float32 on a CPU.
    keep_quantized: keep weights quantized; None for True on a GPU and False on a CPU.
    request: the first one, whose sides are checked before weights are read.

    Raises:
        UsageError: The dtype is unsupported (float16 overflows in these models), or the sides are.
        ModelError: The kind of model is unsupported, or its components do not match.
        FormatError: A blob is invalid.
        AccessError: A blob is not in the store.
    """
    chosen = compute_dtype(dtype)
    name = read_object(store, aimage, "model_index.json").get("_class_name")
    if name not in PIPELINES:
        raise ModelError(
            f"unsupported pipeline in model_index.json: {name!r:.80}",
            hint=f"supported: {', '.join(PIPELINES)}",
        )
    kind = _KINDS[PIPELINES[name]]
    return kind.load(store, aimage, chosen, keep_quantized=keep_quantized, request=request)
