"""Templates of strangers end within their budgets."""

from __future__ import annotations

import tracemalloc
from itertools import count, product

import pytest

from clowder_aimage.document.template import (
    _FILTERS,
    _METHODS,
    RenderError,
    SandboxedTemplate,
    TemplateLimits,
)

SMALL = TemplateLimits(steps=20_000, text=10_000, size=1 << 20, seconds=10)
DOUBLED = (
    "{%% set ns = namespace(s=[1]) %%}{%% for i in range(99) %%}{%% set ns.s = %s %%}{%% endfor %%}"
)
LONG = "{% set a = 'x' * 9999 %}"


def render(template: str, limits: TemplateLimits = SMALL) -> str:
    return SandboxedTemplate(template, limits=limits).render({"text": "a fox", "many": ["b"] * 9})


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 3000000000 }}",
        "{{ text * 3000000000 }}",
        "{{ many * 3000000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set n = 9 %}{{ (n ** n ** n) | string | length }}",
        "{{ lipsum(n=100000000) | length }}",
        "{% for i in 'x' * 9999 %}{% for j in 'x' * 9999 %}{% endfor %}{% endfor %}",
        "{% for i in 'x' * 9999 %}{% for j in 'x' * 9999 if false %}{% endfor %}{% endfor %}",
        "{% for x in [1] recursive %}{{ loop('x' * 9999) }}{% endfor %}",
        "{{ '%3000000000d' | format(1) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '{:3000000000}'.format(1) }}",
        "{{ text | center(3000000000) }}",
        "{{ text.zfill(3000000000) }}",
        "{{ text | indent(2000000000) }}",
        "{{ many | tojson(indent=2000000000) }}",
        "{{ text | wordwrap(1) }}",
        "{{ (1).to_bytes(3000000000, 'big') }}",
        "{{ 5 | round(-1000000000) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% macro m() %}{% for i in range(999) %}"
        + LONG
        + "{{ a }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% for i in range(999) %}" + LONG + "{{ a }}{% endfor %}",
        DOUBLED % "ns.s + ns.s",
        DOUBLED % "[ns.s, ns.s]" + "{{ ns.s }}",
        DOUBLED % "dict(a=ns.s, b=ns.s)" + "{{ ns.s | tojson }}",
        DOUBLED % "ns.s ~ ns.s",
        LONG + "{{ a.replace('x', a) }}",
        LONG + "{{ a | replace('x', a) }}",
        LONG + "{{ a | join(a) }}",
        LONG + "{{ a.join(a) }}",
        LONG + "{{ a.strip('y' * 9998 ~ 'x') }}",
        LONG + "{% set x %}" + "{{ a }}" * 9 + "{% endset %}{{ x | length }}",
        LONG + "{{ " + " ~ ".join("a" * 99) + " }}",
        "{{ many | map('center', 9999) | list }}" * 99,
        "{% autoescape true %}{{ text }}{% endautoescape %}",
        "{% block x %}{{ self.x() }}{% endblock %}",
        "{% include '/etc/passwd' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format_map({}) }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{{ " + "not " * 9999 + "1 }}",
        "{{ 1 }}" * 9999,
    ],
)
def test_what_would_not_end_or_fit_is_an_error(template: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RenderError):
            render(template)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_the_namespace_does_not_print_what_it_has() -> None:
    nested = DOUBLED % "namespace(a=ns.s, b=ns.s)"
    assert render(nested + "{{ ns.s }}") == "<Namespace>"


def test_every_filter_and_method_is_bounded() -> None:
    """A new one that makes a long text of a short one, or takes a width unbounded, fails here."""
    calls = [f"a | {name}" for name in [*_FILTERS, "e", "format", "indent", "join", "replace"]]
    calls += [f"a.{name}" for name in _METHODS[0][1]]
    arguments = ("1000000000", "a", "'x', a")
    for call, given in product(calls, arguments):
        try:
            text = render(f"{LONG}{{{{ {call}({given}) }}}}")
        except RenderError:
            continue
        assert len(text) <= SMALL.text, (call, given)


def test_the_time_is_limited() -> None:
    with pytest.raises(RenderError, match="takes longer than 0 seconds"):
        render("{{ text }}", TemplateLimits(seconds=0))


def test_an_error_has_a_summary_without_values() -> None:
    template = SandboxedTemplate("\n{{ many[0][text].x }}")
    with pytest.raises(RenderError, match="a fox") as raised:
        template.render({"text": "a fox", "many": [{}]})
    assert raised.value.summary == "UndefinedError in line 2"


def test_ordinary_templates() -> None:
    template = (
        "{% for each in many[:2] -%}{{ loop.index ~ each }}{{ ',' if not loop.last }}{%- endfor %}"
        "{% set ns = namespace(n=0) %}{% for x in range(9) if x % 2 %}{% set ns.n = ns.n + x %}"
        "{% endfor %} {{ ns.n }} {{ text.split()[-1] | upper }} {{ {'a': [1]}.items() | list }}"
        "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}"
        "{% call m(2) %}!{% endcall %} {{ '%-5s|%03d' | format('b', 7) }} {{ many | join('') }}"
        " {{ 'a<b' | e }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ 2 ** 9 }}"
    )
    assert render(template) == (
        '1b,2b 16 FOX [(\'a\', [1])]<1><2!> b    |007 bbbbbbbbb a&lt;b {"a": 2, "b": 1} 512'
    )


def test_the_clock_is_read_before_each_operation_on_a_large_operand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = count()
    monkeypatch.setattr("time.thread_time", lambda: next(reads))
    seconds = TemplateLimits(seconds=2)
    small = "{% set a = 'x' * 999 %}{{ a | title }}{{ a.title() }}{{ a | title }}"
    assert len(render(small, seconds)) == 3 * 999
    with pytest.raises(RenderError, match="takes longer than 2 seconds"):
        render(small.replace("999", "99999"), seconds)
