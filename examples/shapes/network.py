"""The networks of the shapes model, as classes of diffusers and transformers.

The input of every linear layer is a multiple of 64, so that each supports all group sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from composing import compose
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from scene import COLOURS, SHAPES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

SHIFT = 3.0
TEXT_WIDTH = 64
TOKENS = 32  # in a caption with its chat template: the transformer pads to a multiple
PATCH = 2
DOWN = 8  # pixels per latent cell, in each dimension
WARM = 100  # steps of learning rate warm-up

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which every word of the captions is one token."""
    rng = random.Random(0)
    captions = [compose(rng, 64, 64).caption for _ in range(4000)]
    words = [f"{article} {name}" for article in ("a", "the") for name in (*COLOURS, *SHAPES)]
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        min_frequency=8,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*captions, *words * 20, *["user\n", "assistant\n"] * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_text_encoder(vocabulary: int) -> Qwen3Model:
    """Return a text encoder of three layers; the pipeline uses the output of the second."""
    return Qwen3Model(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=TEXT_WIDTH,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            max_position_embeddings=1024,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
            tie_word_embeddings=True,
        )
    )


def make_transformer() -> ZImageTransformer2DModel:
    """Return a transformer of dimension 192, with feed-forward layers of width 512."""
    return ZImageTransformer2DModel(
        in_channels=16,
        dim=192,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[16, 16, 16],
        axes_lens=[1536, 512, 512],
    )


def make_vae() -> AutoencoderKL:
    """Return a VAE without attention, which flat shapes do not need (an eighth of the file)."""
    channels = [16, 32, 48, 32]
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=128,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def save(
    directory: Path,
    vae: AutoencoderKL,
    transformer: ZImageTransformer2DModel,
    text_encoder: Qwen3Model,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Write a diffusers directory in BF16."""
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).to(torch.bfloat16).save_pretrained(directory)


def encode_captions(
    tokenizer: PreTrainedTokenizerFast, captions: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [n, TOKENS], as in the pipeline, and the length of each caption [n].

    Raises:
        ValueError: A caption is too long for the batch.
    """
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True
        )
        for caption in captions
    ]
    found = tokenizer(texts)["input_ids"]
    ids = torch.full((len(texts), TOKENS), tokenizer.pad_token_id)
    for row, tokens in zip(ids, found, strict=True):
        if len(tokens) > TOKENS:
            raise ValueError(f"{tokenizer.decode(tokens)!r} is longer than {TOKENS} tokens")
        row[: len(tokens)] = torch.tensor(tokens)
    return ids, torch.tensor([len(tokens) for tokens in found])


def embed(text_encoder: Qwen3Model, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the transformer's text features, [n, TOKENS, TEXT_WIDTH]; past ``lengths`` unused."""
    mask = torch.arange(TOKENS, device=ids.device) < lengths[:, None]
    answer = text_encoder(ids, attention_mask=mask, output_hidden_states=True)
    return answer.hidden_states[-2]


def velocity(
    transformer: ZImageTransformer2DModel,
    latents: torch.Tensor,
    time: torch.Tensor,
    features: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Return the output of ``transformer`` for latents [n, 16, h, w] at ``time`` [n], same shape.

    It equals its own ``forward`` for a batch of one size whose captions are padded to TOKENS, but
    that one processes the pictures of a batch one by one, which takes longer than its layers.
    """
    n, c, h, w = latents.shape
    rows, columns = h // PATCH, w // PATCH
    patches = latents.view(n, c, rows, PATCH, columns, PATCH).permute(0, 2, 4, 3, 5, 1)
    x = transformer.all_x_embedder["2-1"](patches.reshape(n, rows * columns, -1))
    count = rows * columns
    padding = -count % TOKENS
    x = torch.cat([x, transformer.x_pad_token.expand(n, padding, -1)], dim=1)
    place = torch.zeros(count + padding, 3, dtype=torch.long)
    place[:count, 0] = TOKENS + 1
    place[:count, 1] = torch.arange(rows).repeat_interleave(columns)
    place[:count, 2] = torch.arange(columns).repeat(rows)
    order = torch.zeros(TOKENS, 3, dtype=torch.long)
    order[:, 0] = torch.arange(1, TOKENS + 1)
    turn = transformer.rope_embedder(place.to(x.device)).expand(n, -1, -1)
    turn_text = transformer.rope_embedder(order.to(x.device)).expand(n, -1, -1)
    given = transformer.t_embedder(time * transformer.t_scale)
    for layer in transformer.noise_refiner:
        x = layer(x, None, turn, given)
    text = transformer.cap_embedder(features)
    is_text = torch.arange(TOKENS, device=x.device)[None, :, None] < lengths[:, None, None]
    text = torch.where(is_text, text, transformer.cap_pad_token)
    for layer in transformer.context_refiner:
        text = layer(text, None, turn_text)
    both = torch.cat([x, text], dim=1)
    turns = torch.cat([turn, turn_text], dim=1)
    for layer in transformer.layers:
        both = layer(both, None, turns, given)
    answer = transformer.all_final_layer["2-1"](both, c=given)[:, :count]
    answer = answer.view(n, rows, columns, PATCH, PATCH, c).permute(0, 5, 1, 3, 2, 4)
    return answer.reshape(n, c, h, w)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: a short warm-up, then a half cosine down to a hundredth."""
    if step < WARM:
        return (step + 1) / WARM
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - WARM) / max(1, steps - WARM)))
