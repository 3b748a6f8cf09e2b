"""Training of the autoencoder: as a whole, and later of its decoder again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
from data import CHUNK, SEED, drawn
from diffusers import AutoencoderKL
from network import SHIFT, embed, encode_captions, rate_at, velocity
from scene import SIZES
from torch import nn
from torch.nn import functional
from wishes import wish_of

VAE_BATCH, VAE_RATE, VAE_KL = 16, 3e-3, 1e-4
VAE_NOISE = 0.4  # final and maximal, relative to the standard deviation of the latents
TUNE_RATE = 1e-3


def train_vae(vae: AutoencoderKL, steps: int, device: str, say: Callable[[str], None]) -> None:
    """Train the autoencoder to reconstruct pictures; set the scale of the latents."""
    chunks = min(32, 1 + steps // 100)
    found = list(drawn([(number, 64, 64) for number in range(chunks)]))
    pictures = torch.cat([pictures for _, pictures in found])
    grounds = [wish_of(caption).background for captions, _ in found for caption in captions]
    # most captions state no background, which means white: here all are equally likely
    weights = torch.tensor([1 / grounds.count(ground) for ground in grounds])
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    vae.train()
    for step in range(steps):
        batch = pictures[torch.multinomial(weights, VAE_BATCH)].to(device)
        with torch.autocast(device, torch.bfloat16):
            latents = vae.encode(batch).latent_dist
            drawn_latents = latents.sample()
            # noise as large as the transformer's error: important features must exceed it
            most = VAE_NOISE * min(1.0, 2 * step / steps)
            level = most * torch.rand(VAE_BATCH, 1, 1, 1, device=device)
            noise = level * drawn_latents.std() * torch.randn_like(drawn_latents)
            again = vae.decode(drawn_latents + noise).sample
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
    """Return the absolute plus squared error of pictures averaged over blocks of ``size``."""
    away = functional.avg_pool2d(one - other, size)
    return away.abs().mean() + away.square().mean()


def tune_decoder(
    vae: AutoencoderKL,
    transformer: nn.Module,
    text_encoder: nn.Module,
    tokenizer: object,
    steps: int,
    device: str,
    say: Callable[[str], None],
) -> None:
    """Train the decoder to reconstruct scenes from the transformer's output.

    Noise is added to a scene's latents, and the transformer denoises them as it does for a
    picture; the decoder learns to compensate its errors. Every fourth batch has the encoder's own
    latents, so that these are still decoded well.
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
