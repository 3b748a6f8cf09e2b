"""Results printed by a template (``--format``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.cli.console.result_template import ResultTemplate
from clowder_aimage.errors import UsageError
from tests.process import Aimage


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{{ a }}\t{{ b.c[0] }}", "x\t1"),
        (r"{{ tags | join('\n') }}", "v1\nv2"),
        ("{{ b }}{{ yes }}{{ nothing }}", '{"c": [1]}truenull'),
        ("{{ b | tojson }}", '{"c": [1]}'),
        ("{% if yes %}{{ '-' * 3 }}{% endif %}", "---"),
        ("{{ evil }}", "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b"),
    ],
)
def test_a_template_is_rendered_with_the_fields(template: str, text: str) -> None:
    value = {"a": "x", "b": {"c": [1]}, "tags": ["v1", "v2"], "yes": True, "nothing": None}
    assert ResultTemplate(template).render(value | {"evil": "a\x1b[31m\nb"}) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "the template is empty"),
        ("{{ .Digest }}", "invalid template, line 1: unexpected '.'"),
        (r"a\n{{ b | nope }}", "invalid template, line 2: No filter named 'nope'"),
        ("{% if a %}", "invalid template, line 1: "),
        ("{% include 'x' %}", "invalid template, line 1: no other templates"),
    ],
)
def test_an_invalid_template_is_refused(template: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        ResultTemplate(template)
    assert error.value.message.startswith(message)
    assert "{{ digest }}" in str(error.value.hint)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (r"\n{{ b }}", "line 2 of the template: 'b' is undefined"),
        ("{{ a.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ c.update(x=1) }}", "of 'Fields' object is unsafe"),
        ("{{ 2 ** 99 }}", "the operands of ** are too large"),
        ("{{ 'x' * 10 ** 1 * 99999999 }}", "the operands of"),
        ("{{ a * 99999999 }}", "the operands of * are too large"),
        ("{% for i in range(99999) %}{{ a * 9999 }}{% endfor %}", "its text exceeds"),
        ("{{ 1 // 0 }}", "line 1 of the template: "),
    ],
)
def test_a_template_that_fails_names_the_line(template: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        ResultTemplate(template).render({"a": "x", "c": {}})
    assert message in error.value.message
    assert error.value.hint == "the fields of the result are a, c"


def test_each_element_of_a_list_is_a_line(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    here("tag", "x", "y")
    assert here("ls", "--format", "{{ reference }}").out == "x:latest\ny:latest\n"
    assert here("ls", "--format", "{{ name }}").out == "x:latest\ny:latest\n"
    failed = here("ls", "--format", "{{ size }} {{ nmae }}", code=2)
    assert "'nmae' is undefined" in failed.err and "reference, digest, " in failed.err
    assert failed.err.rstrip().endswith(", name")
    assert here("--template", "{{ reference }}", "ls").out == "x:latest\ny:latest\n"
    assert here("rm", "x", "--format", "{{ removed[0] }}").line == "x:latest"
    assert here("gc", "--format={{ dryRun }}", "--dry-run", "--json").line == "true"


def test_an_invalid_template_changes_nothing(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    failed = here("rm", "x", "--format", "{{ x", code=2)
    assert failed.err.startswith("aimage: invalid template, line 1: ")
    assert "x:latest" in here("ls").out
    failed = here("tag", "x", "y", "--format", "{{ nope }}", "--json", code=2)
    error = json.loads(failed.err.splitlines()[-1])
    assert error["message"].startswith("done, but the result cannot be printed")
    assert "y:latest" in here("ls").out


def test_json_is_not_a_template(stocked: Callable[[], Aimage]) -> None:
    here = stocked()
    assert here("ls", "--format", "json").out == here("ls", "--json").out
    assert json.loads(here("show", "y", "--format=json", code=3).err)["exit"] == 3


def test_the_format_of_create_keeps_its_name(aimage: Callable[..., Aimage], tiny: Path) -> None:
    here = aimage()
    made = here("create", "x", tiny, "--format", "diffusers", "--template", "{{ digest }}")
    assert made.line == here("ls", "--format", "{{ digest }}").line
    failed = here("create", "y", tiny, "--format", "{{ digest }}", code=2)
    assert "is not one of 'diffusers'" in failed.err
    for verb, name in (("create", "--template TEMPLATE"), ("ls", "--format, --template TEMPLATE")):
        assert name in here(verb, "--help").out


def test_a_template_shows_what_is_in_a_registry(aimage: Callable[..., Aimage], pushed: str) -> None:
    here = aimage()
    assert here("tags", pushed.rpartition(":")[0], "--format", "{{ tags | length }}").line == "1"
    digest = here("resolve", pushed).line
    template = "{{ digest }} {{ mediaType | length > 9 }}"
    assert here("resolve", pushed, "--format", template).line == f"{digest} true"
