"""config.json of both forms of transformers, for the networks of mlx-lm; without transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import ModelError
from clowder_aimage.model.mlxlm.library import import_library_module, make_network
from clowder_aimage.model.mlxlm.model import _measure_token_size
from clowder_aimage.model.mlxlm.network_config import translate_config
from clowder_aimage.model.mlxlm.network_kind import PROMISED
from clowder_aimage.model.mlxlm.network_rope import NetworkRope
from clowder_aimage.model.mlxlm.rotary import Rotary
from clowder_aimage.model.rope_config import RopeConfig
from tests.text.network_sizes import BASE, ROPES, SIZES, list_ropes, make_five, make_four

CASES = [(kind, rope) for kind in SIZES for rope in list_ropes(kind)]


def read_rotary(config: dict[str, Any], context: int | None = None) -> list[Any]:
    """Return the frequencies and the scale of each rotary module, in the order of layers."""
    found = []
    for path, module in sorted(make_network(config, context).network.named_modules()):
        rotary = Rotary.read(module)
        if rotary is not None:
            found.append((path, rotary.frequencies, rotary.scale, rotary.traditional))
    return found


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second) > 0
    for (path, left, *rest), (other, right, *others) in zip(first, second, strict=True):
        assert (path, rest) == (other, others)
        np.testing.assert_allclose(left, right, rtol=1e-6)


def test_each_promised_network_has_a_small_configuration() -> None:
    assert {*SIZES, "gpt2"} == PROMISED.keys()


@pytest.mark.parametrize("kind", SIZES)
def test_both_forms_give_the_same_positions(kind: str) -> None:
    plain = read_rotary(make_five(kind))
    for rope in list_ropes(kind):
        five = make_five(kind, rope)
        positions = read_rotary(five)
        assert_same(positions, read_rotary(make_four(five)))
        if rope != "default":
            assert any(
                not np.allclose(left[1], right[1], rtol=1e-3)
                for left, right in zip(positions, plain, strict=True)
            )


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_scaled_positions_are_those_of_mlx(rope: str) -> None:
    settings = {"type": rope, **ROPES[rope]}
    theirs = import_library_module("models.rope_utils").initialize_rope(
        16, BASE, False, settings, 256
    )
    expected = Rotary.read(theirs)
    assert expected is not None
    ours = RopeConfig.parse("c", {**settings, "rope_theta": BASE}, 16, 256)
    assert expected.is_close(ours.compute_frequencies(), ours.attention_factor)


def test_longrope_is_short_unless_a_longer_context_is_requested() -> None:
    config = make_five("phi3", "longrope")
    usual, long = make_network(config), make_network(config, 65)
    assert (usual.limit, long.limit) == (64, None)
    assert "limited to 64 tokens" in usual.warnings[0] and not long.warnings
    short, extended = read_rotary(config)[0], read_rotary(config, 65)[0]
    factors = (
        np.array(ROPES["longrope"]["short_factor"]),
        np.array(ROPES["longrope"]["long_factor"]),
    )
    np.testing.assert_allclose(short[1] * factors[0], extended[1] * factors[1], rtol=1e-5)


def test_a_null_is_a_value_but_for_the_size_of_a_head() -> None:
    network = make_network({**make_five("deepseek_v3"), "q_lora_rank": None}).network
    assert "q_proj" in network.model.layers[0].self_attn
    null = read_rotary({**make_five("qwen2_moe"), "head_dim": None, "num_key_value_heads": None})
    assert_same(null, read_rotary(make_five("qwen2_moe")))


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_names_of_longrope(name: str) -> None:
    config = make_four(make_five("phi3", "longrope"))
    scaling = {key: config["rope_scaling"][key] for key in ("short_factor", "long_factor")}
    older = {**config, "rope_scaling": {"type": name, **scaling}}
    older["original_max_position_embeddings"] = 64
    assert make_network(older).limit == 64
    assert_same(read_rotary(older), read_rotary(config))


@pytest.mark.parametrize(
    ("kind", "config", "limit"),
    [
        ("mistral", {"sliding_window": 32}, 32),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),
        ("gemma2", {"sliding_window": 64}, 64),
        ("phi3", {"sliding_window": 48}, 48),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 32}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": None}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True}, 32),
        ("qwen3", {"sliding_window": 32, "layer_types": ["full_attention"] * 3}, None),
        ("gemma3_text", {"sliding_window": 32}, None),
    ],
)
def test_windows_that_a_network_lacks_limit_the_context(
    kind: str, config: dict[str, Any], limit: int | None
) -> None:
    usual = {key: value for key, value in make_five(kind).items() if key != "sliding_window"}
    usual |= {"max_position_embeddings": 8192}
    assert make_network({**usual, **config}).limit == limit


@pytest.mark.parametrize(
    ("kind", "config", "text"),
    [
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = .gelu.*computes "silu" or "swish" only'),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "computes null only"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping = null is not"),
        ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit = 9.0"),
        ("llama", {"vocab_size": 1e3}, "vocab_size = 1000.0: must be a whole number"),
        ("qwen3", {"head_dim": 0}, "head_dim = 0: must be"),
        ("qwen3", {"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ("llama", {"tie_word_embeddings": "false"}, "must be true or false"),
        ("llama", {"eos_token_id": "x"}, "eos_token_id = 'x': must be the number of a token"),
        ("qwen3", {"layer_types": "full_attention"}, "must be a list of strings"),
        ("llama", {"rope_theta": "5e3"}, "rope_theta = '5e3': must be a number"),
        ("llama", {"rope_theta": [1, 2]}, r"rope_theta = \[1, 2\]: must be a number"),
        ("llama", {"rope_parameters": {"rope_theta": "5e3"}}, "rope_theta = '5e3'"),
        ("gemma3", {"text_config": {"num_hidden_layers": "2"}}, "num_hidden_layers = '2'"),
        ("starcoder2", {"rope_theta": "5e3"}, "rope_theta = '5e3'"),
        ("qwen2", {"head_dim": 32}, "head_dim = 32 is not supported: the network computes 16"),
        ("llama", {"is_causal": False}, "is_causal = False.*computes true only"),
        ("starcoder2", {"is_causal": False}, "is_causal = False"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5.*whole heads"),
        ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type = 'spiral'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": 3}, "must be an obj"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor = -1"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "repeat"),
        ("gpt2", {"n_layer": None}, "lacks n_layer"),
        # Of networks that are not promised
        ("starcoder2", {"partial_rotary_factor": 0.5}, '"partial_rotary_factor": 0.5.* ignores'),
        ("starcoder2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, '"linear".* ignores'),
        ("starcoder2", {"model_type": "no such"}, "model_type is 'no such'"),
        ("nonesuch", {}, "no network of the type 'nonesuch'"),
        # A module of mlx-lm that would print, and end the process
        ("olmo", {}, "the network olmo of mlx-lm needs the package hf_olmo"),
    ],
)
def test_settings_that_a_network_ignores_are_refused(
    kind: str, config: dict[str, Any], text: str
) -> None:
    usual = make_five(kind) if kind in PROMISED else OTHER | {"model_type": kind}
    with pytest.raises(ModelError, match=text):
        make_network({**usual, **config})


OTHER = {**make_four(make_five("qwen2")), "model_type": "starcoder2"}


def test_a_network_that_is_not_promised_has_a_warning() -> None:
    assert make_network(OTHER).warnings == (
        "the network starcoder2 is not tested: its texts may differ from those of transformers",
    )


def test_a_network_that_fails_with_its_configuration_is_refused() -> None:
    # Its period of layers is longer than the model
    network = make_network({**make_five("gemma3_text"), "num_hidden_layers": 2}).network
    with pytest.raises(ModelError, match=r"does not run with config\.json: IndexError"):
        _measure_token_size(network)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        {"rope_type": "deepseek_yarn", "factor": 2.0},
        {"full_attention": {"rope_theta": 5.0, "rope_type": "proportional"}},
        [5.0, 6.0, 7.0],
        # Of layers that the network does not have
        {"full_attention": {"rope_theta": BASE}, "sliding_attention": {"rope_theta": 5.0}},
    ],
)
def test_settings_that_are_unknown_here_are_left_to_other_networks(parameters: Any) -> None:
    types = {"layer_types": ["full_attention"] * 3, "rope_parameters": parameters}
    theta = {"rope_theta": parameters} if isinstance(parameters, list) else types
    NetworkRope({**OTHER, **theta}, None).apply(make_network(OTHER).network)


def test_a_network_that_reads_the_new_form_only_gets_it_of_the_old_one() -> None:
    old = {**OTHER, "model_type": "ministral3", "rope_theta": 7.0, "rope_scaling": {"type": "yarn"}}
    translated = translate_config(old, {"rope_parameters"})
    assert translated["rope_parameters"] == {"rope_theta": 7.0, "type": "yarn", "rope_type": "yarn"}


def test_the_documentation_lists_the_promised_networks() -> None:
    text = (Path(__file__).parents[2] / "docs/text.md").read_text("utf-8")
    (listed,) = (part for part in text.split("\n\n") if part.startswith("`cohere`"))
    assert re.findall(r"`(\w+)`", listed) == sorted(PROMISED)
