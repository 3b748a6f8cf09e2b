from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from clowder_aimage.errors import NoMemoryError, UnrunnableError, UsageError
from clowder_aimage.model.mlxlm import generation as text_generation
from clowder_aimage.model.mlxlm.model import CachePlan
from clowder_aimage.model.text.language_model import (
    ContextError,
    EmbeddingRequest,
    Sampling,
    TextDelta,
    TextNotice,
    TextRequest,
)
from tests.text.mlx_models import GREEDY, calls_of, chat, end_of, load, text_of, tiny, write
from tests.text.tiny_text import CONTEXT, add_pooling, write_model

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = ("<tool_call>", '{"name": "f", ', '"arguments": {"a": 1}}', "</tool_call>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory.mktemp("mlxlm"))


def test_the_facts_of_a_model(model: Any, tmp_path: Path) -> None:
    assert model.capabilities == {"chat", "completion", "logprobs", "thinking", "tools"}
    assert (model.context, model.parallel, model.dtype) == (CONTEXT, 4, "float32")
    assert "mlx-lm" in model.device
    assert tiny(tmp_path, "qwen2").capabilities == {"chat", "completion", "logprobs"}


def test_a_text_ends_at_its_limit_and_counts_its_tokens(model: Any) -> None:
    end = end_of(write(model, "the red ball", max_tokens=9))
    assert (end.reason, end.tokens) == ("length", 9)
    assert end.prompt_tokens > 1 and end.seconds > 0 and end.prompt_seconds > 0


def test_whole_files_and_tensors_give_the_same_text(tmp_path: Path, model: Any) -> None:
    whole = load(write_model(tmp_path / "m"), whole=True)
    assert text_of(write(whole)) == text_of(write(model))


@pytest.mark.parametrize("wrap", ["_orig_mod.{}", "module._forward_module.{}"])
def test_names_of_a_wrapped_network_are_read(tmp_path: Path, model: Any, wrap: str) -> None:
    path = write_model(tmp_path / "m") / "model.safetensors"
    save_file({wrap.format(name): value for name, value in load_file(path).items()}, path)
    assert text_of(write(load(path.parent))) == text_of(write(model))


def test_thoughts_an_answer_and_a_call(tmp_path: Path) -> None:
    says = ("<think>", "hm, ", "</think>", "I ", "look.", *CALL)
    found = chat(load(write_model(tmp_path / "m", says=says)), tools=(TOOL,))
    assert text_of(found, "thinking") == "hm, ".strip()
    assert text_of(found) == "I look."
    assert [(one.name, one.arguments) for one in calls_of(found)] == [("f", '{"a": 1}')]
    assert end_of(found).reason == "tool_calls"


def test_calls_are_text_without_tools_and_special_tokens_are_hidden(tmp_path: Path) -> None:
    planted = load(write_model(tmp_path / "m", says=("A", "<|im_start|>", "B", *CALL)))
    found = chat(planted)
    assert text_of(found) == "AB" + "".join(CALL) and not calls_of(found)
    assert end_of(found).reason == "stop"
    assert text_of(chat(planted, stop=("B<tool",))) == "A"


def test_the_same_seed_gives_the_same_text_whatever_else_runs(model: Any) -> None:
    options = Sampling(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01, seed=7)
    alone = text_of(write(model, sampling=options))
    assert alone != text_of(write(model, sampling=Sampling(temperature=1.0, seed=8)))
    requests = [
        TextRequest(prompt="the red ball", sampling=one, max_tokens=16)
        for one in (options, Sampling(seed=9), options)
    ]
    open_texts = [model.generate(one) for one in requests]
    texts = ["", "", ""]
    while any(open_texts):
        for index, events in enumerate(open_texts):
            event = next(events, None) if events else None
            if event is None:
                open_texts[index] = None
            elif isinstance(event, TextDelta):
                texts[index] += event.text
    assert texts[0] == texts[2] == alone != texts[1]


def test_penalties_change_what_repeats(model: Any) -> None:
    def drawn(**options: Any) -> list[int]:
        found = chat(model, alternatives=0, sampling=Sampling(temperature=0, **options))
        return [
            hash(token.data) for one in found if isinstance(one, TextDelta) for token in one.tokens
        ]

    usual = drawn()
    assert len(set(usual)) < len(usual)  # it repeats itself
    for option in ("presence_penalty", "frequency_penalty"):
        assert len(set(drawn(**{option: 2.0}))) > len(set(usual)), option
    assert len(set(drawn(repetition_penalty=2.0))) > len(set(usual))


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    greedy = load(write_model(tmp_path / "g", generation={"do_sample": False}))
    assert len({text_of(write(greedy, sampling=Sampling())) for _ in range(3)}) == 1
    sampled = load(write_model(tmp_path / "s"))
    assert len({text_of(write(sampled, sampling=Sampling())) for _ in range(3)}) > 1
    with pytest.raises(UnrunnableError, match=r"generation_config\.json: top_p"):
        load(write_model(tmp_path / "b", generation={"top_p": 7}))


def test_settings_of_generations_that_are_not_computed_are_a_warning(tmp_path: Path) -> None:
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "bad_words_ids": None, "top_k": 50}
    assert load(write_model(tmp_path / "a", generation=neutral)).warnings == ()
    used = {"num_beams": 4, "suppress_tokens": [5], "max_new_tokens": 9}
    model = load(write_model(tmp_path / "b", generation=used))
    said = ("settings of generation_config.json are not used: num_beams, suppress_tokens",)
    assert model.warnings == said
    assert [one.warnings for one in write(model) if isinstance(one, TextNotice)] == [said]


def test_log_probabilities_have_alternatives_in_order(model: Any) -> None:
    found = write(model, alternatives=3, max_tokens=8)
    tokens = [token for one in found if isinstance(one, TextDelta) for token in one.tokens]
    assert len(tokens) == 8
    for token in tokens:
        best = [one.logprob for one in token.alternatives]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert math.isclose(token.logprob, best[0], abs_tol=1e-6)  # greedy


def test_a_conversation_goes_on_with_the_keys_and_values_it_has(tmp_path: Path) -> None:
    first, second = tiny(tmp_path / "a"), tiny(tmp_path / "b")
    prompt = "the red ball is on the table and the blue cube"
    begun = write(first, prompt, max_tokens=24)
    longer = prompt + " is under the chair"
    found, alone = write(first, longer), write(second, longer)
    assert end_of(found).cached_tokens > 0 and end_of(alone).cached_tokens == 0
    assert text_of(found) == text_of(alone)
    again = write(first, prompt, max_tokens=24)  # only the prompt is common: a copy is cut
    assert end_of(again).cached_tokens == end_of(again).prompt_tokens - 1
    assert text_of(again) == text_of(begun)


def test_prompts_of_another_client_are_computed_anew(model: Any) -> None:
    prompt = "the green cube is left of the chair and of the table, and under the ball"
    for owner, is_cached in (("a", False), ("b", False), ("a", True), ("b", True), ("", False)):
        found = write(model, prompt, owner=owner)
        assert (end_of(found).cached_tokens > 0) == is_cached, owner


def test_a_closed_text_is_over_and_leaves_what_it_knows(model: Any) -> None:
    prompt = "a small green circle at the top left of a large yellow square"
    # A random text may end before the fifth token.
    request = TextRequest(prompt=prompt, max_tokens=50, sampling=Sampling(temperature=0))
    events = model.generate(request)
    for _ in range(5):
        next(events)
    events.close()
    assert end_of(write(model, prompt)).cached_tokens > 0


def test_long_prompts_give_way_between_their_parts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_generation, "_PART", 8)
    prompt = "what is the weather in the city today? " * 3
    events = write(model, prompt, max_tokens=1)
    expected = (end_of(events).prompt_tokens - 1) // 8
    assert sum(one == TextDelta("") for one in events) >= expected > 2


def test_prompts_beyond_the_context_are_refused_with_the_numbers(model: Any) -> None:
    with pytest.raises(ContextError, match=rf"has \d+ tokens; .* has {CONTEXT}") as raised:
        write(model, "?" * 2 * CONTEXT)
    assert raised.value.facts["context"] == str(CONTEXT)
    end = end_of(write(model, "?" * (CONTEXT - 3), max_tokens=None))
    assert (end.tokens, end.reason) == (CONTEXT - end.prompt_tokens, "length")


def test_a_prompt_that_is_not_text_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="not characters") as caught:
        model.generate(TextRequest(prompt="the \udcff ball"))
    assert caught.value.facts["field"] == "prompt"
    with pytest.raises(UsageError, match="not characters"):
        chat(model, "\ud800")


@pytest.mark.parametrize(
    "options, field",
    [
        ({"tools": (TOOL,)}, "tools"),
        ({"thinking": True}, "thinking"),
        ({"schema": {}}, "response_format"),
    ],
)
def test_what_a_model_lacks_is_refused_at_once(tmp_path: Path, options: Any, field: str) -> None:
    plain = tiny(tmp_path, "qwen2")
    with pytest.raises(UsageError) as raised:
        plain.generate(TextRequest(messages=({"role": "user", "content": "x"},), **options))
    assert raised.value.facts["field"] == field


def test_a_model_without_a_template_continues_texts_only(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "tokenizer_config.json").write_text("{}")
    base = load(directory)
    assert "chat" not in base.capabilities and end_of(write(base)).tokens
    with pytest.raises(UsageError, match="no chat template"):
        chat(base)


@pytest.mark.parametrize("mode, index", [("lasttoken", -1), ("cls_token", 0)])
def test_embeddings_are_those_that_the_files_state(tmp_path: Path, mode: str, index: int) -> None:
    model = load(add_pooling(write_model(tmp_path / "m"), mode))
    found = model.embed(EmbeddingRequest(("the red ball", "the")))
    assert [len(one) for one in found.vectors] == [64, 64] and found.tokens > 2
    for vector in found.vectors:
        assert math.isclose(sum(x * x for x in vector), 1, rel_tol=1e-5)
    cosine = sum(x * y for x, y in zip(*found.vectors, strict=True))
    assert math.isclose(cosine, 1, abs_tol=1e-5) is (index == 0)  # the first tokens are equal


def test_embeddings_of_a_model_without_pooling_are_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="does not support embedding"):
        model.embed(EmbeddingRequest(("x",)))


@pytest.mark.parametrize(
    "config, text",
    [
        ({"model_type": "unheard_of"}, "no network of the type 'unheard_of'"),
        ({"model_type": "cache"}, "no network of the type 'cache'"),  # a module, but not a model
        ({"model_type": "../x"}, r"model_type is '\.\./x'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ({"num_hidden_layers": 3}, "do not fit config"),
        ({"num_hidden_layers": "2"}, "must be a whole number"),
        ({"hidden_size": 128}, "do not fit config"),
        ({"vocab_size": None}, "lacks vocab_size, which the network of qwen3 needs"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, config: Any, text: str) -> None:
    directory = write_model(tmp_path / "m")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(UnrunnableError, match=text) as raised:
        load(directory)
    assert len(raised.value.message) < 700


def test_memory_that_is_insufficient_is_a_sentence(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    with pytest.raises(NoMemoryError, match="the weights take"):
        load(directory, memory=100_000)


def test_contexts_and_requests_share_the_memory() -> None:
    def plan(memory: int, wanted: int | None = None, parallel: int = 4) -> tuple[int, int]:
        found = CachePlan.of(memory, 100, 32_768, wanted, parallel)
        assert found.context * found.parallel * 100 + found.cached <= memory
        return found.context, found.parallel

    assert plan(1 << 40) == (32_768, 4)
    assert plan(4_000_000) == (8_192, 3)  # a usual context before more requests
    assert plan(400_000) == (3_000, 1)
    assert plan(400_000, wanted=500) == (500, 4)
    with pytest.raises(UsageError, match="room for 3000 tokens"):
        plan(400_000, wanted=5_000)


def test_an_answer_is_continued(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m", "qwen2", says=("three pink", " boxes", " here")))
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "three pink"})
    request = TextRequest(messages=messages, sampling=GREEDY, is_continued=True)
    assert text_of([*model.generate(request)]) == " boxes here"


def test_messages_with_channels(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|start|><|message|><|start|>a\n"
    says = ("<|channel|>", "analysis", "<|message|>", "plan", "<|end|>", "done")
    found = chat(load(write_model(tmp_path / "m", says=says, template=template)))
    assert (text_of(found, "thinking"), text_of(found)) == ("plan", "done")


def test_a_template_of_parts_gets_parts_and_unread_options_are_named(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}\n"
    )
    model = load(write_model(tmp_path / "m", "qwen2", template=template))
    found = chat(model, "a red ball", template_options={"x": 1}, max_tokens=1)
    assert found[0] == TextNotice(ignored=("chat_template_kwargs.x",))
    assert end_of(found).prompt_tokens > end_of(chat(model, "a", max_tokens=1)).prompt_tokens
