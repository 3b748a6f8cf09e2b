"""``aimage embed``: vectors and cosines, in this process or in a worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_remote_verbs import at
from tests.process import Aimage
from tests.program import need_package
from tests.scripted_worker import Asked, Says, ScriptedWorker, says
from tests.text.test_ability import change, write_gguf
from tests.text.tiny_encoder import WIDTH, write_encoder, write_json
from tests.text.tiny_text import write_model

__all__ = ["at"]
need_package("mlx_lm")
PROMPTS = {"prompts": {"query": "the red: "}}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Aimage:
    """Return a command line with an encoder x, and other models."""
    home = tmp_path_factory.mktemp("embed")
    here = Aimage(home, home / "store")
    write_json(write_encoder(home / "x") / "config_sentence_transformers.json", PROMPTS)
    here("create", "-q", "x", home / "x")
    here("create", "-q", "modern", change(write_encoder(home / "m"), model_type="modernbert"))
    here("create", "-q", "words", write_gguf(home / "w", []))
    here("create", "-q", "chat", write_model(home / "c"))
    return here


def test_the_vector_of_a_text_and_the_cosines_of_several(here: Aimage) -> None:
    numbers = [float(number) for number in here("embed", "x", "the red ball").out.split()]
    assert len(numbers) == WIDTH and abs(sum(x * x for x in numbers) - 1) < 1e-5
    done = here("embed", "x", "the red ball", "the red ball", "a chair\n\x1b that is a long text")
    head, first, *_ = done.out.splitlines()
    assert head.split() == ["TEXT", "1", "2", "3"]
    assert first.startswith("1  the red ball") and first.split()[-3:-1] == ["1.0000", "1.0000"]
    assert "\x1b" not in done.out and "a chair \N{REPLACEMENT CHARACTER} that is a" in done.out


def test_lines_of_stdin_as_json(here: Aimage) -> None:
    value = here("embed", "x", "-", "--json", stdin="the red ball\r\na chair\n").value
    one = here("embed", "x", "a chair", "--json").value
    assert (value["reference"], value["dimensions"], len(value["vectors"])) == (
        "x:latest",
        WIDTH,
        2,
    )
    assert value["tokens"] > one["tokens"] > 2
    product = sum(x * y for x, y in zip(value["vectors"][1], one["vectors"][0], strict=True))
    assert abs(product - 1) < 1e-6
    many = here("embed", "x", stdin="a\n" * 70)
    assert many.out == f"70 vectors of {WIDTH} numbers; --json prints them\n"


def test_prompts_and_cut_texts(here: Aimage) -> None:
    plain, prompted = (
        here("embed", "x", text, "--json", *more).value["vectors"]
        for text, more in (("the red: ball", ()), ("ball", ("--prompt", "query")))
    )
    assert plain == prompted
    done = here("embed", "x", "ball " * 99, "a", "--json")
    assert done.value["cut"] == 1
    assert "1 of 2 texts were cut: the model reads 40 tokens of a text" in done.err


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (("embed", "x"), "", 2, "stdin has no text"),
        (("embed", "x", "a", " "), "", 2, "text 2 is empty"),
        (("embed", "x", "-"), "a\n\nb\n", 2, "line 2 is empty"),
        (("embed", "x", "a", "--prompt", "y"), "", 2, "no prompt 'y'; its prompts: query"),
        (("embed", "chat", "a"), "", 2, "chat:latest computes no embeddings"),
        (("embed", "modern", "a"), "", 1, "no network of the type 'modernbert'"),
        (("embed", "words", "a"), "", 1, "a vocabulary and no weights"),
        (("run", "words", "a"), "", 1, "words:latest cannot run here: it has a vocabulary"),
        (("run", "x", "a"), "", 2, "aimage embed x:latest TEXT..."),
        (("run", "modern", "a"), "", 2, "aimage embed modern:latest TEXT..."),
    ],
)
def test_refusals_before_a_load(
    here: Aimage, arguments: tuple[str, ...], stdin: str, code: int, message: str
) -> None:
    done = here(*arguments, code=code, stdin=stdin)
    assert message in done.err and not done.out
    assert "loading" not in done.err or "no prompt" in message


def test_show_and_ls_have_the_capabilities(here: Aimage) -> None:
    listed = {row["reference"]: row["capabilities"] for row in here("ls", "--json").value}
    assert listed["x:latest"] == ["embedding"] and "chat" in listed["chat:latest"]
    assert listed["modern:latest"] == listed["words:latest"] == []
    assert here("show", "x", "--json").value["capabilities"] == ["embedding"]
    value = here("show", "words", "--json").value
    assert (value["capabilities"], value["obstacle"]) == ([], "it has a vocabulary and no weights")
    assert "capabilities none here: mlx-lm has no network" in here("show", "modern").out


def embed_remotely(asked: Asked) -> Says:
    data = [{"embedding": [float(len(text)), 0.5]} for text in asked.value["input"]]
    usage = {"prompt_tokens": len(data)}
    return says({"data": data, "usage": usage, "warnings": ["the text was cut: by it"]})


def test_a_worker_computes(at: Callable[[ScriptedWorker], Aimage]) -> None:
    worker = ScriptedWorker(embed_remotely)
    worker.capabilities = ("embedding",)
    with worker.running():
        done = at(worker)("embed", "x", "--json", "--prompt", "query", stdin="ab\n" * 70)
        assert at(worker)("run", "x", "a", code=2).err.count("aimage embed x:latest") == 1
    assert done.value["vectors"] == [[2.0, 0.5]] * 70 and done.value["tokens"] == 70
    assert [len(asked.value["input"]) for asked in worker.asked] == [64, 6]
    assert {asked.value["prompt_name"] for asked in worker.asked} == {"query"}
    assert done.err.count("warning: the text was cut: by it") == 1


@pytest.mark.parametrize(
    "reply",
    [[], {}, {"data": [{}]}, {"data": [{"embedding": ["a"]}]}, {"data": [{"embedding": [1]}] * 2}],
    ids=json.dumps,
)
def test_replies_that_are_not_embeddings(
    at: Callable[[ScriptedWorker], Aimage], reply: object
) -> None:
    worker = ScriptedWorker(lambda _: says(reply))
    worker.capabilities = ("embedding",)
    with worker.running():
        assert "invalid response from the worker" in at(worker)("embed", "x", "a", code=5).err


def test_a_path_is_packed(aimage: Callable[[], Aimage], tmp_path: Path) -> None:
    numbers = aimage()("embed", write_encoder(tmp_path / "tiny"), "a").out.split()
    assert len(numbers) == WIDTH
