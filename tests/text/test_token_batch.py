"""Texts whose tokens are computed together: each is the one that is made alone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm import library, token_batch
from clowder_aimage.model.mlxlm.cpu_network import accelerate
from clowder_aimage.model.mlxlm.joined_cache import join
from clowder_aimage.model.mlxlm.network_kind import PROMISED
from clowder_aimage.model.text.language_model import Sampling, TextDelta, TextEvent, TextRequest
from tests.text.mlx_models import GREEDY, end_of, text_of, tiny
from tests.text.network_sizes import make_five

PROMPTS = ("the red ball", "the blue cube is under", "x", "the chair and the table is on the ball")
# Networks of mlx-lm that compute attention on their own, or with more than keys and values
ONE_BY_ONE = {"gemma2", "phi", "stablelm", "deepseek_v3"}
TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny(tmp_path_factory.mktemp("batch"))


@pytest.fixture
def rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of texts of each call of the network."""
    counts: list[int] = []
    network = model._batch._network

    def call(tokens: mx.array, cache: Any) -> mx.array:
        counts.append(len(tokens))
        logits: mx.array = network(tokens, cache=cache)
        return logits

    monkeypatch.setattr(model._batch, "_network", call)
    monkeypatch.setattr(model._batch, "_is_joinable", True)
    return counts


def begin(model: Any, prompt: str, **options: Any) -> Generator[TextEvent, None, None]:
    chosen: dict[str, Any] = {"sampling": GREEDY, "max_tokens": TOKENS} | options
    events: Generator[TextEvent, None, None] = model.generate(TextRequest(prompt=prompt, **chosen))
    return events


def take_turns(texts: Sequence[Generator[TextEvent, None, None]]) -> list[list[TextEvent]]:
    """Return all events of texts that are advanced in turns."""
    events: list[list[TextEvent]] = [[] for _ in texts]
    is_open = [True] * len(texts)
    while any(is_open):
        for index, text in enumerate(texts):
            if is_open[index] and (event := next(text, None)) is not None:
                events[index].append(event)
            else:
                is_open[index] = False
    return events


def list_logprobs(events: Sequence[TextEvent]) -> list[float]:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return [token.logprob for delta in deltas for token in delta.tokens]


def test_the_weights_are_read_once_for_all_texts(model: Any, rows: list[int]) -> None:
    alone = [text_of(take_turns([begin(model, prompt)])[0]) for prompt in PROMPTS]
    rows.clear()
    found = take_turns([begin(model, prompt) for prompt in PROMPTS])
    assert [text_of(events) for events in found] == alone
    tokens = sum(end_of(events).tokens for events in found)
    assert max(rows) == len(PROMPTS)
    assert sum(rows) <= tokens + len(PROMPTS) < 2 * tokens
    assert len(rows) <= TOKENS + 2 * len(PROMPTS)


def test_texts_join_and_leave_between_tokens(model: Any, rows: list[int]) -> None:
    """Each keeps its sampler, seed, stop strings, penalties, log probabilities and limit."""
    options: list[dict[str, Any]] = [
        {"sampling": Sampling(temperature=1, seed=5)},
        {"sampling": Sampling(temperature=0, repetition_penalty=1.5), "max_tokens": 30},
        {"alternatives": 3, "max_tokens": 9},
        {"sampling": Sampling(temperature=0.7, top_k=5, seed=6), "max_tokens": 3},
    ]
    requests = list(zip(PROMPTS, options, strict=True))
    alone = [take_turns([begin(model, prompt, **own)])[0] for prompt, own in requests]
    stop = text_of(alone[0])[8:10]
    requests[0][1]["stop"] = (stop,)
    expected = [text_of(events) for events in alone]
    expected[0] = expected[0][: expected[0].index(stop)]
    rows.clear()

    def begin_late(delay: int, prompt: str, own: dict[str, Any]) -> Any:
        for _ in range(delay):
            yield TextDelta("")
        yield from begin(model, prompt, **own)

    found = take_turns([begin_late(3 * at, *request) for at, request in enumerate(requests)])
    assert [text_of(events) for events in found] == expected
    assert max(rows) > 1
    for events, own in zip(found, alone, strict=True):
        assert end_of(events).reason == (end_of(own).reason if own is not alone[0] else "stop")
    assert list_logprobs(found[2]) == pytest.approx(list_logprobs(alone[2]), abs=1e-3)
    assert list_logprobs(found[2])


@pytest.mark.parametrize("lead", [0, 2])
def test_a_closed_text_leaves_the_tokens_that_its_cache_has(tmp_path: Path, lead: int) -> None:
    """Also if others were advanced more often, so that it has a token that was not taken."""
    first, second = tiny(tmp_path / "a"), tiny(tmp_path / "b")
    first._batch._is_joinable = True
    closed, other = begin(first, PROMPTS[3]), begin(first, PROMPTS[1], max_tokens=40)
    for _ in range(5):
        next(closed)
        next(other)
    for _ in range(lead):
        next(other)
    closed.close()
    alone = text_of(take_turns([begin(second, PROMPTS[1], max_tokens=40)])[0])
    assert alone.endswith(text_of(take_turns([other])[0]))
    whole = PROMPTS[3] + text_of(take_turns([begin(second, PROMPTS[3], max_tokens=4)])[0])
    again = take_turns([begin(first, whole)])[0]
    assert end_of(again).cached_tokens > 0
    assert text_of(again) == text_of(take_turns([begin(second, whole)])[0])


def test_an_error_of_a_step_ends_its_texts_only(model: Any, rows: list[int]) -> None:
    texts = [begin(model, prompt) for prompt in PROMPTS[:2]]
    for _ in range(4):
        for text in texts:
            next(text)
    network = model._batch._network

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    model._batch._network = fail
    for text in texts:
        with pytest.raises(MemoryError):
            list(text)
    model._batch._network = network
    assert model._batch._texts == []
    assert end_of(take_turns([begin(model, PROMPTS[0])])[0]).tokens > 0


def test_a_network_that_cannot_join_computes_one_by_one(
    model: Any, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [text_of(events) for events in take_turns([begin(model, one) for one in PROMPTS])]
    assert max(rows) > 1
    rows.clear()
    monkeypatch.setattr(token_batch, "_try_joining", lambda _: False)
    monkeypatch.setattr(model._batch, "_is_joinable", None)
    found = take_turns([begin(model, one) for one in PROMPTS])
    assert [text_of(events) for events in found] == expected
    assert set(rows) == {1}


def make_random(kind: str) -> Any:
    library.enter()
    mx.random.seed(3)
    network = library.make_network(make_five(kind)).network
    mx.eval(network.parameters())
    accelerate(network)
    return network


def test_which_networks_join() -> None:
    is_joinable = {kind: token_batch._try_joining(make_random(kind)) for kind in PROMISED}
    assert {kind for kind, joins in is_joinable.items() if not joins} == ONE_BY_ONE


@pytest.mark.parametrize("kind", ["gemma3_text", "mistral", "gpt_oss", "llama"])
def test_windows_and_positions_are_those_of_each_text(kind: str) -> None:
    """Texts of different lengths, before and after the end of a sliding window of 9."""
    network = make_random(kind)
    caches = library.import_library_module("models.cache")
    lengths = (1, 7, 12)
    together, alone = ([caches.make_prompt_cache(network) for _ in lengths] for _ in range(2))
    for cache, length in zip((*together, *alone), lengths * 2, strict=True):
        network(mx.array([[5 + index for index in range(length)]]), cache=cache)
    for step in range(12):
        tokens = mx.array([[20 + step + row] for row in range(len(lengths))])
        found = network(tokens, cache=join(together))[:, -1]
        for row, cache in enumerate(alone):
            expected = network(tokens[row : row + 1], cache=cache)[:, -1]
            assert mx.allclose(found[row : row + 1], expected, rtol=1e-3, atol=1e-4), (step, row)
