"""Training scenes, drawn on all processors, and their latents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from composing import compose
from diffusers import AutoencoderKL
from network import encode_captions
from scene import SIZES, render

SEED = 0
CHUNK = 250  # scenes that a process draws at a time


@dataclass
class Pool:
    """Latents of drawn scenes by size, with the tokens of their captions."""

    latents: dict[tuple[int, int], torch.Tensor]
    ids: dict[tuple[int, int], torch.Tensor]
    lengths: dict[tuple[int, int], torch.Tensor]


def draw(task: tuple[int, int, int]) -> tuple[list[str], np.ndarray]:
    """Draw CHUNK scenes of one size: captions and pictures [CHUNK, H, W, 3], uint8."""
    number, width, height = task
    rng = random.Random(f"{SEED} {number} {width} {height}")
    scenes = [compose(rng, width, height) for _ in range(CHUNK)]
    return [scene.caption for scene in scenes], np.stack([render(scene) for scene in scenes])


def drawn(tasks: Sequence[tuple[int, int, int]]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield captions and pictures [n, 3, H, W] in -1 to 1, in order, drawn by other processes."""
    with ProcessPoolExecutor() as pool:
        for captions, pictures in pool.map(draw, tasks):
            yield captions, torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def make_pool(
    vae: AutoencoderKL, tokenizer: object, scenes: int, device: str, say: Callable[[str], None]
) -> Pool:
    """Draw scenes, the same number of each size, and encode them as latents."""
    each = max(1, scenes // len(SIZES) // CHUNK)
    tasks = [(1000 + number, *size) for size in SIZES for number in range(each)]
    latents: dict[tuple[int, int], list[torch.Tensor]] = {size: [] for size in SIZES}
    captions: dict[tuple[int, int], list[str]] = {size: [] for size in SIZES}
    for (_, *size), (texts, pictures) in zip(tasks, drawn(tasks), strict=True):
        for part in pictures.split(50):
            with torch.autocast(device, torch.bfloat16):
                mean = vae.encode(part.to(device)).latent_dist.mean.float()
            mean = (mean - vae.config.shift_factor) * vae.config.scaling_factor
            latents[size[0], size[1]].append(mean)
        captions[size[0], size[1]] += texts
    coded = {size: encode_captions(tokenizer, texts) for size, texts in captions.items()}
    say(f"{sum(map(len, captions.values()))} scenes drawn")
    return Pool(
        {size: torch.cat(parts) for size, parts in latents.items()},
        {size: ids.to(device) for size, (ids, _) in coded.items()},
        {size: lengths.to(device) for size, (_, lengths) in coded.items()},
    )
