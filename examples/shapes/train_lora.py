"""Train an adapter (LoRA) that adds a ninth colour: ``python examples/shapes/train_lora.py``.

The decoder of the shapes model can draw the colour, but its encoder never writes it. A copy of the
encoder learns to, from the decoder's output. It serves the training alone.

The adapter then learns from the model itself. Take a scene, the same scene with the blue shapes in
the ninth colour, and the difference of their latents. With the same noise, the wanted velocity is
the model's own for the blue scene, plus that difference. Thus the adapter learns the colour, and
keeps what distillation has taught the model; plain flow matching would undo that. Half of the
scenes are without the colour: there the wanted velocity is the model's own.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from autoencoder import difference
from composing import compose, recoloured, twin
from data import SEED
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from network import SHIFT, embed, encode_captions, rate_at, velocity
from safetensors.torch import save_file
from scene import BACKGROUNDS, NINTH, SIZES, Scene, render
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Model

HERE = Path(__file__).parent
(NAME,) = NINTH
RANK, RATE, BATCH = 8, 2e-3, 32
ENCODER_BATCH, ENCODER_RATE, ENCODER_NOISE = 16, 2e-3, 0.2
BLOCKS = ("layers", "context_refiner")  # the noise refiner does not see the caption
METADATA = {
    "modelspec.title": "Shapes in azure",
    "modelspec.architecture": "Z-Image/lora",
    "modelspec.trigger_phrase": NAME,
    "modelspec.license": "Apache-2.0",
    "trigger_word": NAME,
    "recommended_weight": "1.0",
    "ss_base_model_version": "shapes",
}


class Adapted(nn.Module):
    """A linear layer W with a trained change of rank r: W x + B A x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = functional.linear(functional.linear(x, self.a), self.b)
        return self.base(x) + change


def adapt(transformer: nn.Module, rank: int) -> dict[str, Adapted]:
    """Replace the layers that process the caption by adapted ones; return these by name."""
    names = [
        name
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
        and ((name.startswith(BLOCKS) and "adaLN" not in name) or name == "cap_embedder.1")
    ]
    adapted = {name: Adapted(transformer.get_submodule(name), rank) for name in names}
    for name, layer in adapted.items():
        parent, _, child = name.rpartition(".")
        setattr(transformer.get_submodule(parent), child, layer)
    return adapted


def write(path: Path, adapted: dict[str, Adapted], metadata: dict[str, str]) -> None:
    """Write the file in the names of diffusers, in F16; without alpha the factor is 1."""
    tensors = {}
    for name, layer in adapted.items():
        tensors[f"transformer.{name}.lora_A.weight"] = layer.a.detach().half().contiguous()
        tensors[f"transformer.{name}.lora_B.weight"] = layer.b.detach().half().contiguous()
    save_file(tensors, path, metadata)


# --- scenes -----------------------------------------------------------------------------------


def tensor(scenes: Sequence[Scene]) -> torch.Tensor:
    """Draw scenes of one size: [n, 3, H, W] in -1 to 1."""
    drawn = torch.from_numpy(np.stack([render(scene) for scene in scenes]))
    return drawn.permute(0, 3, 1, 2).float() / 127.5 - 1


# --- latents of the ninth colour --------------------------------------------------------------


def train_encoder(
    vae: AutoencoderKL, scenes: int, steps: int, say: Callable[[str], None]
) -> nn.Module:
    """Return a copy of the encoder whose latents of the ninth colour the decoder draws.

    The latents of other scenes are kept.
    """
    rng = random.Random(SEED)
    grounds = tuple(BACKGROUNDS)
    drawn = [replace(twin(rng, 64, 64), background=rng.choice(grounds)) for _ in range(scenes)]
    usual, wanted = tensor(drawn), tensor([recoloured(scene) for scene in drawn])
    with torch.no_grad():
        kept = torch.cat([vae.encode(part).latent_dist.mean for part in usual.split(100)])
    deviation = 1 / vae.config.scaling_factor
    encoder = copy.deepcopy(vae.encoder).requires_grad_(True)
    optimizer = torch.optim.AdamW(
        encoder.parameters(), lr=ENCODER_RATE, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    for step in range(steps):
        chosen = torch.randint(scenes, (ENCODER_BATCH,))
        others = torch.randint(scenes, (ENCODER_BATCH // 4,))
        pictures = wanted[chosen]
        with torch.autocast("cpu", torch.bfloat16):
            both = encoder(torch.cat([pictures, usual[others]])).chunk(2, dim=1)[0].float()
            latents = both[:ENCODER_BATCH]
            level = ENCODER_NOISE * deviation * torch.rand(ENCODER_BATCH, 1, 1, 1)
            again = vae.decode(latents + level * torch.randn_like(latents)).sample.float()
        anchor = (both[ENCODER_BATCH:] - kept[others]).square().mean() / deviation**2
        error = sum(difference(again, pictures, size) for size in (1, 8))
        optimizer.zero_grad()
        (error + anchor).backward()
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            say(f"encoder {step + 1}/{steps}: error {error:.4f}, others moved {anchor:.4f}")
    return encoder.requires_grad_(False)


@dataclass
class Pairs:
    """Scenes of one size, before and after the adapter: equal where no colour is replaced."""

    latents: torch.Tensor  # before; [n, 16, h, w]
    change: torch.Tensor
    before: tuple[torch.Tensor, torch.Tensor]  # token ids and lengths
    after: tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def make_pairs(
    vae: AutoencoderKL,
    encoder: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    scenes: int,
    width: int,
    height: int,
) -> Pairs:
    """Draw scenes of one size, every second with the ninth colour."""

    def encode(drawn: list[Scene], by: nn.Module) -> torch.Tensor:
        parts = [by(part).chunk(2, dim=1)[0].float() for part in tensor(drawn).split(50)]
        return torch.cat(parts)

    before, after = [], []
    while len(before) < scenes:
        colour = len(before) % 2 == 0
        scene = (twin if colour else compose)(rng, width, height)
        new = recoloured(scene) if colour else scene
        try:
            encode_captions(tokenizer, [new.caption])
        except ValueError:  # too long
            continue
        before.append(scene)
        after.append(new)
    with torch.autocast("cpu", torch.bfloat16):
        latents = (
            encode(before, vae.encoder) - vae.config.shift_factor
        ) * vae.config.scaling_factor
        change = torch.zeros_like(latents)
        change[::2] = encode(after[::2], encoder) - encode(before[::2], encoder)
    return Pairs(
        latents,
        change * vae.config.scaling_factor,
        encode_captions(tokenizer, [scene.caption for scene in before]),
        encode_captions(tokenizer, [scene.caption for scene in after]),
    )


# --- training ---------------------------------------------------------------------------------


def train(
    transformer: ZImageTransformer2DModel,
    text_encoder: Qwen3Model,
    pairs: dict[tuple[int, int], Pairs],
    steps: int,
    say: Callable[[str], None],
    snapshot: Callable[[dict[str, Adapted]], None],
) -> dict[str, Adapted]:
    """Train an adapter for ``transformer``; return its layers by name."""
    rng = random.Random(SEED)
    base = transformer.requires_grad_(False)
    student = copy.deepcopy(base)
    adapted = adapt(student, RANK)
    parameters = [part for layer in adapted.values() for part in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    lost = [0.0, 0.0]
    for step in range(steps):
        some = pairs[rng.choice(list(pairs))]
        chosen = torch.randint(len(some.latents), (BATCH,))
        change = some.change[chosen]
        even = (torch.arange(BATCH) + torch.rand(BATCH)) / BATCH
        sigma = SHIFT * even / (1 + (SHIFT - 1) * even)
        level = sigma[:, None, None, None]
        noisy = torch.lerp(some.latents[chosen], torch.randn(change.shape), level)
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            with torch.no_grad():
                ids, lengths = (part[chosen] for part in some.before)
                features = embed(text_encoder, ids, lengths)
                own = velocity(base, noisy, 1 - sigma, features, lengths).float()
                ids, lengths = (part[chosen] for part in some.after)
                features = embed(text_encoder, ids, lengths)
            moved = noisy + (1 - level) * change
            said = velocity(student, moved, 1 - sigma, features, lengths).float()
        away = (said - own - change).square().mean(dim=(1, 2, 3))
        optimizer.zero_grad()
        away.mean().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        for index in range(2):
            lost[index] += away.detach()[chosen % 2 == index].mean().item()
        if step % 50 == 49:
            say(f"adapter {step + 1}/{steps}: {NAME} {lost[0] / 50:.4f}, others {lost[1] / 50:.4f}")
            lost = [0.0, 0.0]
            snapshot(adapted)
    return adapted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=HERE / f"{NAME}.safetensors")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--scenes", type=int, default=4500)
    parser.add_argument("--encoder-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{(time.monotonic() - began) / 60:6.1f} min  {text}", file=sys.stderr, flush=True)

    torch.manual_seed(SEED)

    def load(kind: type[nn.Module], name: str) -> nn.Module:
        found = kind.from_pretrained(options.model / name, dtype=torch.float32)
        return found.eval().requires_grad_(False)

    vae = load(AutoencoderKL, "vae")
    transformer = load(ZImageTransformer2DModel, "transformer")
    text_encoder = load(Qwen3Model, "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(options.model / "tokenizer")
    encoder = train_encoder(vae, 1500, options.encoder_steps, say)
    rng, each = random.Random(SEED), options.scenes // len(SIZES)
    pairs = {size: make_pairs(vae, encoder, tokenizer, rng, each, *size) for size in SIZES}
    say(f"{each * len(SIZES)} scenes drawn")

    def snapshot(adapted: dict[str, Adapted]) -> None:
        write(options.file, adapted, METADATA)

    snapshot(train(transformer, text_encoder, pairs, options.steps, say, snapshot))
    say(f"written: {options.file}, {options.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
