"""Attention, by PyTorch or by one of diffusers' backends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from clowder_aimage.errors import UsageError

# Of queries, keys and values: (pictures, length, heads, channels)
Attention = Callable[..., torch.Tensor]
_DISPATCH = "diffusers.models.attention_dispatch"
# The suffix of backends with kernels that would be downloaded
_LOADED = "_hub"


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return attention of (pictures, length, heads, channels), in the shape of the queries.

    There may be fewer heads of keys and values. mask: True for keys that are seen, of a shape that
    extends to (pictures, heads, queries, keys). is_causal: keys are seen up to a query's place.
    """
    queries, keys, values = (array.transpose(1, 2) for array in (queries, keys, values))
    is_grouped = queries.shape[1] != keys.shape[1]
    mixed = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=is_grouped
    )
    return mixed.transpose(1, 2)


def select_attention(name: str | None) -> Attention:
    """Return the attention of a backend of diffusers, or PyTorch's without a name.

    Raises UsageError: it is unknown, its package is missing, or its kernel would be downloaded.
    """
    if name is None:
        return attend
    dispatch: Any = importlib.import_module(_DISPATCH)
    kinds = dispatch.AttentionBackendName
    backends = [kind.value for kind in kinds if not kind.value.endswith(_LOADED)]
    if name not in backends:
        names = ", ".join(backend for backend in backends if not backend.startswith("_"))
        raise UsageError(f"unknown attention backend {name!r:.40}: use {names}")
    try:
        # It checks the package; the backend is active inside of the block only
        with dispatch.attention_backend(kinds(name)):
            pass
    except RuntimeError as error:
        raise UsageError(f"the attention backend {name} cannot be used: {error}") from None
    return partial(_dispatch, dispatch.dispatch_attention_fn, kinds(name))


def _dispatch(
    function: Any,
    backend: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    mixed: torch.Tensor = function(queries, keys, values, backend=backend)
    return mixed
