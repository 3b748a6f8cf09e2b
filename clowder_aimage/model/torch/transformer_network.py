"""The transformer of a family on PyTorch, for one picture, or for several of one size at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from clowder_aimage.model.flow.conditioning import Caption
from clowder_aimage.model.flow.rope_table import compute_axes_table
from clowder_aimage.model.flow.time_embedding import embed_time
from clowder_aimage.model.torch.blocks import BlockRunner, ExampleInputs
from clowder_aimage.model.torch.library import TorchLibrary
from clowder_aimage.model.torch.network import TorchNetwork
from clowder_aimage.model.torch.operation import Table, to_table

# Recent sizes of pictures and captions, whose tables are cached
_SIZES = 16
# Latents (channels, height, width), their time or noise level, and the caption
PassInputs = tuple[torch.Tensor, float, Caption]


class TransformerNetwork(TorchNetwork):
    """A transformer with blocks of one or several kinds, and tables of positions on axes."""

    blocks: BlockRunner
    # Tables are computed as exactly as float64 allows
    IS_EXACT = False

    def __init__(self, config: Any, library: TorchLibrary, module: torch.nn.Module) -> None:
        self._config, self._library, self.module = config, library, module
        self.blocks = BlockRunner(library, self._iter_blocks, self._build_arguments)
        self._recall_tables = lru_cache(_SIZES)(self._build_tables)

    @abstractmethod
    def _iter_blocks(self) -> Iterator[torch.nn.Module]:
        """Yield the blocks that are compiled."""

    @abstractmethod
    def _build_arguments(self, block: torch.nn.Module, example: ExampleInputs) -> Sequence[Any]:
        """Return arguments of a block, of any values."""

    @abstractmethod
    def _build_tables(self, words: int, rows: int, columns: int) -> tuple[Table, ...]:
        """Return the tables for a picture with a caption."""

    @abstractmethod
    def compute_batch(self, passes: Sequence[PassInputs]) -> list[torch.Tensor]:
        """Return the velocities of passes with latents of one shape, computed at once."""

    @property
    def is_batch_ready(self) -> bool:
        """Return True unless one picture is computed faster until more code is compiled."""
        return self.blocks.is_batch_ready

    @property
    def is_settled(self) -> bool:
        """Return True if the times of passes now are those of later ones."""
        return self.blocks.is_settled

    def get_caption_key(self, caption: Caption) -> tuple[int, ...]:
        """Return what is equal in the captions of a batch: their length."""
        return (caption.tokens.shape[1],)

    def _build_table(self, *positions: Any) -> Table:
        config = self._config
        arrays = compute_axes_table(
            np.concatenate(positions), config.axes_dims, config.rope_theta, is_exact=self.IS_EXACT
        )
        return to_table(arrays, self._library.device)

    def _embed_times(self, times: Sequence[float], scale: float) -> torch.Tensor:
        """Return the features of scaled times, (times, 1, channels)."""
        scaled = (float(np.float32(time) * np.float32(scale)) for time in times)
        return self._library.to_array(np.stack([embed_time(time)[None] for time in scaled]))


def stack_tables(tables: Sequence[Table], length: int) -> Table:
    """Return tables of pictures as one, each with zeros up to a length."""
    parts = zip(*tables, strict=True)
    cosines, sines = (torch.cat([_pad(each, length) for each in part]) for part in parts)
    return cosines, sines


def stack_captions(captions: Sequence[Caption]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens of captions (pictures, length, dim), with zeros up to the longest.

    And which of them are there, (pictures, length), or None if all are.
    """
    lengths = [caption.tokens.shape[1] for caption in captions]
    length = max(lengths)
    tokens = torch.cat([_pad(caption.tokens, length) for caption in captions])
    if min(lengths) == length:
        return tokens, None
    ends = torch.tensor(lengths, device=tokens.device)[:, None]
    return tokens, torch.arange(length, device=tokens.device) < ends


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return (1, length, ...) with zeros up to another length."""
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat((tensor, tensor.new_zeros((1, missing, *tensor.shape[2:]))), dim=1)
