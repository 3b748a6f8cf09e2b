"""Names of tensors in networks that a wrapper has saved."""

from __future__ import annotations

import pytest

from clowder_aimage.tensor.wrapper_name import strip_common_wrappers, strip_wrappers


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("model._orig_mod.norm.weight", "model.norm.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("_fsdp_wrapped_module._fpw_module.norm.weight", "norm.weight"),
        ("_forward_module._orig_mod.norm.weight", "norm.weight"),
        ("lora_unet__orig_mod_layers_0_attention", "lora_unet_layers_0_attention"),
        ("lora_unet_layers_0__orig_mod_attention", "lora_unet_layers_0_attention"),
        ("model.my_orig_mod.weight", "model.my_orig_mod.weight"),
        ("module.norm.weight", "module.norm.weight"),
    ],
)
def test_words_of_wrappers_are_removed(name: str, plain: str) -> None:
    assert strip_wrappers(name) == plain


def test_a_word_at_the_beginning_is_a_wrapper_if_all_names_have_it() -> None:
    wrapped = ["module._orig_mod.a.weight", "module.module.b.weight"]
    assert [*strip_common_wrappers(wrapped).values()] == ["a.weight", "module.b.weight"]
    assert strip_common_wrappers(["module.module.a", "module.module.b"])["module.module.a"] == "a"
    mixed = ["module.a.weight", "norm.weight"]
    assert [*strip_common_wrappers(mixed).values()] == mixed


def test_names_that_would_be_equal_stay() -> None:
    names = ["_orig_mod.a", "a"]
    assert [*strip_common_wrappers(names)] == [*strip_common_wrappers(names).values()] == names
