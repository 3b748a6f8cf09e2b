"""Prompts that a language model enhances: the request, and the prompt in its answer."""

from __future__ import annotations

import pytest

from clowder_aimage.errors import ModelError
from clowder_aimage.model.text.enhancement import (
    ANY,
    INSTRUCTION,
    build_enhancement_request,
    collect_prompt,
    extract_prompt,
)
from clowder_aimage.model.text.language_model import TextDelta


def test_a_request_has_the_seed_and_the_models_own_sampling() -> None:
    request = build_enhancement_request("a fox", 7)
    assert [one["content"] for one in request.messages] == [INSTRUCTION, "a fox"]
    assert request.sampling.seed == 7 and request.sampling.temperature is None
    assert request.thinking is False
    other = build_enhancement_request(" ", 7, "Be wild.")
    assert [one["content"] for one in other.messages] == ["Be wild.", ANY]
    assert other.sampling.temperature is not None


@pytest.mark.parametrize(
    ("answer", "prompt"),
    [
        ("A red fox\n\nin the  snow.\n", "A red fox in the snow."),
        ("<think>\nhm\n</think>\n\nA fox.", "A fox."),
        ("hm</think>A fox.", "A fox."),
        ("<think>never ends", ""),
        ('"A fox."', "A fox."),
        ("**Prompt:** “A fox.”", "A fox."),
        ("### Enhanced prompt:\nA fox.", "A fox."),
        ("```text\nA fox.\n```", "A fox."),
        ('**"A fox."**', "A fox."),
        ('"STOP" in red above a sign "GO"', '"STOP" in red above a sign "GO"'),
        ('A sign reads "FOX"', 'A sign reads "FOX"'),
        ('"', '"'),
        ("A prompt: painter at work", "A prompt: painter at work"),
    ],
)
def test_what_surrounds_a_prompt_is_removed(answer: str, prompt: str) -> None:
    assert extract_prompt(answer) == prompt


def test_an_answer_without_a_prompt_is_an_error() -> None:
    assert collect_prompt([TextDelta("hm", "thinking"), TextDelta("A "), TextDelta("fox")]) == (
        "A fox"
    )
    with pytest.raises(ModelError, match="no prompt"):
        collect_prompt([TextDelta("only thoughts", "thinking"), TextDelta("<think></think> ")])
