"""The parameters of llama.cpp for a model: the context, the memory, and the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xllamacpp

from clowder_aimage.errors import UsageError
from clowder_aimage.model.hardware import count_limited_cores, get_machine_memory
from clowder_aimage.model.llama.gguf_check import GgufFacts

# llama.cpp rounds the context of a request up to a multiple of it
STEP = 256
# Tokens of a prompt between two answers, at which a request can be cancelled
BATCH = 512
# Tokens of a text to embed, by default: they are computed at once
_MAX_EMBEDDED = 8192
# Of the machine's memory, if no limit is given
_SHARE = 0.5
# Tokens of a request, before several requests share the memory
_USUAL = 8192
# Tokens of a request, if no number is given: their memory is taken at once
_MAX_USUAL = 32_768
# Bytes of the library without a model
_LIBRARY = 48 << 20
_MIB = 1 << 20
# Bytes of a model that one thread computes: several would wait for each other
_SMALL = 8 * _MIB


def fit_context(
    facts: GgufFacts,
    weights: int,
    *,
    is_embedding: bool,
    requested: int | None,
    parallel: int,
    memory: int | None,
) -> tuple[int, int]:
    """Return the tokens of a request at most, and the number of requests at once.

    Each of them has room for its whole context, so fewer are served if memory is short, and at last
    the context is shorter. weights: bytes. Raises UsageError if not even that has room.
    """
    most = min(requested or (_MAX_EMBEDDED if is_embedding else _MAX_USUAL), facts.context)
    usual = min(most, _USUAL) if requested is None else most
    total = memory or get_default_memory()
    batch = most if is_embedding else BATCH
    work = 4 * min(batch, BATCH) * (8 * facts.width + 2 * facts.inner) + _LIBRARY
    room = (total - weights - work) // max(1, facts.cache)
    least = _round_up(min(usual, STEP))
    if room < least:
        required = weights + work + facts.cache * least
        raise UsageError(
            f"{total // _MIB} MiB of memory are insufficient for this model: "
            f"{-(-required // _MIB)} MiB are required for {least} tokens"
        )
    if room < _round_up(usual):
        return room // STEP * STEP, 1
    count = min(parallel, room // _round_up(usual))
    return min(most, room // count // STEP * STEP), count


def get_default_memory() -> int:
    """Return the bytes of a model if no number is given."""
    return int((get_machine_memory() or 1 << 62) * _SHARE)


def make_params(
    path: Path,
    adapters: Sequence[tuple[Path, float]],
    *,
    weights: int,
    context: int,
    parallel: int,
    pooling: int | None,
) -> xllamacpp.CommonParams:
    """Return the parameters of the server.

    weights: bytes. pooling: of an embedding model, else None.
    """
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.lora_adapters = [_build_adapter(adapter, scale) for adapter, scale in adapters]
    params.n_parallel = parallel
    params.n_ctx = _round_up(context) * parallel  # divided among the requests
    params.n_batch = params.n_ubatch = BATCH
    if pooling is not None:
        params.embedding = True
        params.n_batch = params.n_ubatch = max(BATCH, _round_up(context))
        params.pooling_type = xllamacpp.llama_pooling_type(pooling)
    if (count := 1 if weights < _SMALL else count_limited_cores()) is not None:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = count
    # Lets layers stay on the CPU if the GPU is too small
    params.fit_params = bool(list_gpus())
    params.ctx_shift = False
    # Copies of earlier contexts would take memory beyond the limit
    params.cache_ram_mib = 0
    params.warmup = params.ui = params.endpoint_slots = params.use_jinja = False
    params.n_threads_http = 1
    # llama.cpp would run the template of the file when it loads it, without limits; "chatml" is its
    # own. Prompts are rendered here, in the sandbox
    params.chat_template = "chatml"
    return params


def _round_up(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def list_gpus() -> list[str]:
    """Return the descriptions of the GPUs that llama.cpp can use."""
    kinds = xllamacpp.ggml_backend_dev_type
    gpu_types = (kinds.GGML_BACKEND_DEVICE_TYPE_GPU, kinds.GGML_BACKEND_DEVICE_TYPE_IGPU)
    devices = xllamacpp.get_device_info()
    return [device["description"] for device in devices if device["type"] in gpu_types]


def _build_adapter(path: Path, scale: float) -> Any:
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path, adapter.scale = str(path), scale
    return adapter
