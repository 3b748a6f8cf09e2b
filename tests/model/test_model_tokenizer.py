"""Chat templates and tokenizers of strangers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import ModelError
from clowder_aimage.model.flow.tokenizer import MAX_TOKENS, Tokenizer
from clowder_aimage.model.tokenizer_backend import TokenizerBackend
from clowder_aimage.oci import mediatype
from tests.conftest import TINY
from tests.model.model_blobs import FolderStore, replace

Model = tuple[FolderStore, AImage]
JINJA = "tokenizer/chat_template.jinja"
CONFIG = "tokenizer/tokenizer_config.json"


def with_file(model: Model, name: str, data: bytes) -> AImage:
    store, aimage = model
    layers = [layer for layer in aimage.layers if layer.name != name]
    layers.append(Layer(store.add(mediatype.AIMAGE_FILE, data), name))
    return AImage(aimage.config, tuple(layers))


def with_template(model: Model, template: str) -> Tokenizer:
    return Tokenizer.load(model[0], with_file(model, JINJA, template.encode()))


def test_the_template_of_qwen(tiny: Model) -> None:
    tokenizer = Tokenizer.load(*tiny)
    assert tokenizer.render("a fox") == "<|im_start|>user\na fox<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_one_token_each(tiny: Model) -> None:
    tokenizer = with_template(tiny, "{{ messages[0].content }}")
    assert tokenizer.encode("<|im_end|>").total == 1


def test_long_prompts_are_cut_on_the_right(tiny: Model) -> None:
    tokenizer = with_template(tiny, "{{ messages[0].content }}")
    tokens = tokenizer.encode("x" * 600)
    assert (len(tokens.ids), tokens.total) == (MAX_TOKENS, 600)
    assert tokenizer.encode("x" * 511 + "y").ids[-1] != tokens.ids[-1]
    assert tokenizer.encode("x" * 512 + "y").ids == tokens.ids


@pytest.mark.parametrize(
    ("count", "side", "sentence"),
    [
        (512, "right", ""),
        (513, "right", "the prompt has 513 tokens, of which the model reads the first 512: "),
        (1500, "right", "the prompt has 1500 tokens, of which the model reads the first 512: "),
        (600, "left", "the prompt has 600 tokens, of which the model reads the last 512: "),
    ],
)
def test_a_cut_is_described(tiny: Model, count: int, side: str, sentence: str) -> None:
    store, aimage = tiny
    layers = {layer.name: layer for layer in aimage.layers}
    config = json.loads((store.root / layers[CONFIG].descriptor.digest.encoded).read_bytes())
    data = json.dumps({**config, "truncation_side": side}).encode()
    template = Layer(store.add(mediatype.AIMAGE_FILE, b"{{ messages[0].content }}"), JINJA)
    layers |= {JINJA: template, CONFIG: Layer(store.add(mediatype.AIMAGE_FILE, data), CONFIG)}
    tokenizer = Tokenizer.load(store, AImage(aimage.config, tuple(layers.values())))
    said = tokenizer.encode("x" * count).describe_cut("the prompt")
    assert said == (f"{sentence}the rest has no effect" if sentence else "")


def test_tokens_that_are_added_to_a_text_are_counted_once() -> None:
    value = json.loads((TINY / "tokenizer" / "tokenizer.json").read_bytes())
    token = next(token["content"] for token in value["added_tokens"])
    number = next(token["id"] for token in value["added_tokens"])
    value["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
    backend = TokenizerBackend.from_json(json.dumps(value), {})
    backend.truncate(8, "right")
    ids, total = backend.encode_counted("x" * 30)
    assert (len(ids), ids[-1], total) == (8, number, 31)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("tokenizer_config.json", "from {{ 'config' }}"),
        (
            "tokenizer_config.json",
            [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "from {{ 'config' }}"},
            ],
        ),
        ("chat_template.json", "from {{ 'config' }}"),
    ],
)
def test_where_templates_are(tiny: Model, place: str, value: Any) -> None:
    store, aimage = tiny
    aimage = replace(store, aimage, JINJA)
    data = json.dumps({"chat_template": value}).encode()
    aimage = with_file((store, aimage), f"tokenizer/{place}", data)
    assert Tokenizer.load(store, aimage).render("") == "from config"


def test_templates_have_the_names_of_transformers(tiny: Model) -> None:
    template = (
        "{% generation %}{{ messages | tojson }}{% endgeneration %}"
        "{{ enable_thinking }}{{ add_generation_prompt }}{{ eos_token }}{{ tools is none }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ undefined_name }}"
    )
    rendered = with_template(tiny, template).render("<é>")
    assert rendered == '[{"role": "user", "content": "<é>"}]TrueTrue<|im_end|>True014'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_templates_that_are_stopped(tiny: Model, template: str) -> None:
    with pytest.raises(ModelError, match=r"chat template (failed|refuses)"):
        with_template(tiny, template).render("x")


_FAILED = r"^the chat template (failed: \w+ in line 1|refuses the messages)$"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception(messages[0].content) }}",
        "{{ messages[0][messages[0].content].x }}",
        "{{ messages[0].content | int(messages[0].content) + [] }}",
        "{{ strftime_now('%999999999Y') }}",
    ],
)
def test_the_error_of_a_template_does_not_quote_the_prompt(tiny: Model, template: str) -> None:
    with pytest.raises(ModelError, match=_FAILED) as raised:
        with_template(tiny, template).render("LIGHTHOUSE")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_every_rendering_may_loop(tiny: Model) -> None:
    """The limit of loops in loops is counted anew each time."""
    tokenizer = with_template(
        tiny, "{% for i in range(60000) %}{% endfor %}{{ messages[0].content }}"
    )
    assert [tokenizer.render("x") for _ in range(3)] == ["x"] * 3


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}", "<2 red balls>"),
        ("{{ messages[0].content }}", "2 red balls"),
        ("a picture", "leaves out the prompt"),
        ("{{ messages[0].content[:3] }}", "leaves out the prompt"),
    ],
)
def test_a_prompt_is_in_the_form_of_the_template(tiny: Model, source: str, expected: str) -> None:
    try:
        text = with_template(tiny, source).render("2 red balls")
    except ModelError as error:
        text = error.message
    assert text.endswith(expected)


def test_templates_that_do_not_parse(tiny: Model) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        with_template(tiny, "{% if %}")


def test_missing_and_malformed_files(tiny: Model) -> None:
    store, aimage = tiny
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer.load(store, replace(store, aimage, JINJA))
    with pytest.raises(ModelError, match=r"neither tokenizer\.json"):
        Tokenizer.load(store, replace(store, aimage, "tokenizer/tokenizer.json"))
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        Tokenizer.load(store, with_file(tiny, "tokenizer/tokenizer.json", b"{}"))
    with pytest.raises(ModelError, match="no tokens"):
        with_template(tiny, "").encode("")


def test_vocabulary_and_merges(tiny: Model, tmp_path: Path) -> None:
    store, aimage = tiny
    value = json.loads(
        store.find_path(aimage.get_layer("tokenizer/tokenizer.json").descriptor).read_bytes()
    )
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in value["model"]["merges"])
    added = {token["content"]: token["id"] for token in value["added_tokens"]}
    changed = replace(store, aimage, "tokenizer/tokenizer.json")
    for name, text in (
        ("vocab.json", json.dumps(value["model"]["vocab"])),
        ("merges.txt", merges),
        ("added_tokens.json", json.dumps(added)),
        ("tokenizer_config.json", "{}"),
    ):
        changed = with_file((store, changed), f"tokenizer/{name}", text.encode())
    prompt = "the red fox, re-read"
    whole, parts = Tokenizer.load(store, aimage), Tokenizer.load(store, changed)
    assert parts.encode(prompt) == whole.encode(prompt)
    broken = with_file((store, changed), "tokenizer/merges.txt", b"a b c\n")
    with pytest.raises(ModelError, match=r"merges\.txt"):
        Tokenizer.load(store, broken)
