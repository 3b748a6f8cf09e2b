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
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.model.text.language_model import TextRequest, require
from clowder_aimage.tensor.config_fields import parse_object

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MAX_REFUSAL = 300  # characters
_LIMITS = TemplateLimits(text=4 << 20, size=512 << 20, seconds=5.0)  # of long conversations
_TOOL_USE = "tool_use"
_MAX_ARGUMENTS = 1 << 20  # bytes of a call


class ChatTemplate:
    """The templates of a model: the default, and perhaps one for requests with tools.

    Args:
        sources: Their texts; "default" is required.
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
            UsageError: The template refuses the messages; the message has its reason.
            ModelError: It fails. The message has nothing of the request, so it may be logged.
        """
        values: dict[str, Any] = {
            "messages": [self._message(one) for one in request.messages],
            "tools": [dict(one) for one in request.tools] or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        if request.thinking is not None:
            values["enable_thinking"] = request.thinking
        template = self._tools if request.tools else self._default
        try:
            return template.render({**values, **self._tokens})
        except RenderError as error:
            raise _refusal(error) or _failure(error) from None

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as templates expect it: arguments are objects, and texts exist."""
        found = dict(message)
        if found.get("content") is None:
            found["content"] = ""
        if found.get("tool_calls"):
            found["tool_calls"] = [self._call(one) for one in found["tool_calls"]]
        else:
            found.pop("tool_calls", None)  # some templates only look for the key
        if "tool_call_id" in found:
            found["tool_call_id"] = self._id(found["tool_call_id"])
        return found

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(call)
        function = dict(found.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                value = read_json(arguments.encode(), "the arguments", _MAX_ARGUMENTS)
            except (FormatError, UnicodeEncodeError):
                value = arguments
            function["arguments"] = value if isinstance(value, dict) else arguments
        found["function"] = function
        if "id" in found:
            found["id"] = self._id(found["id"])
        return found

    def _id(self, value: Any) -> str:
        """Return the id of a call; Mistral's templates accept nine letters and digits only."""
        text = str(value)
        if not self._has_short_ids or re.fullmatch(r"[A-Za-z0-9]{9}", text):
            return text
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def find_templates(
    config: Mapping[str, Any], read: Callable[[str], bytes | None]
) -> dict[str, str]:
    """Return the templates by name: those of files, else those in ``tokenizer_config.json``.

    ``read`` returns a file of the tokenizer's folder, or None. The result is empty without one.

    Raises:
        ModelError: A file is malformed.
    """
    if (data := read("chat_template.jinja")) is not None:
        return {"default": _text("chat_template.jinja", data)}
    found = config.get("chat_template")
    if found is None and (data := read("chat_template.json")) is not None:
        found = parse_object("chat_template.json", data).get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if not isinstance(found, dict):
        return {}
    named = {
        name: text
        for name, text in found.items()
        if name in ("default", _TOOL_USE) and isinstance(text, str)
    }
    if named and "default" not in named:
        named["default"] = named[_TOOL_USE]
    return named


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
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
    """Return a chat template in the sandbox. Raises ModelError: it cannot be read."""
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
        raise ModelError(f"the chat template cannot be read: {error}") from None


def render_template(template: SandboxedTemplate, values: Mapping[str, Any]) -> str:
    """Return the text of a chat template.

    Raises:
        ModelError: It fails. The message has nothing of the values, so it may be logged.
    """
    try:
        return template.render(values)
    except RenderError as error:
        raise _failure(error) from None


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
    if request.alternatives is not None:
        require(capabilities, "logprobs", "logprobs")


class _RefusalError(jinja2.TemplateError):
    """A template refuses the messages."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant output; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _failure(error: RenderError) -> ModelError:
    is_refusal = error.kind == _RefusalError.__name__
    what = "refuses the messages" if is_refusal else f"failed: {error.summary}"
    return ModelError(f"the chat template {what}")


def _refusal(error: RenderError) -> UsageError | None:
    """Return the error for a request that the template itself refuses."""
    if error.kind != _RefusalError.__name__:
        return None
    reason = "".join(one if one.isprintable() else " " for one in str(error))
    message = f"the model's chat template refuses the messages: {reason[:_MAX_REFUSAL]}"
    return UsageError(message, field="messages")


def _refuse(message: object = "") -> None:
    raise _RefusalError(str(message)[: 4 * _MAX_REFUSAL])


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    if len(format) > 100 or re.search(r"\d\d\d", format):  # a width
        raise ValueError("the format of the time is too large")
    return datetime.now().strftime(format)


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ModelError(f"{name} is not UTF-8") from None
