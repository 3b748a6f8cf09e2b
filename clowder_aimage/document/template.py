"""Untrusted Jinja templates, rendered with budgets of steps, bytes and time.

Each operation that makes a value is charged: calls, filters, tests and operators by hooks of the
sandbox; loops, literals, slices, comparisons and ``~`` by filters that are inserted into the syntax
tree. One operation is bounded by the size of its operands, so that none takes long by itself.
The compiler evaluates no constants. Only the methods and filters in tables are allowed.
Import this on use: it needs jinja2.
"""

from __future__ import annotations

import html
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sized,
    ValuesView,
)
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import filters, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

_MAX_SOURCE = 48 << 10  # characters of a template
# The largest templates of public models have a third. To compile these takes about a second.
_MAX_TOKENS = 16_000
# Bits of a number: its text takes quadratic time.
_MAX_BITS = 1024
# The largest width, count or number of digits: these determine the size of a result.
_MAX_ARGUMENT = 1 << 16
_LARGE = 1 << 14  # characters or elements
# Characters to strip: each character at the ends of a text is compared with all of them.
_MAX_STRIPPED = 100
_FILTERS = frozenset(
    "abs attr batch capitalize center count d default dictsort filesizeformat first float groupby"
    " int items last length list lower map max min reject rejectattr reverse round select"
    " selectattr slice sort string title truncate unique upper urlencode wordcount".split()
)
# Filters that take time for each character of a text
_ITERATING = frozenset(
    "batch groupby join list map max min reject rejectattr select selectattr slice sort sum"
    " unique".split()
)
_METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (
        str,
        frozenset(
            "capitalize casefold center count encode endswith expandtabs find index isalnum isalpha"
            " isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle"
            " isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind"
            " rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase"
            " title upper zfill".split()
        ),
    ),
    (dict, frozenset("copy get items keys values".split())),
    ((list, tuple), frozenset("copy count index".split())),
    (bytes, frozenset(("decode", "hex"))),
    (range, frozenset("count index start step stop".split())),
    (int, frozenset("bit_count bit_length denominator imag is_integer numerator real".split())),
    (float, frozenset("hex imag is_integer real".split())),
)
# The names by which Jinja's compiler passes variables to calls
_SCOPES = frozenset(("_loop_vars", "_block_vars"))
_ENCODINGS = frozenset(("utf-8", "utf8", "UTF-8", "strict", "ignore", "replace"))
_DRAWN = (Iterator, ItemsView, KeysView, ValuesView)
_REFUSED = (
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Block,
    nodes.EvalContextModifier,
)


class RenderError(Exception):
    """A template cannot be read or rendered.

    ``kind`` is the name of the exception. ``summary`` has the kind and the line alone;
    ``str(error)`` may quote the template's values.
    """

    def __init__(self, text: str, kind: str, line: int | None) -> None:
        super().__init__(text)
        self.kind, self.line = kind, line
        self.summary = kind if line is None else f"{kind} in line {line}"


class _LimitError(Exception):
    """A budget is spent. The message contains no values."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Budgets of one rendering.

    Args:
        steps: Iterations, calls and elements.
        text: Characters of the output and of any string.
        size: Bytes of all values that are made.
        seconds: Processor time, so that the result does not depend on the load of the machine.
    """

    steps: int = 1_000_000
    text: int = 1 << 20
    size: int = 64 << 20
    seconds: float = 1.0


class SandboxedTemplate:
    """A template that ends within its limits.

    Args:
        source: The text of the template.
        limits: The budgets of each rendering.
        names: Further global functions.
        finalize: Convert a value that is printed.
        options: Further arguments of Jinja's environment.

    Raises:
        RenderError: The template is invalid.
    """

    def __init__(
        self,
        source: str,
        *,
        limits: TemplateLimits = TemplateLimits(),
        names: Mapping[str, object] | None = None,
        finalize: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self._limits, self._source = limits, source
        # The environment has the meter of one rendering at a time.
        self._lock = threading.Lock()
        self._environment = _Environment(limits, finalize, **options)
        self._environment.globals.update(names or {})
        try:
            if len(source) > _MAX_SOURCE:
                raise _LimitError(f"it exceeds {_MAX_SOURCE} characters")
            if next(islice(self._environment.lex(source), _MAX_TOKENS, None), None):
                raise _LimitError(f"it exceeds {_MAX_TOKENS} tokens")
            self._template = self._environment.from_string(source)
        except Exception as error:
            # Python's compiler raises errors of its own, such as RecursionError.
            raise _build_render_error(error) from None

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template may read."""
        with self._lock:
            try:
                tree = self._environment.parse(self._source)
                return frozenset(jinja2.meta.find_undeclared_variables(tree))
            except Exception as error:
                raise _build_render_error(error) from None

    def render(self, values: Mapping[str, Any], limits: TemplateLimits | None = None) -> str:
        """Return the text, within other limits if they are given. Raises RenderError."""
        with self._lock:
            self._environment.meter = _Meter(limits or self._limits)
            try:
                return self._template.render(values)
            except Exception as error:
                # An expression may raise any exception.
                raise _build_render_error(error) from None


def _build_render_error(error: Exception) -> RenderError:
    if isinstance(error, jinja2.TemplateSyntaxError):
        text, line = (error.message or "").rstrip("."), error.lineno
        return RenderError(text, type(error).__name__, line)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    kind = str(error) if isinstance(error, _LimitError) else type(error).__name__
    return RenderError(str(error) or kind, kind, lines[-1] if lines else None)


class _Meter:
    """The remaining budgets of a rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits, self._steps, self._size = limits, limits.steps, limits.size
        # The time of this thread: other requests must not use up the budget.
        self._end = time.thread_time() + limits.seconds
        self._calls = 0

    def step(self, count: int = 1) -> None:
        """Charge for ``count`` steps."""
        self._steps -= count
        if self._steps < 0:
            raise _LimitError(f"it exceeds {self._limits.steps} steps")
        # Reading the clock takes longer than most steps.
        self._calls += 1
        if self._calls % 64 == 1:
            self._check_time()

    def weigh(self, operands: Iterable[Any]) -> None:
        """Look at the clock before an operation that may take long by itself."""
        if any(isinstance(operand, Sized) and len(operand) > _LARGE for operand in operands):
            self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > self._end:
            raise _LimitError(f"it takes longer than {self._limits.seconds:g} seconds")

    def require(self, length: int, name: str) -> None:
        """Refuse an operation whose result would have ``length`` characters or elements."""
        if length > self._limits.text:
            raise _LimitError(f"the operands of {name} are too large")

    # With a stack instead of recursion: the depth of a value is the template's choice.
    def admit(self, value: Any) -> Any:
        """Charge for a value and its elements; return it, an iterator as a list."""
        self.step()
        if value is None or value is True or value is False:
            return value
        if isinstance(value, _DRAWN) and not isinstance(value, LoopContext):
            value = self._draw(value)
        stack = [value]
        while stack:
            element = stack.pop()
            self._size -= sys.getsizeof(element)
            if isinstance(element, str):
                self._admit_text(len(element))
            elif isinstance(element, int) and element.bit_length() > _MAX_BITS:
                raise _LimitError("a number is too large")
            elif isinstance(element, dict | list | tuple | set | frozenset):
                self.step(1 + len(element))
                stack.extend(element)
                if isinstance(element, dict):
                    stack.extend(element.values())
            if self._size < 0:
                raise _LimitError(f"its values exceed {self._limits.size} bytes")
        return value

    def join(self, separator: str, parts: Iterable[str]) -> str:
        """Join the parts, charging for the text before it is made."""
        texts, length = [], -len(separator)
        for fragment in parts:
            length += len(fragment) + len(separator)
            self._admit_text(length)
            texts.append(fragment)
        # A text that is marked as safe would escape the others
        text: str = self.admit(str.join(separator, texts))
        return text

    def to_text(self, value: Any) -> str:
        """Return the value as text."""
        text: str = value if isinstance(value, str) else self.admit(str(value))
        return text

    def _admit_text(self, length: int) -> None:
        if length > self._limits.text:
            raise _LimitError(f"its text exceeds {self._limits.text} characters")

    def _draw(self, values: Iterable[Any]) -> list[Any]:
        drawn = []
        for value in values:
            self.step()
            drawn.append(value)
        return drawn


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that charges its meter."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(
        self, limits: TemplateLimits, finalize: Callable[[Any], Any] | None, **options: Any
    ) -> None:
        # Jinja's compiler calls a finalizer of constants unless it needs the context.
        @pass_context
        def print_value(_: Context, value: Any) -> str:
            return self.meter.to_text(value if finalize is None else finalize(value))

        super().__init__(finalize=print_value, optimized=False, **options)
        self.meter = _Meter(limits)
        self.globals = {"dict": dict, "namespace": _Namespace, "range": self.globals["range"]}
        replaced: dict[str, Any] = {
            "_admit": _pass_through,
            "_concat": self._concat,
            "e": self._escape,
            "escape": self._escape,
            "forceescape": self._escape,
            "format": self._format,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "safe": Markup,
            "sum": _sum,
            "tojson": _tojson,
            "trim": self._trim,
        }
        available = {name: self.filters[name] for name in _FILTERS} | replaced
        self.filters = {name: self._charge(name, function) for name, function in available.items()}
        self.tests = {name: self._charge(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if (refused := next(tree.find_all(_REFUSED), None)) is not None:
            raise jinja2.TemplateSyntaxError("no other templates or blocks", refused.lineno)
        charged_tree: nodes.Template = _Charges().visit(tree)
        return charged_tree

    def concat(self, parts: Iterable[str]) -> str:
        return self.meter.join("", parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded function for the methods ``format`` and ``format_map`` of a text."""
        text, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(text, str) or name not in ("format", "format_map"):
            return None
        formatter = _Formatter(self)

        def format_text(*args: Any, **kwargs: Any) -> str:
            self.meter.step(1 + text.count("{") + text.count("}"))
            self.meter.weigh((text, *args))
            if name == "format_map":
                (fields,) = args
                return formatter.vformat(text, (), fields)
            return formatter.vformat(text, args, kwargs)

        return format_text

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.step()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.meter.step()
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            self.meter.require(0 if abs(left) < 1 << 16 and abs(right) <= 32 else sys.maxsize, "**")
        elif operator == "%" and isinstance(left, bytes):
            raise _LimitError("bytes cannot be formatted")
        elif operator == "%" and isinstance(left, str):
            return self.meter.admit(self._format(left, right))
        elif operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
            sizes = [
                len(operand) if isinstance(operand, Sized) else operand for operand in (left, right)
            ]
            self.meter.require(abs(sizes[0] * sizes[1]), "*")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self.meter.require(len(left) + len(right), "+")
        return self.meter.admit(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.step()
        if isinstance(getattr(__obj, "__self__", None), str | bytes):
            # Jinja adds the variables of a loop or a block, for functions that take the context
            options = {key: kwargs[key] for key in kwargs.keys() - _SCOPES}
            return __self.meter.admit(__self._call_method(__context, __obj, args, options))
        return __self.meter.admit(super().call(__context, __obj, *args, **kwargs))

    def _call_method(
        self, context: Context, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of a text or of bytes."""
        text, name = method.__self__, method.__name__
        self.meter.weigh((text, *args))
        _check_numbers(name, (*args, *kwargs.values()))
        if name == "join":
            (parts,) = args
            return self._join(context, parts, text)
        if name == "replace":
            return self._replace(text, *args, **kwargs)
        if name.endswith("strip"):
            self._check_stripped(*args)
        if name == "expandtabs":
            size = max((8, *map(abs, args), *map(abs, kwargs.values())))
            self.meter.require(len(text) + text.count("\t") * size, name)
        if name in ("encode", "decode") and {*args, *kwargs.values()} - _ENCODINGS:
            raise _LimitError(f"the only encoding of {name} is UTF-8")
        return super().call(context, method, *args, **kwargs)

    def _charge(self, name: str, function: Any) -> Callable[..., Any]:
        kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

        @pass_context
        def call_and_charge(context: Context, *args: Any, **kwargs: Any) -> Any:
            if name not in ("d", "default", "_admit", "_concat"):
                _check_numbers(name, (*args[1:], *kwargs.values()))
            self.meter.weigh(args)
            if name in _ITERATING and isinstance(args[0], str | bytes):
                self.meter.step(len(args[0]))
            contexts = {"context": context, "environment": self, "eval_context": context.eval_ctx}
            passed = (contexts[kind], *args) if kind else args
            return self.meter.admit(function(*passed, **kwargs))

        return call_and_charge

    def _escape(self, value: Any) -> str:
        return html.escape(self.meter.to_text(value))

    def _concat(self, values: list[Any]) -> str:
        return self.meter.join("", map(self.meter.to_text, values))

    def _format(self, text: str, *args: Any, **kwargs: Any) -> str:
        """Format with ``%``, after a bound of the length of the result."""
        values = kwargs or (args[0] if len(args) == 1 else args)
        operands: Any = values.values() if isinstance(values, dict) else args
        parts = operands[0] if len(args) == 1 and isinstance(args[0], tuple) else operands
        longest = max((len(self.meter.to_text(value)) for value in parts), default=0)
        width = max(map(int, re.findall(r"\d+", text)), default=0)
        # With "*" the width is an argument, and not bounded by the text.
        is_open = re.search(r"%[^a-zA-Z%]*\*", text) is not None
        # A number takes 400 characters at most: 1e308 has 309 digits.
        length = text.count("%") * (longest + width + 400) + len(text)
        self.meter.require(sys.maxsize if is_open else length, "%")
        return text % values

    def _indent(
        self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = self.meter.to_text(text)
        count = len(width) if isinstance(width, str) else width
        self.meter.require((len(text.splitlines()) + 1) * count + len(text), "indent")
        return filters.do_indent(text, width, first, blank)

    @pass_context
    def _join(
        self, context: Context, values: Any, d: str = "", attribute: str | None = None
    ) -> str:
        if attribute is not None:
            values = filters.sync_do_map(context, values, attribute=attribute)
        return self.meter.join(self.meter.to_text(d), map(self.meter.to_text, values))

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        text = self.meter.to_text(text)
        self.meter.require(len(text) + text.count(old) * len(new), "replace")
        replaced: str = self.meter.admit(
            str.replace(text, old, new, -1 if count is None else count)
        )
        return replaced

    def _trim(self, text: Any, chars: str | None = None) -> str:
        self._check_stripped(chars)
        return self.meter.to_text(text).strip(chars)

    def _check_stripped(self, chars: str | None = None) -> None:
        self.meter.require(sys.maxsize if len(chars or "") > _MAX_STRIPPED else 0, "strip")


class _Formatter(SandboxedFormatter):
    """Formats a text as ``str.format``: attributes by the sandbox, lengths within the budgets."""

    _env: _Environment

    def format_field(self, value: Any, format_spec: str) -> str:
        self._env.meter.step()
        # The largest number has five digits: a longer one is not read
        if any(len(digits) > 4 for digits in re.findall(r"\d+", format_spec)):
            raise _LimitError("a number for format is too large")
        text: str = self._env.meter.admit(super().format_field(value, format_spec))
        return text


class _Charges(NodeTransformer):
    """Insert filters that charge for the nodes that Jinja compiles to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        step = _build_filter(nodes.Const(None, lineno=node.lineno), "_admit")
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = _build_filter(node.test, "_admit")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _build_filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _build_filter(node, "_admit") if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return node if node.ctx != "load" else self._admit_node(node)

    def _admit_node(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _build_filter(node, "_admit")

    visit_Compare = visit_Dict = visit_List = _admit_node  # noqa: N815


class _Namespace(Namespace):
    """A namespace that does not print its attributes."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _build_filter(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)  # noqa: S101
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_numbers(name: str, values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_ARGUMENT for value in values):
        raise _LimitError(f"a number for {name} is too large")


def _pass_through(value: Any) -> Any:
    return value


@pass_context
def _sum(
    context: Context, values: Any, attribute: str | int | None = None, start: float = 0
) -> Any:
    """Add numbers. Adding lists takes quadratic time."""
    return filters.sync_do_sum(context.environment, values, attribute, start + 0)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # A text as indentation fails to compare, as it should.
    if (indent or 0) > 16 or len("".join(separators or ())) > 16:
        raise _LimitError("the indentation of tojson is too large")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
