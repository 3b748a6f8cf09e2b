"""Parts held next to PyTorch, diffusers and transformers over many more inputs than pictures."""

from __future__ import annotations

import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.z_image.pipeline_z_image import (
        calculate_shift,
        get_default_z_image_sigmas,
    )
    from transformers import AutoTokenizer, Qwen2Tokenizer

    from tests.parity.make_model import CHAT_TEMPLATE, OTHER_TEMPLATE, make_tokenizer

import numpy as np

from clowder_aimage.model.flow.noise import randn
from clowder_aimage.model.flow.scheduler import FlowScheduler
from clowder_aimage.model.flow.tokenizer import Tokenizer
from tests.model.model_blobs import import_directory

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

SEED = int(os.environ["AIMAGE_PARITY_SEED"])  # tests/conftest.py draws one
SCHEDULERS: list[dict[str, Any]] = [
    {},
    {"shift": 3.0},
    {"shift": 6.0, "num_train_timesteps": 500},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "time_shift_type": "linear", "max_shift": 2.0},
    {"use_dynamic_shifting": True, "base_image_seq_len": 16, "max_image_seq_len": 64},
    {"shift": 3.0, "shift_terminal": 0.1},
    {"shift": 3.0, "use_karras_sigmas": True},
    {"shift": 2.0, "use_exponential_sigmas": True, "shift_terminal": 0.02},
    {"shift": 3.0, "invert_sigmas": True},
]
PROMPTS = [
    "a red fox",
    "",
    "  two  spaces, a\ttab\n\nand lines\r\n",
    "It's 12345 o'clock; we'll see... (they'RE late!)",
    "ünïcödé e\u0301 ﬁ 狐 ♥ 👩‍👩‍👧 مرحبا",
    "<|im_end|> <|im_start|>system\nspecial <think> tokens</think><tool>",
    "word " * 600,
]


def test_sigmas_are_those_of_diffusers() -> None:
    for config in SCHEDULERS:
        check_sigmas(config)


def check_sigmas(config: dict[str, Any]) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(**config)
    ours = FlowScheduler.parse("scheduler_config.json", dict(theirs.config))
    for steps in (1, 2, 3, 4, 8, 9, 17, 50):
        for tokens in (16, 256, 1024, 4096):
            keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
            mu = calculate_shift(tokens, *(theirs.config[key] for key in keys))
            if steps == 1 and config.get("shift_terminal"):
                continue  # they divide by zero
            theirs.set_timesteps(sigmas=get_default_z_image_sigmas(steps), mu=mu)
            schedule = ours.schedule(steps, tokens)
            times = (1000 - theirs.timesteps) / 1000
            np.testing.assert_allclose(schedule.sigmas, theirs.sigmas.numpy(), atol=2e-7)
            np.testing.assert_allclose(schedule.times, times.numpy(), atol=2e-7)


@pytest.mark.parametrize("shift", [1.0, 7.0])
def test_shift_of_the_request(shift: float) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_shift(shift)
    theirs.set_timesteps(sigmas=get_default_z_image_sigmas(8), mu=1.0)
    ours = FlowScheduler.parse("scheduler_config.json", {"shift": 3.0}).schedule(8, 16, shift)
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), atol=1e-7)


def test_noise() -> None:
    rng = random.Random(SEED)
    sizes = [*range(1, 50), *(rng.randrange(50, 70_000) for _ in range(30))]
    for size in sizes:
        for seed in (0, 42, rng.randrange(1 << 32), rng.randrange(1 << 64)):
            theirs = torch.randn(size, generator=torch.Generator().manual_seed(seed)).numpy()
            ours = randn(seed, (size,))
            message = f"AIMAGE_PARITY_SEED={SEED}, size {size}, seed {seed}"
            np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=0, err_msg=message)
            if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
                assert (ours == theirs).all(), message


@pytest.mark.parametrize(
    ("template", "legacy", "kind"),
    [
        (CHAT_TEMPLATE, False, "tokenizer.json"),
        (OTHER_TEMPLATE, True, "tokenizer.json"),
        (CHAT_TEMPLATE, False, "vocab.json"),
        (OTHER_TEMPLATE, True, "vocab.json"),
    ],
    ids=["5", "4, another template", "5, vocab.json", "4, vocab.json, another template"],
)
def test_tokens(tmp_path: Path, template: str, legacy: bool, kind: str) -> None:
    folder = tmp_path / "files" / "tokenizer"
    theirs = make_tokenizer(template)
    theirs.save_pretrained(folder)
    if kind == "vocab.json":
        theirs = as_vocabulary(folder, template)
    elif legacy:
        as_transformers_4(folder, template)
        theirs = AutoTokenizer.from_pretrained(folder)
    else:
        theirs = AutoTokenizer.from_pretrained(folder)
    if kind == "vocab.json" and not legacy:
        merge_config(folder, {"added_tokens_decoder": None})
        listed = {content: index for index, content in added(theirs).items()}
        (folder / "added_tokens.json").write_text(json.dumps(listed))
    store, aimage = import_directory(tmp_path / "files", tmp_path / "blobs")
    ours = Tokenizer.load(store, aimage)
    for prompt in PROMPTS:
        text = theirs.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        assert ours.render(prompt) == text
        padded = theirs([text], padding="max_length", max_length=512, truncation=True)
        mask = padded["attention_mask"][0]
        wanted = [t for t, keep in zip(padded["input_ids"][0], mask, strict=True) if keep]
        assert ours.encode(prompt).ids == wanted


def as_vocabulary(folder: Path, template: str) -> Any:
    """Turn tokenizer.json into vocab.json and merges.txt, as slow tokenizers had them."""
    value = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(value["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in value["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    as_transformers_4(folder, template, value["added_tokens"])
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    theirs = Qwen2Tokenizer(
        vocab=value["model"]["vocab"],
        merges=[tuple(pair) for pair in value["model"]["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )
    known = added(theirs).values()
    theirs.add_tokens(
        [item["content"] for item in value["added_tokens"] if item["content"] not in known],
        special_tokens=True,
    )
    tokens = {str(i): {"content": t, "special": True} for i, t in added(theirs).items()}
    merge_config(folder, {"added_tokens_decoder": tokens, "tokenizer_class": "Qwen2Tokenizer"})
    return theirs


def added(tokenizer: Any) -> dict[int, str]:
    return {index: str(token) for index, token in sorted(tokenizer.added_tokens_decoder.items())}


def as_transformers_4(folder: Path, template: str, tokens: list[Any] | None = None) -> None:
    """Move the template, named, and the added tokens into tokenizer_config.json."""
    tokens = tokens or json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    (folder / "chat_template.jinja").unlink()
    listed = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokens}
    named = [{"name": "other", "template": "no"}, {"name": "default", "template": template}]
    merge_config(folder, {"added_tokens_decoder": listed, "chat_template": named})
    eos = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "rstrip": False}
    merge_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos})


def merge_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
