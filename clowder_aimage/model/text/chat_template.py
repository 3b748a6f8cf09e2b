"""The chat template of a model: messages as the text of a prompt.

Templates are parts of models and untrusted, so they are rendered in a sandbox, with the few names
that transformers provides. Reference: transformers, ``apply_chat_template``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.document.template import RenderError, SandboxedTemplate, TemplateLimits
from clowder_aimage.errors import ChatTemplateError, FormatError, UsageError
from clowder_aimage.model.text.language_model import GRAMMAR, TextRequest, require
from clowder_aimage.tensor.config_fields import parse_object

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MAX_REFUSAL = 300  # characters
# Long conversations render more text than the templates of other documents
_LIMITS = TemplateLimits(text=4 << 20, size=512 << 20, seconds=2.0)
_TOOL_USE = "tool_use"
_MAX_ARGUMENTS = 1 << 20  # bytes of a call


class ChatTemplate:
    """The templates of a model: the default, and optionally a template for requests with tools.

    Args:
        sources: Texts of the templates by name; "default" is required.
        tokens: Special tokens by names such as ``bos_token``.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        self.source = "\n".join(sources.values())
        default = sources["default"]
        self._default = compile_template(default, _LIMITS)
        tools = sources.get(_TOOL_USE)
        self._tools = self._default if tools is None else compile_template(tools, _LIMITS)
        self._has_short_ids = "[TOOL_CALLS]" in self.source and "length != 9" in self.source

    @property
    def has_tools(self) -> bool:
        """True if the template writes tools."""
        return re.search(r"\btools\b", self.source) is not None

    @property
    def has_thinking(self) -> bool:
        """True if the template has thoughts before an answer."""
        return "enable_thinking" in self.source or "<think>" in self.source

    def render(self, request: TextRequest) -> str:
        """Return the messages of a request as a prompt that asks for an answer.

        Raises:
            UsageError: The template refuses the messages, for the reason in the error's message.
            ChatTemplateError: The template fails. The error contains no text of the request, so
                that it can be logged.
        """
        # The names are those that ``apply_chat_template`` of transformers passes
        values: dict[str, Any] = {
            "messages": [self._build_message(message) for message in request.messages],
            "tools": [dict(tool) for tool in request.tools] or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        if request.thinking is not None:
            values["enable_thinking"] = request.thinking
        template = self._tools if request.tools else self._default
        try:
            return template.render({**values, **self._tokens})
        except RenderError as error:
            raise _build_refusal_error(error) or _build_render_error(error) from None

    def _build_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as templates expect it: arguments are objects, and texts exist."""
        result = dict(message)
        if result.get("content") is None:
            result["content"] = ""
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


def find_templates(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, str]:
    """Return the templates by name: those of files, else those in ``tokenizer_config.json``.

    ``read`` returns a file of the tokenizer's folder, or None. The result can be empty.

    Raises:
        ChatTemplateError, ModelError: A file is malformed.
    """
    # The order of transformers: a file of its own has precedence over the configuration
    if (data := read("chat_template.jinja")) is not None:
        return {"default": _decode_text("chat_template.jinja", data)}
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
    templates = {
        name: text
        for name, text in sources.items()
        if name in ("default", _TOOL_USE) and isinstance(text, str)
    }
    if templates and "default" not in templates:
        templates["default"] = templates[_TOOL_USE]
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
