"""Train the enhancer of the shapes model: ``python examples/shapes/train_enhancer.py``.

A language model (Qwen3, 0.7 million parameters) learns to write the caption that a terse wish
means (terse.py). All pairs are drawn anew; the loss is that of the caption only. The output is a
directory for transformers, in BF16. All random numbers derive from one seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from network import SPECIAL, rate_at
from safetensors.torch import save_file
from terse import corpus, pair
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED, BATCH, RATE, MUON_RATE = 0, 64, 2e-3, 4e-3
AVERAGE = 0.998  # decay per step of the weights' moving average
WIDTH, LAYERS = 128, 3
END = "<|im_end|>"
# only the last question: neither instructions nor earlier answers were part of the training
TEMPLATE = (
    "{%- for message in messages if message.role == 'user' %}"
    "{%- if loop.last %}"
    "{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer for lower case."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        min_frequency=20,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus(6000), *["user\n", "assistant\n"] * 50], trainer)
    return tokenizer


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Return the network; the input of every linear layer is a multiple of 64."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-6,
            max_position_embeddings=1024,
            rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
            tie_word_embeddings=True,
        )
    )


def ask(wish: str) -> str:
    """Return the prompt of a wish, as TEMPLATE writes it."""
    return f"<|im_start|>user\n{wish}{END}\n<|im_start|>assistant\n"


def batch(tokenizer: Tokenizer, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [n, t] and the same as labels, -100 outside of the captions."""
    rows, starts = [], []
    for wish, said in (pair(rng) for _ in range(BATCH)):
        first, second = (tokenizer.encode(text).ids for text in (ask(wish), said + END))
        rows.append(first + second)
        starts.append(len(first))
    longest = max(map(len, rows))
    ids = torch.zeros(BATCH, longest, dtype=torch.long)
    labels = torch.full((BATCH, longest), -100)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        labels[index, start : len(row)] = torch.tensor(row[start:])
    return ids, labels


def optimizers(network: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for all else."""
    named = list(network.named_parameters())
    inside = [one for name, one in named if one.ndim == 2 and ".layers." in name]
    others = [one for name, one in named if one.ndim != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(
            inside, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=4
        ),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(network: Qwen3ForCausalLM, tokenizer: Tokenizer, directory: Path, minutes: float) -> None:
    """Train for minutes of processor time; write the averaged network every 500 steps."""
    rng, began = random.Random(SEED), time.process_time()
    steppers, lost = optimizers(network), 0.0
    rates = [[group["lr"] for group in one.param_groups] for one in steppers]
    average = {name: one.detach().clone() for name, one in network.state_dict().items()}
    step = 0
    while (done := (time.process_time() - began) / (60 * minutes)) < 1:
        for one, first in zip(steppers, rates, strict=True):
            for group, rate in zip(one.param_groups, first, strict=True):
                group["lr"] = rate * min(1, (step + 1) / 100) * rate_at(int(100 + done * 900), 1000)
        ids, labels = batch(tokenizer, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(ids[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())
        for one in steppers:
            one.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for one in steppers:
            one.step()
        keep = min(AVERAGE, (step + 1) / (step + 10))
        for name, now in network.state_dict().items():
            average[name].lerp_(now.detach(), 1 - keep)
        step, lost = step + 1, lost + loss.item()
        if step % 50 == 0:
            took = time.process_time() - began
            print(
                f"{took / 60:5.1f} min  {step}: loss {lost / 50:.4f}", file=sys.stderr, flush=True
            )
            lost = 0.0
        if step % 500 == 0:
            save(directory, average, tokenizer)
    save(directory, average, tokenizer)


def save(directory: Path, weights: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    """Write a directory for transformers in BF16."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in weights.items()
        if name != "lm_head.weight"
    }
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(SPECIAL[0])
    write(directory / "config.json", config(tokenizer.get_vocab_size(), end, pad))
    ends = {"eos_token": END, "pad_token": SPECIAL[0]}
    write(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, **ends},
    )
    sampling = {"do_sample": True, "temperature": 0.3, "top_k": 20, "top_p": 0.95}
    write(
        directory / "generation_config.json",
        {"eos_token_id": [end], "pad_token_id": pad, **sampling},
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def config(vocabulary: int, end: int, pad: int) -> dict[str, object]:
    """Return the configuration, with the fields of earlier releases of transformers too."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "max_position_embeddings": 1024,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
    }


def write(file: Path, value: object) -> None:
    """Write JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "enhancer"
    parser.add_argument("directory", type=Path, nargs="?", default=default)
    parser.add_argument("--minutes", type=float, default=10.0, help="of processor time")
    options = parser.parse_args(arguments)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    network = make_model(tokenizer.get_vocab_size())
    train(network, tokenizer, options.directory, options.minutes)


if __name__ == "__main__":
    main()
