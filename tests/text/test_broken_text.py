"""Texts go on in another process as if nothing had happened, with both runtimes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.model.llama.request import split_drawn_tokens
from clowder_aimage.model.text.language_model import (
    LENGTH,
    STOP,
    TOOL_CALLS,
    DrawnTokens,
    LanguageModel,
    Sampling,
    TextDelta,
    TextEnd,
    TextEvent,
    TextRequest,
    ToolCall,
)
from tests.text import llama_models, mlx_models
from tests.text.broken_text import write_broken, write_whole
from tests.text.llama_models import complete, write_plain
from tests.text.tiny_gguf import write_gguf
from tests.text.tiny_text import write_model

QUESTION = ({"role": "user", "content": "what is the weather?"},)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = ("<tool_call>", '{"name": "look", ', '"arguments": {"at": 1}}', "</tool_call>")
THOUGHTS = ("<think>", "hm ", "so", "</think>", "I ", "look. ")
SCHEMA = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 4, "maxItems": 4}


@pytest.fixture(scope="module", params=["mlx-lm", "llama.cpp"])
def load(request: pytest.FixtureRequest) -> Callable[..., LanguageModel]:
    def of_gguf(path: Path, **how: Any) -> LanguageModel:
        return llama_models.load(write_gguf(path.with_suffix(".gguf"), path), **how)

    return mlx_models.load if request.param == "mlx-lm" else of_gguf


@pytest.fixture(scope="module")
def model(load: Any, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(write_plain(tmp_path_factory.mktemp("plain") / "model"))


def counts(events: list[TextEvent]) -> tuple[str, int, int]:
    end = events[-1]
    assert isinstance(end, TextEnd) and end.cached_tokens <= end.prompt_tokens
    return end.reason, end.prompt_tokens, end.tokens


def text_of(events: list[TextEvent]) -> str:
    return "".join(one.text for one in events if isinstance(one, TextDelta))


def test_the_rest_is_that_of_an_unbroken_text(model: LanguageModel) -> None:
    request = complete("the red ball", 40)
    whole = write_whole(model, request)
    broken, begun = write_broken(model, request, 1, 7, 30)
    assert text_of(broken) == text_of(whole) and counts(broken) == counts(whole)
    assert [one.count for one in begun] == [1, 7, 30]
    assert all(isinstance(number, int) for number in begun[-1].numbers)


def test_log_probabilities_are_complete(model: LanguageModel) -> None:
    request = complete("the red ball", 16, alternatives=1)
    (whole, _), ((broken, _), _) = write_whole(model, request), write_broken(model, request, 5)
    assert isinstance(whole, TextDelta) and isinstance(broken, TextDelta)
    assert [one.text for one in broken.tokens] == [one.text for one in whole.tokens]
    expected = [one.logprob for one in whole.tokens]
    assert [one.logprob for one in broken.tokens] == pytest.approx(expected, abs=0.05)


def test_a_stop_string_may_span_two_processes(model: LanguageModel) -> None:
    whole = text_of(write_whole(model, complete("the", 32)))
    place = len(text_of(write_whole(model, complete("the", 9))))
    stop = whole[place - 2 : place + 2]
    for alternatives in (None, 0):
        request = complete("the", 32, stop=(stop,), alternatives=alternatives)
        broken, _ = write_broken(model, request, 9)
        assert text_of(broken) == whole[: whole.index(stop)]
        assert counts(broken)[0] == STOP
        assert counts(broken) == counts(write_whole(model, request))


@pytest.mark.parametrize("context", [256, 40])  # a multiple of llama.cpp's step, or not
def test_a_text_that_was_complete_ends(load: Any, tmp_path: Path, context: int) -> None:
    """Its tokens, or those of the context, were drawn, but the end was not reported."""
    model = load(write_plain(tmp_path / "model"), context=context)
    prompt = "the red ball " * (3 * context // 16)
    for most in (8, None, 3 * context):
        request = replace(complete(prompt), max_tokens=most)
        whole = write_whole(model, request)
        reason, begin, tokens = counts(whole)
        assert reason == LENGTH and tokens == min(most or context, context - begin)
        broken, _ = write_broken(model, request, tokens)
        assert text_of(broken) == text_of(whole) and counts(broken) == counts(whole)


def test_drawn_tokens_do_not_repeat_the_beginning(model: LanguageModel) -> None:
    """The draws go on too; with equal probabilities the same ones would give the same tokens."""
    request = complete("the", 40, sampling=Sampling(temperature=100, seed=7, top_k=0, top_p=1))
    begin = text_of(write_whole(model, replace(request, max_tokens=20)))
    (broken, end), _ = write_broken(model, request, 20)
    assert isinstance(broken, TextDelta) and isinstance(end, TextEnd)
    assert broken.text.startswith(begin) and end.tokens == 40
    rest = broken.text.removeprefix(begin)
    assert sum(one == other for one, other in zip(begin, rest, strict=False)) < len(rest) / 2


@pytest.mark.parametrize("tools", [(LOOK,), ()])
def test_thoughts_and_calls_may_be_broken_anywhere(load: Any, tmp_path: Path, tools: Any) -> None:
    model = load(write_model(tmp_path / "model", says=(*THOUGHTS, *CALL)))
    request = TextRequest(QUESTION, tools=tools, max_tokens=40, sampling=Sampling(temperature=0))
    whole = write_whole(model, request)
    thought, answer = (one for one in whole if isinstance(one, TextDelta))
    assert (thought.text, thought.kind) == ("hm so", "thinking")
    assert answer.text == "I look. " + ("" if tools else "".join(CALL))
    calls = [ToolCall("look", '{"at": 1}')] if tools else []
    assert whole[2:-1] == calls and counts(whole)[0] == (TOOL_CALLS if tools else STOP)
    for count in range(1, counts(whole)[2] + 1):
        broken, _ = write_broken(model, request, count)
        assert broken[:-1] == whole[:-1], count
        assert counts(broken) == counts(whole), count


def test_penalties_and_draws_of_mlx_lm_go_on(tmp_path: Path) -> None:
    model = mlx_models.load(write_model(tmp_path / "model"))
    options = Sampling(seed=7, frequency_penalty=1.0, presence_penalty=1.0, repetition_penalty=1.5)
    for temperature in (0, 1):
        sampling = replace(options, temperature=temperature)
        request = complete("the red ball", 48, sampling=sampling)
        broken, _ = write_broken(model, request, 11, 30)
        assert text_of(broken) == text_of(write_whole(model, request))


def test_answers_in_a_schema_go_on(tmp_path: Path) -> None:
    model = llama_models.load(write_gguf(tmp_path / "model.gguf", write_plain(tmp_path / "model")))
    request = complete("the", 200, schema=SCHEMA, sampling=Sampling(seed=3))
    broken, begun = write_broken(model, request, 4, 12)
    assert begun[0].text and begun[1].text.startswith(begun[0].text)
    assert set(json.loads(text_of(broken))) <= {"red", "blue"} and counts(broken)[0] == STOP


def test_characters_of_several_tokens_take_the_place_of_their_numbers() -> None:
    def answer(text: str, tokens: list[int], count: int, reason: str | None = None) -> Any:
        stated = {"tokens": tokens, "tokens_predicted": count}
        return {"choices": [{"text": text, "finish_reason": reason}], "__verbose": stated}

    answers = [
        answer("", [], 0),  # about the prompt
        answer("a", [5], 1),
        answer("b\U0001f388", [9], 4),  # the numbers of two tokens are not stated
        answer("", [3], 5),  # hidden
        answer("", [], 6, "stop"),
    ]
    shown, hidden = split_drawn_tokens(answers, 0)
    assert shown == DrawnTokens((5, "b\U0001f388"), 4, "ab\U0001f388")
    assert hidden == DrawnTokens((3,), 1)
