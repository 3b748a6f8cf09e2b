"""``run`` with a language model: one answer, a conversation, in this process or in a worker."""

from __future__ import annotations

import json
import os
import pty
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clowder_aimage.model.text.language_model import (
    LENGTH,
    ContextError,
    TextDelta,
    TextEnd,
    TextRequest,
)
from tests.cli.test_remote_verbs import at
from tests.process import PROGRAM, Aimage, spawn_at
from tests.program import need_package
from tests.scripted_worker import Asked, Says, ScriptedWorker, says
from tests.text.fake_model import Answer, FakeModel
from tests.text.tiny_text import write_model

__all__ = ["at"]
Talker = Callable[..., tuple[Aimage, FakeModel]]
Typed = Callable[..., str]


@pytest.fixture(scope="session")
def talker_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture
def talker(
    aimage: Callable[..., Aimage], talker_files: Path, monkeypatch: pytest.MonkeyPatch
) -> Talker:
    """Return a command line with the language model x, which is a fake with an answer."""

    def make(answer: Callable[[TextRequest], Answer] | Answer) -> tuple[Aimage, FakeModel]:
        fake = FakeModel(answer if callable(answer) else lambda _: answer)
        fake.take_over(monkeypatch)
        here = aimage()
        here("create", "x", talker_files)
        return here, fake

    return make


def test_the_answer_is_on_stdout_and_statistics_on_stderr(talker: Talker) -> None:
    here, fake = talker(["Red ", "and\n", "blue."])
    assert here("run", "x", "which", "colours?").out == "Red and\nblue.\n"
    assert [*fake.asked[0].messages] == [{"role": "user", "content": "which colours?"}]
    said = here("run", "x", "-v", stdin="which colours?\n")
    assert said.out == "Red and\nblue.\n"
    assert "prompt: 2 tokens in 0.25 s (8.0 tokens/s)" in said.err
    assert "answer: 3 tokens in 0.50 s (6.0 tokens/s)" in said.err
    assert "first piece after" in said.err and "loading" in said.err


def test_options_become_fields_of_the_request(talker: Talker, tmp_path: Path) -> None:
    here, fake = talker(["{}"])
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    here(
        *("run", "x", "a", "--system", "be brief", "--max-tokens", 7, "--temperature", 0.5),
        *(
            "--top-p",
            0.9,
            "--top-k",
            5,
            "--min-p",
            0.1,
            "--seed",
            3,
            "--stop",
            "END",
            "--stop",
            "",
            "--stop",
            ".",
        ),
        *("--no-think", "--schema", schema, "--dtype", "f32", "--memory", "1GiB"),
    )
    (asked,) = fake.asked
    assert asked.messages[0] == {"role": "system", "content": "be brief"}
    own = asked.sampling
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (asked.max_tokens, asked.stop, asked.thinking) == (7, ("END", "."), False)
    assert asked.schema == {"type": "object"}
    assert (fake.loads[0]["dtype"], fake.loads[0]["memory"]) == ("float32", 1 << 30)
    here("run", "x", "a", "--schema", "json", "--think")
    assert (fake.asked[1].schema, fake.asked[1].thinking) == ({}, True)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--steps", 4), 2, "--steps applies to pictures; x:latest is a language model"),
        (("-n", 2), 2, "-n applies to pictures"),
        (("--temperature", -1), 2, "temperature must be between 0 and 100, not -1.0"),
        (("--stop", "x" * 1025), 2, "stop has up to 16 strings"),
        (("--schema", "missing.json"), 3, "--schema: missing.json not found"),
        (("--schema", "/"), 2, "--schema: cannot read /"),
    ],
)
def test_wrong_options_are_refused_before_a_load(
    talker: Talker, options: tuple[object, ...], code: int, message: str
) -> None:
    here, fake = talker(["a"])
    assert message in here("run", "x", "a", *options, code=code).err
    assert not fake.loads


def test_a_schema_must_be_a_json_object(talker: Talker) -> None:
    here, _ = talker(["a"])
    for text, message in (("[]", "is not a JSON object"), ("{", "--schema: ")):
        (here.home / "s.json").write_text(text)
        assert message in here("run", "x", "a", "--schema", "s.json", code=2).err


def test_text_options_are_refused_with_an_image_model(stocked: Callable[[], Aimage]) -> None:
    said = stocked()("run", "x", "a fox", "--top-p", 0.5, code=2)
    assert "--top-p applies to language models; x:latest generates pictures" in said.err


def test_json_prints_one_object(talker: Talker) -> None:
    end = TextEnd(LENGTH, 9, 2, 4, 0.5, 0.25)
    here, _ = talker([TextDelta("hm", "thinking"), "a\x1b", "b", end])
    said = here("run", "x", "a", "--json")
    assert said.value | {"firstPieceSeconds": 0} == {
        "reference": "x:latest",
        "text": "a\x1bb",
        "thinking": "hm",
        "reason": "length",
        "promptTokens": 9,
        "cachedTokens": 4,
        "tokens": 2,
        "promptSeconds": 0.5,
        "seconds": 0.25,
        "firstPieceSeconds": 0,
    }
    assert "the answer is cut off after 2 tokens" in said.err
    assert here("run", "x", "a", "--format", "{{ tokens }}").out == "2\n"


def test_thoughts_are_printed_aside(talker: Talker) -> None:
    here, _ = talker([TextDelta("hm, ", "thinking"), TextDelta("red", "thinking"), "Red.\n"])
    said = here("run", "x", "a")
    assert said.out == "Red.\n" and "hm, red\n" in said.err
    assert "hm" not in here("run", "x", "a", "-q").err


def test_warnings_of_a_model_are_printed_once(talker: Talker, typed: Typed) -> None:
    here, fake = talker(["Red."])
    fake.warnings = ("the network x is not tested",)
    assert "warning: the network x is not tested\n" in here("run", "x", "-q", "which?").err
    assert typed(here, "a\n", "b\n").count("not tested") == 1


def test_packing_a_model_that_cannot_run_is_a_warning(
    aimage: Callable[..., Aimage], tmp_path: Path
) -> None:
    need_package("mlx_lm")
    model = write_model(tmp_path / "m", model_type="unheard")
    said = aimage()("create", "-q", "x", model)
    assert said.out.startswith("sha256:")
    assert said.err == (
        "warning: the model is packed, but cannot run here: mlx-lm has no network of the type "
        "'unheard'\n"
    )


def test_errors_of_a_model_have_their_exit_codes(talker: Talker) -> None:
    here, _ = talker([ContextError(900, 512)])
    said = here("run", "x", "a", code=2)
    assert "the prompt has 900 tokens; the context of the model has 512" in said.err
    here, _ = talker(["begun ", KeyboardInterrupt()])
    said = here("run", "x", "a", code=130)
    assert said.out == "begun \n"
    assert "not a language model" not in said.err


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Return a function that types lines into a conversation with x."""

    def run(here: Aimage, *lines: str | BaseException) -> str:
        rest = iter(lines)

        def read(_: str) -> str:
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("clowder_aimage.cli.verbs.run.read_prompt", lambda _: None)
        return here("run", "x").err

    return run


def test_a_conversation_is_remembered_until_it_is_cleared(talker: Talker, typed: Typed) -> None:
    here, fake = talker(lambda asked: [f"answer {len(asked.messages)}"])
    said = typed(here, "one", '"""two', "lines", '"""', "/clear", "/set system short", "three")
    contents = [[one["content"] for one in asked.messages] for asked in fake.asked]
    assert contents == [["one"], ["one", "answer 1", "two\nlines"], ["short", "three"]]
    assert "the conversation is forgotten" in said and len(fake.loads) == 1


def test_an_interrupt_keeps_the_conversation_and_an_error_forgets_the_question(
    talker: Talker, typed: Typed
) -> None:
    answers: dict[str, Answer] = {
        "long": ["begun", KeyboardInterrupt()],
        "wrong": [ContextError(900, 512)],
    }
    here, fake = talker(lambda asked: answers.get(asked.messages[-1]["content"], ["ok"]))
    said = typed(here, "long", "wrong", "/set max-tokens 3", "last")
    contents = [one["content"] for one in fake.asked[-1].messages]
    assert contents == ["long", "begun", "last"] and fake.asked[-1].max_tokens == 3
    assert "cancelled" in said and "the prompt has 900 tokens" in said


def test_the_commands_of_a_conversation_are_listed(talker: Talker, typed: Typed) -> None:
    said = typed(
        talker(["a"])[0], "/help", "/set temperature 0.5", "/show", "/again", "/set steps 2"
    )
    assert "forget the conversation" in said and "temperature 0.5" in said
    assert "unknown command /again" in said and "unknown option steps" in said


# -- in a worker


def event(value: object) -> bytes:
    """Return an event of OpenAI's streams."""
    return f"data: {json.dumps(value)}\n\n".encode()


def answering(asked: Asked) -> Says:
    if asked.path != "/v1/chat/completions":
        return says({"models": []})
    pieces: list[dict[str, object]] = [{"reasoning_content": "hm"}, {"content": "Re"}]
    chunks = [event({"choices": [{"delta": one}]}) for one in (*pieces, {"content": "d."})]
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": None}
    end = [event({"choices": [{"delta": {}, "finish_reason": "stop"}]})]
    times = {"prompt_ms": 20.0, "predicted_ms": 500}
    last = {"choices": [], "usage": usage} | ({"timings": times} if b'"seed"' in asked.body else {})
    end += [event(last), b"data: [DONE]\n\n"]
    return Says([*chunks, *end], 200, {"Content-Type": "text/event-stream"})


def test_a_worker_answers_by_openais_api(at: Callable[[ScriptedWorker], Aimage]) -> None:
    worker = ScriptedWorker(answering)
    worker.capabilities = ("completion",)
    with worker.running():
        here = at(worker)
        said = here("run", "x", "a?", "--seed", 5, "--max-tokens", 9, "--no-think", "-v")
        assert said.out == "Red.\n" and "hm\n" in said.err
        assert f"answering on the worker at http://{worker.host}" in said.err
        assert "prompt: 4 tokens in 0.02 s (200.0 tokens/s)\n" in said.err  # the worker's time
        assert "answer: 2 tokens in 0.50 s (4.0 tokens/s)\n" in said.err
        value = here("run", "x", "a?", "--json", "--schema", "json").value
        assert (value["promptSeconds"], value["seconds"]) == (0.0, 0.0)  # it states none
        assert "does not apply to a worker" in here("run", "x", "a", "--dtype", "f32", code=2).err
    assert worker.asked[0].value == {
        "model": "x:latest",
        "messages": [{"role": "user", "content": "a?"}],
        "seed": 5,
        "max_completion_tokens": 9,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert worker.asked[1].value["response_format"] == {"type": "json_object"}
    assert (value["text"], value["promptTokens"], value["tokens"]) == ("Red.", 4, 2)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([event({"choices": [{"delta": {"content": "Re"}}]})], "before the answer was complete"),
        ([event({"choices": [{"delta": 1}]})], "expected a piece of an answer"),
        ([event({"error": {"message": "out of memory", "type": "server_error"}})], "out of memory"),
    ],
)
def test_answers_that_a_worker_breaks_off_are_errors(
    at: Callable[[ScriptedWorker], Aimage], pieces: list[bytes], message: str
) -> None:
    worker = ScriptedWorker(lambda _: Says(pieces))
    worker.capabilities = ("completion",)
    with worker.running():
        said = at(worker).attempt("run", "x", "a?")
    assert said.code and message in said.err


class Screen:
    """A terminal of which what a child has written is read up to a text."""

    def __init__(self, master: int) -> None:
        self._master, self.shown = master, ""

    def read_until(self, text: str) -> None:
        """Read until a text is shown, and forget what precedes it."""
        while text not in self.shown:
            assert select.select([self._master], [], [], 60)[0], self.shown
            self.shown += os.read(self._master, 1 << 16).decode()
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    def endless() -> Iterator[bytes]:
        yield event({"choices": [{"delta": {"content": "It is re"}}]})
        while True:
            time.sleep(0.01)
            yield b": keep-alive\n\n"

    def script(asked: Asked) -> Says:
        if asked.path != "/v1/chat/completions" or len(asked.value["messages"]) > 1:
            return answering(asked)
        return Says(endless(), 200, {"Content-Type": "text/event-stream"})

    worker = ScriptedWorker(script)
    worker.capabilities = ("completion",)
    with worker.running():
        here = at(worker)
        master, slave = pty.openpty()
        child = spawn_at(slave, [*PROGRAM, "run", "x"], env=here.env(), cwd=here.home)
        screen = Screen(master)
        screen.read_until(">>> ")
        screen.type("which?\n")
        screen.read_until("It is re")
        screen.type("\x03")
        screen.read_until("cancelled; /bye or Ctrl-D ends")
        assert worker.left.wait(60)  # the worker computes it no longer
        screen.read_until(">>> ")
        screen.type("go on\n")
        screen.read_until("Red.")
        screen.read_until(">>> ")
        screen.type("half a line")
        screen.read_until("half a line")
        screen.type("\x03")
        screen.read_until("cancelled; /bye or Ctrl-D ends")
        screen.read_until(">>> ")
        screen.type("\x04")
        assert child.wait(60) == 0
        os.close(master)
    last = [one.value["messages"] for one in worker.asked if b"messages" in one.body][-1]
    assert [one["content"] for one in last] == ["which?", "It is re", "go on"]
