"""Train a small Z-Image on drawn shapes: ``python examples/shapes/train.py``.

The autoencoder is trained first, then the transformer and text encoder together, by flow matching
in the autoencoder's latents. Both are then distilled: from their own outputs, and then from these
outputs with autoguidance by networks with a short training (Karras et al. 2024), merged into the
networks as Meng et al. 2023 do with guidance. The decoder is trained again at the end. The output
is a directory for diffusers. All random numbers derive from one seed; other machines round
differently, so their results differ slightly.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from autoencoder import train_vae, tune_decoder
from data import SEED, Pool, make_pool
from network import (
    SHIFT,
    embed,
    make_text_encoder,
    make_tokenizer,
    make_transformer,
    make_vae,
    rate_at,
    save,
    velocity,
)
from scene import SIZES
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, RATE, MUON_RATE = 64, 1e-3, 6e-3
AVERAGE = 0.9995  # decay per step of the weights' moving average
GUIDANCE = 1.0  # scale of autoguidance
Aim = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def optimizers(
    transformer: nn.Module, text_encoder: nn.Module, rate: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the transformer's blocks, AdamW for all else."""
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
            blocks,
            lr=rate * MUON_RATE,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
            ns_steps=4,
        ),
        torch.optim.AdamW(others, lr=rate * RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def prepare(transformer: nn.Module) -> None:
    """Initialize every block to nearly zero, and the output to zero."""
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
    rate: float,
    device: str,
    say: Callable[[str], None],
    snapshot: Callable[[nn.Module, nn.Module], None],
    answer: Callable[..., torch.Tensor] = velocity,
    aim: Aim | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Train on the velocity from noise to latents, or on ``aim`` of noisy latents, time, token
    ids and lengths. Return the averaged networks."""
    rng = random.Random(SEED)
    networks = nn.ModuleList([transformer, text_encoder])
    average = copy.deepcopy(networks).requires_grad_(False)
    steppers = optimizers(transformer, text_encoder, rate)
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
        # uniform over (0, 1), then shifted towards noise as the scheduler's steps are
        even = (torch.arange(BATCH) + torch.rand(BATCH)).to(device) / BATCH
        sigma = SHIFT * even / (1 + (SHIFT - 1) * even)
        noise = torch.randn(clean.shape).to(device)
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        # for so few tokens the plain form of attention is faster than the fused ones
        with torch.autocast(device, torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            features = embed(text_encoder, ids, lengths)
            said = answer(transformer, noisy, 1 - sigma, features, lengths)
            true = aim(noisy, 1 - sigma, ids, lengths) if aim else clean - noise
        loss = functional.mse_loss(said.float(), true.float())
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


def guided(
    strong: Sequence[nn.Module], weak: Sequence[nn.Module], answer: Callable[..., torch.Tensor]
) -> Aim:
    """Return the output of the ``strong`` transformer and text encoder, extrapolated away from the
    ``weak`` ones, which reduces the errors that both make."""

    def aim(
        noisy: torch.Tensor, time: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            said, worse = (
                answer(transformer, noisy, time, embed(text_encoder, ids, lengths), lengths)
                for transformer, text_encoder in (strong, weak)
            )
        return torch.lerp(worse.float(), said.float(), 1 + GUIDANCE)

    return aim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent / "model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
    parser.add_argument("--vae-steps", type=int, default=7000)
    parser.add_argument("--steps", type=int, default=16000)
    parser.add_argument("--weak-steps", type=int, default=2000)
    parser.add_argument("--weak", type=Path, metavar="DIR", help="what was written after them")
    parser.add_argument("--guided-steps", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=1.0, help="times the rate of learning")
    parser.add_argument("--tune-steps", type=int, default=1500)
    parser.add_argument("--scenes", type=int, default=90000)
    parser.add_argument(
        "--go-on", type=Path, metavar="DIR", help="with the parts of an earlier run"
    )
    parser.add_argument("--compile", action="store_true", help="faster; wants a C++ compiler")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{(time.monotonic() - began) / 60:6.1f} min  {text}", file=sys.stderr, flush=True)

    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()

    def begin() -> list[nn.Module]:
        parts = [make_vae(), make_transformer(), make_text_encoder(len(tokenizer))]
        prepare(parts[1])
        return [part.to(options.device) for part in parts]

    parts = begin()
    if options.go_on:
        resume(parts, options.go_on)
    vae, transformer, text_encoder = parts

    def snapshot(transformer: nn.Module, text_encoder: nn.Module) -> None:
        copies = [copy.deepcopy(part).cpu() for part in (vae, transformer, text_encoder)]
        save(options.directory, copies[0], copies[1], copies[2], tokenizer)

    if options.vae_steps:
        train_vae(vae, options.vae_steps, options.device, say)
    if options.steps or options.guided_steps:
        pool = make_pool(vae, tokenizer, options.scenes, options.device, say)
        answer = velocity
        if options.compile:
            torch._dynamo.config.recompile_limit = 2 * len(SIZES)  # with gradients and without
            answer = torch.compile(velocity, dynamic=False)

    def learn(
        networks: Sequence[nn.Module], steps: int, keep: bool = True, aim: Aim | None = None
    ) -> tuple[nn.Module, nn.Module]:
        at_times = snapshot if keep else lambda *_: None
        rate, device = options.rate, options.device
        first, second = networks
        return train_flow(first, second, pool, steps, rate, device, say, at_times, answer, aim)

    if options.steps:
        transformer, text_encoder = learn((transformer, text_encoder), options.steps)
        snapshot(transformer, text_encoder)
    if options.guided_steps:
        weak = begin()
        if options.weak:
            resume(weak, options.weak)
        else:
            weak[1:] = learn(weak[1:], options.weak_steps, keep=False)
        strong = copy.deepcopy((transformer, text_encoder))
        for network in (transformer, text_encoder):
            network.requires_grad_(True)
        aim = guided(strong, weak[1:], answer)
        transformer, text_encoder = learn(
            (transformer, text_encoder), options.guided_steps, aim=aim
        )
    if options.tune_steps:
        tune_decoder(
            vae, transformer, text_encoder, tokenizer, options.tune_steps, options.device, say
        )
    snapshot(transformer, text_encoder)
    say(f"written: {options.directory}")


def resume(parts: Sequence[nn.Module], directory: Path) -> None:
    """Load the weights in ``directory`` into the autoencoder, transformer and text encoder."""
    for part, name in zip(parts, ("vae", "transformer", "text_encoder"), strict=True):
        if not (directory / name).is_dir():
            continue
        earlier = type(part).from_pretrained(directory / name, dtype=torch.float32)
        part.load_state_dict(earlier.state_dict())
        if name == "vae":
            part.register_to_config(
                scaling_factor=earlier.config.scaling_factor,
                shift_factor=earlier.config.shift_factor,
            )


if __name__ == "__main__":
    main()
