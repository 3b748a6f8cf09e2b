"""The runtime of a language model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError, build_extra_error
from clowder_aimage.model.ability import ENCODER, LLAMA, MLX_LM
from clowder_aimage.model.refusal import refuse_unrunnable
from clowder_aimage.model.text.encoder_config import is_encoder

if TYPE_CHECKING:
    from clowder_aimage.content.store import BlobFiles
    from clowder_aimage.model.text.language_model import LanguageModel

# Modules with ``load`` and ``get_default_memory``, and their extras. Each is imported on use, since
# its library may not be installed
_MODULES = {
    MLX_LM: ("clowder_aimage.model.mlxlm.model", "text"),
    LLAMA: ("clowder_aimage.model.llama.model", "llama"),
    ENCODER: ("clowder_aimage.model.encoder.model", "mlx"),
}
_FORMATS = {"transformers": MLX_LM, "gguf": LLAMA}  # of AImages


def find_runtime(aimage: AImage) -> str | None:
    """Return the runtime of an AImage; None if it is not a language model."""
    return _FORMATS.get(str(aimage.properties.get("format")))


def load_language_model(
    files: BlobFiles,
    aimage: AImage,
    *,
    dtype: str | None = None,
    memory: int | None = None,
    context: int | None = None,
    parallel: int = 1,
    reserved: int = 0,
) -> LanguageModel:
    """Load a model on the calling thread, which must be the only one to use it.

    dtype: "float32", "bfloat16", or None for the default of the device. memory: bytes that the
    weights and the caches of all requests may take; None for the machine's memory. context: maximum
    tokens of a request; None for the context of the model, less if the memory is insufficient.
    parallel: requests that are served at once. reserved: bytes of it for other models.

    Raises:
        UsageError: The extra of the runtime, or a library that it needs, is not installed.
        UnrunnableError: Its files cannot be run here.
        ModelError: The AImage is not a language model, or its chat template cannot be read.
        NoMemoryError: The memory is insufficient.
        AccessError: A blob is not in the store.
    """
    # It imports numpy, which the names of runtimes do not need
    from clowder_aimage.model.model_file import find_object

    runtime = find_runtime(aimage)
    if runtime not in _MODULES:
        raise ModelError("the AImage is not a language model that can be run")
    with refuse_unrunnable():
        if runtime == MLX_LM and is_encoder(find_object(files, aimage, "config.json") or {}):
            runtime = ENCODER
    runtime_module = import_runtime(runtime)
    if reserved:
        memory = max(1, (memory or runtime_module.get_default_memory()) - reserved)
    options = {"dtype": dtype, "memory": memory, "context": context, "parallel": parallel}
    with refuse_unrunnable():
        model: LanguageModel = runtime_module.load(files, aimage, **options)
    return model


def import_runtime(runtime: str) -> Any:
    """Return the module of a runtime. Raises UsageError: its extra, or a library, is missing."""
    module, extra = _MODULES[runtime]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module of this package is a defect, not a missing extra
        if (error.name or "").startswith("clowder_aimage"):
            raise
        raise build_extra_error(runtime, extra) from None
    except ImportError as error:
        # A library of the system is missing, such as libgomp.so.1 on a bare Debian
        raise UsageError(
            f"{runtime} cannot be used: {error}",
            hint="install this library with the packages of your system; libgomp1 has libgomp.so.1",
        ) from None
