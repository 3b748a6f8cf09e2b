"""The promised networks against transformers: equal weights, and both forms of config.json."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.create import create
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.mlxlm.library import import_library_module
from clowder_aimage.model.mlxlm.network_kind import PROMISED
from clowder_aimage.model.text.language_model import Sampling, TextDelta, TextRequest
from clowder_aimage.model.text.runtime import load_language_model
from clowder_aimage.oci import Reference
from tests.text.network_sizes import SIZES, list_ropes, make_five, make_four
from tests.text.tiny_text import make_tokenizer

pytestmark = pytest.mark.integration
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PROMPT = "the red ball is on the table and the blue cube is under the chair, a small circle"
COUNT = 24
TOKENIZER = make_tokenizer(())
# Settings without an effect on a text, for training, for other heads or for tools
NEUTRAL = frozenset(
    "initializer_range use_cache pad_token_id bos_token_id eos_token_id attention_dropout "
    "resid_pdrop embd_pdrop attn_pdrop hidden_dropout residual_dropout router_jitter_noise "
    "output_router_logits router_aux_loss_coef pretraining_tp num_nextn_predict_layers qk_head_dim "
    "max_position_embeddings original_max_position_embeddings summary_type summary_use_proj "
    "summary_activation summary_proj_to_labels summary_first_dropout reorder_and_upcast_attn "
    "n_inner _sliding_window_pattern".split()
)
# Sizes, which each configuration states
SIZED = frozenset(
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads max_position_embeddings".split()
)
# Settings of windows, which limit the context, and those that the shapes of weights show
WINDOWS = frozenset(("sliding_window", "layer_types", "use_sliding_window", "max_window_layers"))
SHAPES = frozenset(("head_dim", "num_experts", "num_local_experts"))


def make_network(directory: Path, config: dict[str, Any]) -> Any:
    """Write a random network of transformers with a tokenizer, and return it."""
    torch.manual_seed(7)
    kind = transformers.AutoConfig.for_model(**config)
    network = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.float32).eval()
    for value in network.parameters():
        scale = 0.3 if value.dim() == 1 else value.shape[-1] ** -0.5
        noise = scale * torch.randn_like(value)
        value.data = value.data + noise if value.dim() == 1 else noise
    network.save_pretrained(directory)
    TOKENIZER.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").unlink(missing_ok=True)
    return network


def load(directory: Path, config: dict[str, Any]) -> Any:
    ends = {"bos_token_id": None, "eos_token_id": None}
    (directory / "config.json").write_text(json.dumps({**config, **ends}))
    layout = ImageLayout(directory.parent / "store")
    return load_language_model(layout, create(layout, Reference.parse("m"), directory).aimage)


def write(model: Any) -> list[bytes]:
    request = TextRequest(
        prompt=PROMPT, max_tokens=COUNT, alternatives=0, sampling=Sampling(temperature=0)
    )
    events = [event for event in model.generate(request) if isinstance(event, TextDelta)]
    return [bytes(token.data) for event in events for token in event.tokens]


def reference(network: Any, tokens: list[int]) -> list[int]:
    prompt = torch.tensor([tokens])
    with torch.no_grad():
        written = network.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=-1,
        )
    numbers: list[int] = written[0, len(tokens) :].tolist()
    return numbers


@pytest.mark.parametrize("kind", [*SIZES, "gpt2"])
def test_greedy_texts_of_both_forms_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    ropes = list_ropes(kind) or ("default",)
    # One scaled form, which changes with the network
    for rope in {ropes[0], ropes[len(kind) % (len(ropes) - 1) + 1] if len(ropes) > 1 else ropes[0]}:
        directory = tmp_path / rope / "m"
        network = make_network(directory, make_five(kind, rope, TOKENIZER.get_vocab_size()))
        five = json.loads((directory / "config.json").read_text())
        model = load(directory, five)
        numbers = reference(network, model._encode(PROMPT, has_special=True))
        expected = [model._table.get_bytes(number) for number in numbers]
        assert write(model) == expected
        assert write(load(directory, make_four(five))) == expected


@pytest.mark.parametrize("kind", sorted(PROMISED.keys() - {"gemma3"}))
def test_each_setting_of_transformers_is_read_or_checked(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    usual = transformers.PreTrainedConfig().to_dict().keys()
    module = import_library_module(f"models.{'llama' if kind == 'mistral' else kind}")
    promised, parameters = PROMISED[kind], inspect.signature(module.ModelArgs).parameters
    read = {*parameters, *promised.fixed, *promised.names, "rope_parameters"}
    read |= WINDOWS | SHAPES | NEUTRAL
    unread = {key: value for key, value in config.to_dict().items() if key not in {*read, *usual}}
    assert unread == {}
    for key, parameter in parameters.items():
        value = getattr(config, key, None)
        if parameter.default is not parameter.empty and key not in {*promised.defaults, *SIZED}:
            same = value is None or value == parameter.default or parameter.default is None
            assert same, f"{key}: {value} in transformers, {parameter.default} in mlx-lm"
