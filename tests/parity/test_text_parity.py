"""Language models against transformers, in float32 on a CPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.create import create
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.process_memory import read_resident_memory
from clowder_aimage.model.text.language_model import Sampling, TextDelta, TextRequest, Token
from clowder_aimage.model.text.runtime import load_language_model
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference
from tests.text.tiny_text import write_model

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
PROMPT = "the red ball is on the table and the blue cube is under the chair, 東京 🙂"
COUNT = 64


def ours(model: Any, **options: Any) -> list[Token]:
    request = TextRequest(prompt=PROMPT, max_tokens=COUNT, alternatives=5, **options)
    return [
        token
        for event in model.generate(request)
        if isinstance(event, TextDelta)
        for token in event.tokens
    ]


def reference(directory: Path) -> Any:
    """Return transformers' model, its tokenizer, and the tokens of the prompt."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return model.eval(), tokenizer, tokenizer(PROMPT, return_tensors="pt").input_ids


def check(model: Any, theirs: Any, tokenizer: Any, prompt: Any, **options: Any) -> None:
    """Compare a greedy text and its log probabilities."""
    with torch.no_grad():
        written = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            **options,
        )[0]
        logprobs = torch.log_softmax(theirs(written[None]).logits[0].float(), -1)
    numbers = written[prompt.shape[1] :].tolist()
    found = ours(model, sampling=Sampling(temperature=0, **options))
    table = model._table
    assert [bytes(one.data) for one in found] == [table.get_bytes(one) for one in numbers]
    for place, (token, number) in enumerate(zip(found, numbers, strict=True)):
        row = logprobs[prompt.shape[1] + place - 1]
        assert abs(token.logprob - row[number].item()) < 1e-4
        best = row.topk(5).values.tolist()
        assert np.abs(np.subtract([one.logprob for one in token.alternatives], best)).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_greedy_texts_and_log_probabilities_are_those_of_transformers(
    tmp_path: Path, kind: str
) -> None:
    directory = write_model(tmp_path / "m", kind, seed=3)
    layout = ImageLayout(tmp_path / "store")
    model = load_language_model(layout, create(layout, Reference.parse("m"), directory).aimage)
    found = reference(directory)
    check(model, *found)
    check(model, *found, repetition_penalty=1.3)


@pytest.mark.parametrize("quantization", ["int8", "int4", "mxfp8", "nvfp4"])
def test_quantized_blobs_are_their_dequantized_weights_in_transformers(
    tmp_path: Path, quantization: str
) -> None:
    directory = write_model(tmp_path / "m", "llama", seed=4)
    layout = ImageLayout(tmp_path / "store")
    recipe = Recipe.parse(quantize=quantization)
    packed = create(layout, Reference.parse("m"), directory, recipe=recipe)
    weights = ModelWeights.open(layout, packed.aimage)
    assert any(weights.get_quantization(name) for name in weights)
    model = load_language_model(layout, packed.aimage)
    theirs, tokenizer, prompt = reference(directory)
    values = {name: torch.tensor(np.array(weights.read_numpy(name))) for name in weights}
    before = theirs.lm_head.weight.clone(), theirs.model.layers[0].mlp.up_proj.weight.clone()
    theirs.load_state_dict(values, strict=True)
    assert not torch.equal(before[1], theirs.model.layers[0].mlp.up_proj.weight)
    check(model, theirs, tokenizer, prompt)


def test_chat_templates_render_as_in_transformers(tmp_path: Path) -> None:
    import transformers

    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "ü", "parameters": {"type": "object"}},
    }
    call = {
        "type": "function",
        "id": "call00001",
        "function": {"name": "weather", "arguments": {"city": "Ulm"}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " Weather? "},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
    ]
    for kind in ("qwen3", "llama", "qwen2"):
        directory = write_model(tmp_path / kind, kind)
        layout = ImageLayout(tmp_path / "store")
        aimage = create(layout, Reference.parse(kind), directory).aimage
        model: Any = load_language_model(layout, aimage)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        given = messages if kind != "qwen2" else messages[:2]
        tools = [tool] if kind != "qwen2" else None
        text = tokenizer.apply_chat_template(
            given, tools=tools, add_generation_prompt=True, tokenize=False
        )
        request = TextRequest(messages=tuple(given), tools=tuple(tools or ()))
        assert model._template.compose(request)[0] == text
        prompt, *_ = model._begin(request)
        assert prompt.tokens == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.slow
def test_memory_is_flat_over_500_requests(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    layout = ImageLayout(tmp_path / "store")
    model = load_language_model(layout, create(layout, Reference.parse("m"), directory).aimage)

    def serve(count: int) -> None:
        for index in range(count):
            prompt = f"{index} {PROMPT}" * (1 + index % 3)
            request = TextRequest(prompt=prompt, max_tokens=4, alternatives=2)
            assert [*model.generate(request)]

    serve(150)
    gc.collect()
    before = read_resident_memory()
    serve(500)
    gc.collect()
    assert read_resident_memory() - before < 8 << 20
