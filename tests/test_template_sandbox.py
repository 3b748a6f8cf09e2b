"""Templates of strangers end within their budgets."""

from __future__ import annotations

import re
import tracemalloc
from itertools import count, product
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        "{{ '{:{w}}'.format(1, w=3000000000) }}",
        "{{ '{:.3000000000f}'.format(1.5) }}",
        "{{ '{0.__class__.__mro__}'.format(text) }}",
        "{{ '{0[__class__][__mro__]}'.format(text) }}",
        "{{ '{0.format.__globals__.x}'.format(text) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': text}) }}",
        "{% set f = '{0.__class__.__mro__}'.format %}{{ f(text) }}",
        "{{ ['{0.__class__}'] | map('format', text) | map(attribute='__class__') | list }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))(text) }}",
        "{% set a = '{:9999}' * 999 %}{{ a.format(*range(999)) }}",
        "{% for i in range(9999) %}{{ ('{{' * 4999).format() | length }}{% endfor %}",
        "{% set a = '\t' * 9999 %}{{ a.expandtabs(9999) }}",
        "{{ text.encode('idna') }}",
        "{{ '%3000000000d'.encode() % 1 }}",
        "{{ '%3000000000d'.encode() | format(1) }}",
        "{{ text.encode() * 3000000000 }}",
        LONG + "{% for i in range(99) %}{{ a.encode() | list | length }}{% endfor %}",
        "{% set a = '<' * 9999 %}{{ (a | safe) + a }}",
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


EXPRESSIONS = """
text.replace('a', 'b'); text.replace('a', 'b', 1); text.format(); '{0} {0!r:>9}'.format(text)
'{a:03d} {b.x} {b[x]} {{}}'.format(a=7, b={'x': 1}); '{a}-{b[0]}'.format_map({'a': 1, 'b': [2]})
'%s %5.2f %%' % (text, 2.5); '%(a)s' % {'a': 1}; ', '.join(many); text.split(' '); text[::-1]
text.encode(); text.encode('utf-8').decode(); 'a\\tb'.expandtabs(4); text.isprintable()
'x'.isidentifier(); (2.0).is_integer(); range(9).stop; text.partition(' '); text.title()
{'b': 1, 'a': 2} | dictsort; {'b': 1}.items() | list; {'a': 1}.get('b', 3); dict(a=1)
text is string; 3 is divisibleby 3; none is none; many is iterable; {} is mapping; x is undefined
many is sequence; 3 is odd; true is boolean; 3 is number; 'a' is in 'ab'; text is eq text
many | batch(2) | list; many | slice(2) | list; many | unique | list; [3, 1] | sort(reverse=true)
[{'a': 1}, {'a': 2}] | selectattr('a', 'gt', 1) | list; [{'a': 1}] | map(attribute='a') | list
[1, none] | select | list; [1, 2] | reject('odd') | list; [1, 2] | last; many | first; [1, 2] | sum
[{'a': 1}, {'a': 1}] | groupby('a') | list; 'a b' | urlencode; text | attr('upper'); '<b>' | e
('<' | safe) + '"&"'; ('<' | safe) ~ '"'; text | indent(2, true); text | truncate(4)
'<' | forceescape; text | center(9); 3.7 | round; 3.7 | int; '4' | float; text | default('b')
none | default('b', true)
[1, [2, 3]] | string; text | trim('a'); 'A' | lower; [3, 1] | max; 5 // 2; 2 ** 3; -5 % 3; 1 < 2 < 3
('a' if none); (1, 2); [1] + [2]; 'a' in 'abc'; not true; many.index('b'); many.count('b')
text.removeprefix('a '); text.zfill(9); text.casefold(); text.rsplit(None, 1); text.splitlines()
many | join(('-' | safe)); ('<a>' | safe).replace('a', 'b'); (6).bit_length(); text | wordcount
"""
STATEMENTS = (
    "{% for k, v in {'a': 1}.items() %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ k }}"
    "{{ loop.length }}{{ loop.previtem is defined }}{{ loop.cycle(1, 2) }}{{ loop.changed(v) }}"
    "{{ loop.depth }}{% endfor %}",
    "{% for c in text if c != ' ' %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if c == 'x' %}{% break %}{% endif %}{{ c }}{% else %}none{% endfor %}",
    "{% for x in [] %}{% else %}none{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% set ns = namespace(a=1, b=[]) %}{% for i in many %}{% set ns.a = ns.a + i | length %}"
    "{% set ns.b = ns.b + [i.replace('b', 'c')] %}{% endfor %}{{ ns.a }}{{ ns.b }}",
    "{% macro m(x, y='d') %}{{ x }}{{ y }}{{ kwargs }}{{ varargs }}"
    "{% endmacro %}{{ m(1, 2, 4, z=3) }}",
    "{% macro m(x) %}[{{ caller(x) }}]{% endmacro %}{% call(v) m(2) %}{{ v }}{% endcall %}",
    "{% for m in many %}{{ m.replace('b', 'c') }}{{ ' '.join([m, m]) }}{{ '{}'.format(m) }}"
    "{{ m.strip('x') }}{{ '%s' % m }}{{ m.upper().lower().startswith('b') }}"
    "{{ {'a': m}.get('a') }}{{ [m].index(m) }}{{ range(2) | list }}{{ dict(a=m) }}{% endfor %}",
    "{% macro m() %}{% for x in many %}{{ x.replace('b', 'd') }}{% endfor %}{% endmacro %}"
    "{{ m() }}",
    "{% set x %}a{{ text }}{% endset %}{{ x }}{% with y = 2 %}{{ y }}{% endwith %}",
    "{% set x | upper %}a{% endset %}{{ x }}{% filter upper %}b{% endfilter %}"
    "{% raw %}{{{% endraw %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% if a is defined and not c %}y{% elif b %}z{% endif %}",
    "{{- text -}}  \n  {%- if true %} a\n{% endif %}  {#- c -#} b",
)


@pytest.mark.parametrize(
    "template",
    [*STATEMENTS, *(f"{{{{ {text} }}}}" for text in re.split("; |\n", EXPRESSIONS.strip()))],
)
def test_a_template_means_the_same_as_in_the_sandbox_of_jinja(template: str) -> None:
    values = {"text": "a fox", "many": ["b"] * 3}
    options: dict[str, Any] = {"extensions": ["jinja2.ext.loopcontrols"], "trim_blocks": True}
    expected = ImmutableSandboxedEnvironment(**options).from_string(template).render(values)
    assert SandboxedTemplate(template, limits=SMALL, **options).render(values) == expected


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


def test_a_template_has_a_limited_number_of_tokens() -> None:
    assert render("{{ " + "1~" * 7_900 + "1 }}") == "1" * 7_901
    with pytest.raises(RenderError, match="exceeds 16000 tokens"):
        render("{{ " + "1~" * 8_000 + "1 }}")
