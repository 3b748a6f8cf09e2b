"""``run`` of an AImage that the store lacks: it is loaded while it arrives."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable

import pytest

from tests.model_script import ModelScript
from tests.process import Aimage, Done
from tests.scripted import Answer, ScriptedRegistry

pytest.importorskip("mlx")

from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.prompt_encoder import PromptEncoder

WORDS = ("a fox", "--steps", 1, "--seed", 1, "--size", "32x32", "-o", "fox.png")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> ModelScript:
    return ModelScript.of_tiny(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def model(packed: ModelScript) -> ModelScript:
    return ModelScript(packed.manifest, packed.blobs, packed.names)


def drawn(here: Aimage, host: str, *options: object, code: int = 0) -> Done:
    return here("run", f"{host}/team/model", *WORDS, *options, code=code)


def test_the_prompt_is_encoded_while_the_transformer_arrives(
    aimage: Callable[..., Aimage], model: ModelScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = threading.Event(), PromptEncoder.encode

    def noted(prompts: PromptEncoder, prompt: str) -> mx.array:
        features = encode(prompts, prompt)
        mx.eval(features)
        encoded.set()
        return features

    def held() -> Answer | None:
        return None if encoded.wait(60) else Answer(404)

    monkeypatch.setattr(PromptEncoder, "encode", noted)
    model.answers[model.last("transformer")] = held
    with ScriptedRegistry(model).running() as registry:
        here = aimage()
        drawn(here, registry.host)
        early = (here.home / "fox.png").read_bytes()
        assert "team/model" in here("ls").out
        there = aimage("other")
        there("pull", f"{registry.host}/team/model")
        drawn(there, registry.host)
        assert (there.home / "fox.png").read_bytes() == early


def test_blobs_are_fetched_in_the_order_of_their_use(
    aimage: Callable[..., Aimage], model: ModelScript
) -> None:
    with ScriptedRegistry(model).running() as registry:
        here = aimage()
        settings = {"registries": {registry.host: {"jobs": 1}}}
        (here.home / "config.json").write_text(json.dumps(settings))
        here.environment["AIMAGE_CONFIG"] = str(here.home / "config.json")
        drawn(here, registry.host)
    tensors = [
        name for name in model.names.values() if not name.endswith((".json", ".jinja", ".md"))
    ]
    fetched = [name for name in model.asked if name in tensors]
    assert len(fetched) == len(set(tensors))
    parts = [name.partition("/")[0] for name in fetched]
    assert list(dict.fromkeys(parts)) == ["text_encoder", "transformer", "vae"]
    assert parts == sorted(parts)
    files = [place for place, name in enumerate(model.asked) if name not in tensors]
    assert max(files) < len(files)


@pytest.mark.parametrize(
    ("answer", "code"), [(Answer(404), 3), (Answer(body=b"damaged"), 5)], ids=["gone", "damaged"]
)
def test_a_failed_pull_fails_the_run_and_is_resumed(
    aimage: Callable[..., Aimage], model: ModelScript, answer: Answer, code: int
) -> None:
    name = model.last("vae")
    model.answers[name] = lambda: Answer(answer.status, {}, answer.body.ljust(model.size(name)))
    with ScriptedRegistry(model).running() as registry:
        here = aimage()
        failed = drawn(here, registry.host, code=code)
        assert len(failed.err.splitlines()) <= 5
        assert here("ls", "--json").value == []
        assert not (here.home / "fox.png").exists()
        model.answers.clear()
        model.asked.clear()
        drawn(here, registry.host)
        assert name in model.asked
        assert len(model.asked) < len(model.names) // 2


def test_an_interrupt_ends_the_pull_too(aimage: Callable[..., Aimage], model: ModelScript) -> None:
    reached, released = threading.Event(), threading.Event()

    def held() -> Answer:
        reached.set()
        released.wait(60)
        return Answer(404)

    model.answers[model.last("transformer")] = held
    with ScriptedRegistry(model).running() as registry:
        here = aimage()
        process = here.start("run", f"{registry.host}/team/model", *map(str, WORDS))
        assert reached.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        released.set()
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert errors.splitlines()[-1].endswith("interrupted; complete blobs are kept")
        assert here("ls", "--json").value == []
        model.answers.clear()
        drawn(here, registry.host)


def test_a_model_that_cannot_be_run_is_refused_before_its_weights_are_fetched(
    aimage: Callable[..., Aimage], model: ModelScript
) -> None:
    reached = threading.Event()
    model.answers[model.last("vae")] = lambda: None if reached.wait(60) else Answer(404)
    with ScriptedRegistry(model).running() as registry:
        here = aimage()
        failed = here("run", f"{registry.host}/team/model", "a fox", "--size", "33x32", code=2)
        reached.set()
        assert "multiple of 16" in failed.err
        assert here("ls", "--json").value == []
