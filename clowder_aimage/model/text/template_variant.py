"""A chat template in the sandbox, with the few names that transformers provides.

Templates are parts of models and untrusted. Reference: transformers, ``apply_chat_template``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser

from clowder_aimage.document.template import RenderError, SandboxedTemplate, TemplateLimits
from clowder_aimage.errors import ChatTemplateError, UsageError
from clowder_aimage.model.text.content_form import ContentForms
from clowder_aimage.model.text.language_model import TextNotice, TextRequest

_MAX_REFUSAL = 300  # characters
# Long conversations render more text than the templates of other documents
LONG = TemplateLimits(text=4 << 20, size=512 << 20, seconds=2.0)
# Those of questions whether it takes a form of messages
PROBE_LIMITS = TemplateLimits(steps=50_000, seconds=0.2)
# Variables of templates that turn thinking on and off, and that say how much to think
_SWITCHES = frozenset(("enable_thinking", "thinking"))
_EFFORTS = frozenset(("reasoning_effort", "thinking_effort", "reasoning_strength"))
_NO_EFFORT = ("none", "minimal")
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Do it.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class TemplateVariant:
    """One of the templates of a model.

    Args:
        source: Its text.
        tokens: Special tokens by names such as ``bos_token``.
        limits: The budgets of a prompt.

    Raises:
        ChatTemplateError: It cannot be read.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], limits: TemplateLimits = LONG
    ) -> None:
        self._template, self._tokens = _compile(source, limits), dict(tokens)
        self.forms = ContentForms(self.try_render)

    def render(self, values: Mapping[str, Any], limits: TemplateLimits | None = None) -> str:
        """Return the text of the template. Raises UsageError, ChatTemplateError."""
        try:
            return self._template.render({**values, **self._tokens}, limits)
        except RenderError as error:
            raise _build_refusal_error(error) or _build_render_error(error) from None

    def try_render(self, messages: list[dict[str, Any]]) -> str | None:
        """Return a prompt of these messages, None if the template fails.

        A template that is for requests with tools only gets one.
        """
        values: dict[str, Any] = {"messages": messages, "documents": None}
        values |= {"add_generation_prompt": True, **self._tokens}
        for tools in (None, [_TOOL]):
            with contextlib.suppress(RenderError):
                return self._template.render({**values, "tools": tools}, PROBE_LIMITS)
        return None

    @property
    def has_switch(self) -> bool:
        """True if the template can turn thinking off."""
        return bool(self._names & _SWITCHES)

    @cached_property
    def _names(self) -> frozenset[str]:
        """The variables that the template reads."""
        try:
            return self._template.names
        except RenderError:
            return frozenset()

    def choose_options(
        self, request: TextRequest, has_thinking: bool
    ) -> tuple[dict[str, Any], TextNotice]:
        """Return the variables that a request sets, and remarks on those without an effect."""
        names, ignored, warnings = self._names, [], []
        switches, efforts = names & _SWITCHES, names & _EFFORTS
        thinking = request.thinking
        if thinking is None and request.effort is not None and switches:
            thinking = request.effort not in _NO_EFFORT
        if request.effort is not None and not efforts and not switches:
            ignored.append("reasoning_effort")
        options: dict[str, Any] = {}
        if thinking is not None:
            options |= dict.fromkeys(switches, thinking)
            if has_thinking and not thinking and not switches and not efforts:
                warnings.append("the model's chat template cannot turn thinking off")
        if request.effort is not None:
            options |= dict.fromkeys(efforts, request.effort)
        for name, value in request.template_options.items():
            if name in names:
                options[name] = value
            elif not (name in _SWITCHES and switches):
                ignored.append(f"chat_template_kwargs.{name}")
        return options, TextNotice(tuple(warnings), tuple(ignored))


def _compile(source: str, limits: TemplateLimits) -> SandboxedTemplate:
    try:
        return SandboxedTemplate(
            source,
            limits=limits,
            names={"raise_exception": _refuse, "strftime_now": _strftime_now},
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
    except RenderError as error:
        raise ChatTemplateError(f"the chat template cannot be read: {error}") from None


class _RefusalError(jinja2.TemplateError):
    """A template refuses the messages."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant output: here it is a scope of variables only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _build_render_error(error: RenderError) -> ChatTemplateError:
    is_refusal = error.kind == _RefusalError.__name__
    outcome = "refuses the messages" if is_refusal else f"failed: {error.summary}"
    return ChatTemplateError(f"the chat template {outcome}")


def _build_refusal_error(error: RenderError) -> UsageError | None:
    """Return the error of a template that raised ``raise_exception``, else None."""
    if error.kind != _RefusalError.__name__:
        return None
    reason = "".join(character if character.isprintable() else " " for character in str(error))
    message = f"the model's chat template refuses the messages: {reason[:_MAX_REFUSAL]}"
    return UsageError(message, field="messages")


def _refuse(message: object = "") -> None:
    raise _RefusalError(str(message)[: 4 * _MAX_REFUSAL])


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    # Three digits are a width, with which glibc's strftime writes megabytes
    if len(format) > 100 or re.search(r"\d\d\d", format):
        raise ValueError("the format of the time is too large")
    return datetime.now().strftime(format)
