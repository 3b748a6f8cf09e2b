"""The chat template of a model: messages as the text of a prompt.

Templates are parts of models and untrusted, so they are rendered in a sandbox, with the few names
that transformers provides. Reference: transformers, ``apply_chat_template``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.document.template import RenderError, SandboxedTemplate, TemplateLimits
from clowder_aimage.errors import ChatTemplateError, FormatError, UsageError
from clowder_aimage.model.text.content_form import ContentForms
from clowder_aimage.model.text.language_model import GRAMMAR, TextNotice, TextRequest, require
from clowder_aimage.model.text.prompt_check import find_lost
from clowder_aimage.model.text.thought_format import ThoughtFormat, find_format, has_thinking
from clowder_aimage.model.text.tool_call_format import has_tools
from clowder_aimage.tensor.config_fields import parse_object

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MAX_REFUSAL = 300  # characters
# Long conversations render more text than the templates of other documents
_LIMITS = TemplateLimits(text=4 << 20, size=512 << 20, seconds=2.0)
# Those of questions whether it takes a form of messages
_PROBE_LIMITS = TemplateLimits(steps=100_000, seconds=0.5)
_TOOL_USE = "tool_use"
_FILES = {
    "default": "chat_template.jinja",
    _TOOL_USE: f"additional_chat_templates/{_TOOL_USE}.jinja",
}
# Variables of templates that turn thinking on and off, and that say how much to think
_SWITCHES = frozenset(("enable_thinking", "thinking"))
_EFFORTS = frozenset(("reasoning_effort", "thinking_effort", "reasoning_strength"))
_NO_EFFORT = ("none", "minimal")
# The tag of transformers, which some templates know
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_LEAST_SHARE = 0.5  # of a text that a prompt has
_MAX_ARGUMENTS = 1 << 20  # bytes of a call


class ChatTemplate:
    """The templates of a model: the default, and optionally a template for requests with tools.

    Args:
        sources: Texts of the templates by name; "default" is required.
        tokens: Special tokens by names such as ``bos_token``.
        added: Tokens that were added to the vocabulary.
        special: Those of them that are hidden unless they are marks.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokens: Mapping[str, str],
        added: Collection[str] = (),
        special: Collection[str] = (),
    ) -> None:
        self._tokens, self._added = dict(tokens), added
        self._special = [token for token in special if token not in tokens.values()]
        self.source = "\n".join(sources.values())
        default = sources["default"]
        self._default = _Variant(compile_template(default, _LIMITS), self._tokens)
        tools = sources.get(_TOOL_USE)
        self._tools = self._default
        if tools is not None:
            self._tools = _Variant(compile_template(tools, _LIMITS), self._tokens)
        self._has_short_ids = "[TOOL_CALLS]" in self.source and "length != 9" in self.source

    @property
    def has_tools(self) -> bool:
        """True if the template writes tools."""
        return has_tools(self.source)

    @cached_property
    def has_thinking(self) -> bool:
        """True if the template has thoughts before an answer."""
        return has_thinking(self.source)

    @cached_property
    def format(self) -> ThoughtFormat:
        """The marks of the model's thoughts and answers."""
        user, answer = ({"role": role, "content": "x"} for role in ("user", "assistant"))
        turns = self._default.try_render([user, answer, user]) or ""
        return find_format(self.source, self._added, self._special, turns)

    @property
    def has_switch(self) -> bool:
        """True if the template can turn thinking off."""
        return self._default.has_switch

    def compose(
        self, request: TextRequest, preceding: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, TextNotice]:
        """Return the messages of a request as a prompt, after ``preceding`` ones, and remarks.

        Raises:
            UsageError: The template refuses the messages, for the reason in the error's message, or
                leaves out the text that it should answer.
            ChatTemplateError: The template fails. The error contains no text of the request, so
                that it can be logged.
        """
        variant = self._tools if request.tools else self._default
        options, notice = variant.choose_options(request, self.has_thinking)
        messages = [
            self._build_message(message, variant) for message in (*preceding, *request.messages)
        ]
        if request.is_continued:
            _append_tag(messages[-1])
        # The names are those that ``apply_chat_template`` of transformers passes
        values: dict[str, Any] = {
            "messages": messages,
            "tools": [dict(tool) for tool in request.tools] or None,
            "documents": None,
            "add_generation_prompt": request.has_opening and not request.is_continued,
        }
        prompt = variant.render({**values, **options})
        if request.is_continued:
            prompt = _cut_at_tag(prompt)
        return prompt, replace(notice, warnings=(*notice.warnings, *self._check(request, prompt)))

    def _check(self, request: TextRequest, prompt: str) -> list[str]:
        """Return warnings about texts that a prompt lacks. Raises UsageError for the question."""
        warnings = _check_tools(request, prompt)
        roles = [message.get("role") for message in request.messages]
        asked = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
        asked = len(roles) - 1 if request.is_continued else asked
        texts = (
            (number, text)
            for number, message in enumerate(request.messages)
            for text in self._list_texts(message)
        )
        for number, share in find_lost(texts, prompt).items():
            field = f"messages[{number}] ({roles[number]})"
            if share <= _LEAST_SHARE and number == asked:
                raise UsageError(
                    f"the model's chat template leaves out the text of {field}, so that the model"
                    " cannot answer it",
                    field="messages",
                )
            part = "the text" if share <= _LEAST_SHARE else "a part of the text"
            warnings.append(f"the model's chat template leaves out {part} of {field}")
        return warnings

    def _list_texts(self, message: Mapping[str, Any]) -> list[str]:
        """Return the texts of a message, without earlier thoughts, which templates leave out."""
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if message.get("role") == "assistant":
            return [self.format.cut_thoughts(text) for text in texts]
        return texts

    def _build_message(self, message: Mapping[str, Any], variant: _Variant) -> dict[str, Any]:
        """Return a message as templates expect it: arguments are objects, and texts exist."""
        result = dict(message)
        form = variant.forms.find(str(result.get("role")))
        result["content"] = form.convert(result.get("content") or "")
        # Templates read the thoughts of earlier answers by these names
        if result.get("reasoning_content"):
            result.setdefault("thinking", result["reasoning_content"])
        if result.get("tool_calls"):
            result["tool_calls"] = [self._call(call) for call in result["tool_calls"]]
        else:
            # Some templates test the key only: an empty list would begin a call
            result.pop("tool_calls", None)
        if "tool_call_id" in result:
            result["tool_call_id"] = self._shorten_id(result["tool_call_id"])
        return result

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(call)
        function = dict(result.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                value = read_json(arguments.encode(), "the arguments", _MAX_ARGUMENTS)
            except (FormatError, UnicodeEncodeError):
                value = arguments
            function["arguments"] = value if isinstance(value, dict) else arguments
        result["function"] = function
        if "id" in result:
            result["id"] = self._shorten_id(result["id"])
        return result

    def _shorten_id(self, value: Any) -> str:
        """Return the id of a call; Mistral's templates accept nine letters and digits only."""
        text = str(value)
        if not self._has_short_ids or re.fullmatch(r"[A-Za-z0-9]{9}", text):
            return text
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


class _Variant:
    """One of the templates of a model, with the special tokens."""

    def __init__(self, template: SandboxedTemplate, tokens: Mapping[str, str]) -> None:
        self._template, self._tokens = template, tokens
        self.forms = ContentForms(self.try_render)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text of the template. Raises UsageError, ChatTemplateError."""
        try:
            return self._template.render({**values, **self._tokens})
        except RenderError as error:
            raise _build_refusal_error(error) or _build_render_error(error) from None

    def try_render(self, messages: list[dict[str, Any]]) -> str | None:
        """Return a prompt of these messages, None if the template fails."""
        values = {"messages": messages, "tools": None, "documents": None}
        opening = {"add_generation_prompt": True}
        try:
            return self._template.render({**values, **opening, **self._tokens}, _PROBE_LIMITS)
        except RenderError:
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


def _check_tools(request: TextRequest, prompt: str) -> list[str]:
    """Return a warning if a prompt has none of the tools of a request."""
    names = [str((tool.get("function") or {}).get("name")) for tool in request.tools]
    if not names or any(name in prompt for name in names):
        return []
    return ["the model's chat template leaves out the tools: the model does not know them"]


def _append_tag(message: dict[str, Any]) -> None:
    """Mark the end of the text of a message."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _TAG
    else:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _TAG}


def _cut_at_tag(prompt: str) -> str:
    """Return a prompt up to the end of the text that is continued. Raises UsageError."""
    head, tag, tail = prompt.rpartition(_TAG.strip())
    if not tag:
        raise UsageError(
            "the model's chat template does not write the last message of the assistant, so that it"
            " cannot be continued",
            field="messages",
        )
    # A template that trims texts has moved the tag
    return head if tail.startswith(" ") else head.rstrip()


def find_templates(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, str]:
    """Return the templates by name: those of files, else those in ``tokenizer_config.json``.

    ``read`` returns a file of the tokenizer's folder, or None. The result can be empty.

    Raises:
        ChatTemplateError, ModelError: A file is malformed.
    """
    # The order of transformers: files have precedence over the configuration
    files = {
        name: _decode_text(path, data)
        for name, path in _FILES.items()
        if (data := read(path)) is not None
    }
    if "default" in files:
        return files
    return _add_default(_read_templates(config, read) | files)


def _read_templates(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, str]:
    """Return the templates in JSON files by name."""
    sources = config.get("chat_template")
    if sources is None and (data := read("chat_template.json")) is not None:
        sources = parse_object("chat_template.json", data).get("chat_template")
    if isinstance(sources, str):
        return {"default": sources}
    if isinstance(sources, list):
        sources = {
            source.get("name"): source.get("template")
            for source in sources
            if isinstance(source, dict)
        }
    if not isinstance(sources, dict):
        return {}
    # Other ones, such as "rag", need what no request has
    return {
        name: text for name, text in sources.items() if name in _FILES and isinstance(text, str)
    }


def _add_default(templates: dict[str, str]) -> dict[str, str]:
    if templates and "default" not in templates:
        return {**templates, "default": templates[_TOOL_USE]}
    return templates


def parse_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that a configuration names: ``bos_token`` and others.

    A value is a text, or an object with the text as ``content``.
    """
    tokens = {}
    for role in _ROLES:
        value = config.get(f"{role}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[f"{role}_token"] = value
    return tokens


def compile_template(source: str, limits: TemplateLimits | None = None) -> SandboxedTemplate:
    """Compile a chat template in the sandbox. Raises ChatTemplateError."""
    try:
        return SandboxedTemplate(
            source,
            limits=limits or TemplateLimits(),
            names={"raise_exception": _refuse, "strftime_now": _strftime_now},
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
    except RenderError as error:
        raise ChatTemplateError(f"the chat template cannot be read: {error}") from None


def render_template(template: SandboxedTemplate, values: Mapping[str, Any]) -> str:
    """Return the text of a chat template.

    Raises:
        ChatTemplateError: The template fails. The error contains no values, so that it can be
            logged.
    """
    try:
        return template.render(values)
    except RenderError as error:
        raise _build_render_error(error) from None


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return the template of a model. Raises UsageError if it has none."""
    if template is None:
        raise UsageError(
            "the model has no chat template: it continues texts, but does not answer messages",
            hint="use completions, with the whole text as the prompt",
            field="messages",
        )
    return template


def check_request(request: TextRequest, capabilities: frozenset[str]) -> None:
    """Refuse a request with options that the model lacks. Raises UsageError with the field."""
    if request.tools:
        require(capabilities, "tools", "tools")
    if request.thinking:
        require(capabilities, "thinking", "thinking")
    if request.schema is not None:
        require(capabilities, "grammar", "response_format")
    if request.must_call and GRAMMAR not in capabilities:
        raise UsageError(
            "the model cannot be made to call a function: its runtime has no grammars",
            hint='use a model in GGUF, or "auto"',
            field="tool_choice",
        )
    if request.alternatives is not None:
        require(capabilities, "logprobs", "logprobs")


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


def _decode_text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ChatTemplateError(f"{name} is not UTF-8") from None
