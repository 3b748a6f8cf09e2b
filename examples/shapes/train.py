"""Train a small Z-Image on drawn shapes: ``python examples/shapes/train.py``.

First the autoencoder, then the transformer together with the text encoder, by flow matching in the
autoencoder's latents. What is written is a directory that diffusers opens. Everything that is drawn
by chance comes from one seed; another machine rounds differently, and so ends a little elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from network import (
    SHIFT,
    embed,
    encode_captions,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
    save,
    velocity,
)
from scene import SIZES, compose, render, wish_of
from torch import nn
from torch.nn import functional

SEED = 0
VAE_BATCH, VAE_RATE, VAE_KL = 16, 3e-3, 1e-4
BATCH, RATE, MUON_RATE = 64, 1e-3, 2e-3
TUNE_RATE = 1e-3
AVERAGE = 0.9995  # of the weights, from step to step
WARM = 100  # steps over which a rate rises
CHUNK = 250  # scenes that one process draws at a time


@dataclass
class Pool:
    """Latents of drawn scenes by size, with the tokens of their captions."""

    latents: dict[tuple[int, int], torch.Tensor]
    ids: dict[tuple[int, int], torch.Tensor]
    lengths: dict[tuple[int, int], torch.Tensor]


def draw(task: tuple[int, int, int]) -> tuple[list[str], np.ndarray]:
    """CHUNK scenes of one size: captions and pictures [CHUNK, H, W, 3], uint8."""
    number, width, height = task
    rng = random.Random(f"{SEED} {number} {width} {height}")
    scenes = [compose(rng, width, height) for _ in range(CHUNK)]
    return [scene.caption for scene in scenes], np.stack([render(scene) for scene in scenes])


def drawn(tasks: Sequence[tuple[int, int, int]]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Captions and pictures [n, 3, H, W] in -1 to 1, in order, drawn by other processes."""
    with ProcessPoolExecutor() as pool:
        for captions, pictures in pool.map(draw, tasks):
            yield captions, torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def rate_at(step: int, steps: int) -> float:
    """A short rise, then half a cosine down to a hundredth."""
    if step < WARM:
        return (step + 1) / WARM
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - WARM) / max(1, steps - WARM)))


def train_vae(vae: AutoencoderKL, steps: int, device: str, say: Callable[[str], None]) -> None:
    """Learn to take pictures apart and put them together again; sets the latents' scale."""
    chunks = min(32, 1 + steps // 100)
    found = list(drawn([(number, 64, 64) for number in range(chunks)]))
    pictures = torch.cat([pictures for _, pictures in found])
    grounds = [wish_of(caption).background for captions, _ in found for caption in captions]
    # most captions say nothing of the background, and mean white: here each is as likely
    weights = torch.tensor([1 / grounds.count(ground) for ground in grounds])
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    vae.train()
    for step in range(steps):
        batch = pictures[torch.multinomial(weights, VAE_BATCH)].to(device)
        with torch.autocast(device, torch.bfloat16):
            latents = vae.encode(batch).latent_dist
            again = vae.decode(latents.sample()).sample
        again = again.float()
        kl = latents.kl().mean() / latents.mean[0].numel()
        error = sum(difference(again, batch, size) for size in (1, 8))
        optimizer.zero_grad()
        (error + VAE_KL * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 249:
            say(f"vae {step + 1}/{steps}: error {error:.4f}, kl {kl:.2f}")
    vae.eval()
    with torch.no_grad():
        parts = pictures[: 8 * CHUNK].to(device).split(50)
        means = torch.cat([vae.encode(part).latent_dist.mean for part in parts])
    vae.register_to_config(
        scaling_factor=round(1 / means.std().item(), 4), shift_factor=round(means.mean().item(), 4)
    )
    say(f"latents: scale {vae.config.scaling_factor}, shift {vae.config.shift_factor}")


def difference(one: torch.Tensor, other: torch.Tensor, size: int) -> torch.Tensor:
    """Between pictures that are ``size`` times smaller: of edges, or of the colours of areas."""
    away = functional.avg_pool2d(one - other, size)
    return away.abs().mean() + away.square().mean()


@torch.no_grad()
def make_pool(
    vae: AutoencoderKL, tokenizer: object, scenes: int, device: str, say: Callable[[str], None]
) -> Pool:
    """Draw scenes, the same number of each size, and keep their latents."""
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


def optimizers(transformer: nn.Module, text_encoder: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the transformer's blocks, AdamW for all else."""
    blocks = [
        parameter
        for name, parameter in transformer.named_parameters()
        if parameter.ndim == 2 and name.startswith(("layers.", "noise_", "context_"))
    ]
    inside = {id(parameter) for parameter in blocks}
    others = [
        parameter
        for network in (transformer, text_encoder)
        for parameter in network.parameters()
        if id(parameter) not in inside
    ]
    return [
        torch.optim.Muon(
            blocks, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=4
        ),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def prepare(transformer: nn.Module) -> None:
    """Every block begins as nearly nothing, and the whole of it says zero."""
    for name, parameter in transformer.named_parameters():
        if "adaLN_modulation" in name:
            nn.init.zeros_(parameter)
            if name.endswith(".bias") and "final_layer" not in name:
                with torch.no_grad():
                    _, attention, _, forward = parameter.chunk(4)
                    attention.fill_(0.3)
                    forward.fill_(0.3)
        elif "pad_token" in name:
            nn.init.normal_(parameter, std=0.02)
        elif "final_layer" in name:
            nn.init.zeros_(parameter)


def train_flow(
    transformer: nn.Module,
    text_encoder: nn.Module,
    pool: Pool,
    steps: int,
    device: str,
    say: Callable[[str], None],
    snapshot: Callable[[nn.Module, nn.Module], None],
) -> tuple[nn.Module, nn.Module]:
    """Learn the velocity from noise to latents; returns the averaged networks."""
    rng = random.Random(SEED)
    networks = nn.ModuleList([transformer, text_encoder])
    average = copy.deepcopy(networks).requires_grad_(False)
    steppers = optimizers(transformer, text_encoder)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: rate_at(step, steps))
        for one in steppers
    ]
    sizes = list(pool.latents)
    lost, began = 0.0, time.monotonic()
    for step in range(steps):
        size = rng.choice(sizes)
        chosen = torch.randint(len(pool.latents[size]), (BATCH,))
        clean, ids, lengths = (
            part[size][chosen] for part in (pool.latents, pool.ids, pool.lengths)
        )
        # evenly over (0, 1), then shifted towards noise as the scheduler's steps are
        even = (torch.arange(BATCH) + torch.rand(BATCH)).to(device) / BATCH
        sigma = SHIFT * even / (1 + (SHIFT - 1) * even)
        noise = torch.randn(clean.shape).to(device)
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        with torch.autocast(device, torch.bfloat16):
            features = embed(text_encoder, ids, lengths)
            said = velocity(transformer, noisy, 1 - sigma, features, lengths)
        loss = functional.mse_loss(said.float(), clean - noise)
        for one in steppers:
            one.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        for one, schedule in zip(steppers, schedules, strict=True):
            one.step()
            schedule.step()
        keep = min(AVERAGE, (step + 1) / (step + 10))
        with torch.no_grad():
            for kept, now in zip(average.parameters(), networks.parameters(), strict=True):
                kept.lerp_(now, 1 - keep)
        lost += loss.item()
        if step % 100 == 99:
            took = (time.monotonic() - began) / (step + 1)
            say(f"flow {step + 1}/{steps}: loss {lost / 100:.4f}, {took:.3f} s a step")
            lost = 0.0
        if step % 1000 == 999:
            snapshot(average[0], average[1])
    return average[0], average[1]


def tune_decoder(
    vae: AutoencoderKL,
    transformer: nn.Module,
    text_encoder: nn.Module,
    tokenizer: object,
    steps: int,
    device: str,
    say: Callable[[str], None],
) -> None:
    """Have the decoder learn to draw what the transformer means.

    A scene's latents are made noisy in part, and the transformer takes the rest of the way back, as
    it does for a picture; what it leaves untidy is drawn as the scene is. Every fourth batch is the
    encoder's own latents, so that the decoder still draws those.
    """
    rng = random.Random(SEED + 1)
    tasks = [(2000 + number, *size) for number in range(1 + steps // 450) for size in SIZES]
    found = list(drawn(tasks))
    coded = [encode_captions(tokenizer, captions) for captions, _ in found]
    parameters = list(vae.decoder.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=TUNE_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    even = torch.linspace(1, 1 / 8, 8)
    levels = [*(SHIFT * even / (1 + (SHIFT - 1) * even)).tolist(), 0.0]
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    lost = 0.0
    for step in range(steps):
        number = rng.randrange(len(found))
        chosen = torch.randperm(CHUNK)[:VAE_BATCH]
        pictures = found[number][1][chosen].to(device)
        ids, lengths = (part[chosen].to(device) for part in coded[number])
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            latents = (vae.encode(pictures).latent_dist.mean.float() - shift) * scale
            if step % 4:
                features = embed(text_encoder, ids, lengths)
                first = rng.randrange(3, 7)
                latents = torch.lerp(latents, torch.randn_like(latents), levels[first])
                for level, lower in itertools.pairwise(levels[first:]):
                    time = torch.full((len(latents),), 1 - level, device=device)
                    said = velocity(transformer, latents, time, features, lengths).float()
                    latents = latents + (level - lower) * said
        with torch.autocast(device, torch.bfloat16):
            again = vae.decode(latents / scale + shift).sample
        error = sum(difference(again.float(), pictures, size) for size in (1, 8))
        optimizer.zero_grad()
        error.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        lost += error.item()
        if step % 100 == 99:
            say(f"decoder {step + 1}/{steps}: error {lost / 100:.4f}")
            lost = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
    parser.add_argument("--vae-steps", type=int, default=9000)
    parser.add_argument("--steps", type=int, default=15000)
    parser.add_argument("--tune-steps", type=int, default=1500)
    parser.add_argument("--scenes", type=int, default=90000)
    parser.add_argument("--go-on", type=Path, metavar="DIR", help="with a model of an earlier run")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{(time.monotonic() - began) / 60:6.1f} min  {text}", file=sys.stderr, flush=True)

    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    parts = [make_vae(), make_transformer(), make_text_encoder(len(tokenizer))]
    prepare(parts[1])
    if options.go_on:
        for part, name in zip(parts, ("vae", "transformer", "text_encoder"), strict=True):
            earlier = type(part).from_pretrained(options.go_on / name, dtype=torch.float32)
            part.load_state_dict(earlier.state_dict())
            if name == "vae":
                part.register_to_config(
                    scaling_factor=earlier.config.scaling_factor,
                    shift_factor=earlier.config.shift_factor,
                )
    vae, transformer, text_encoder = (part.to(options.device) for part in parts)

    def snapshot(transformer: nn.Module, text_encoder: nn.Module) -> None:
        copies = (copy.deepcopy(part).cpu() for part in (vae, transformer, text_encoder))
        save(options.directory, *copies, tokenizer)

    if options.vae_steps:
        train_vae(vae, options.vae_steps, options.device, say)
    if options.steps:
        pool = make_pool(vae, tokenizer, options.scenes, options.device, say)
        transformer, text_encoder = train_flow(
            transformer, text_encoder, pool, options.steps, options.device, say, snapshot
        )
    if options.tune_steps:
        tune_decoder(
            vae, transformer, text_encoder, tokenizer, options.tune_steps, options.device, say
        )
    snapshot(transformer, text_encoder)
    say(f"written: {options.directory}")


if __name__ == "__main__":
    main()
