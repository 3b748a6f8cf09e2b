"""The chat templates of a model: messages as the text of a prompt.

Reference: transformers, ``apply_chat_template``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.document.template import TemplateLimits
from clowder_aimage.errors import ChatTemplateError, FormatError, UsageError
from clowder_aimage.model.text.language_model import GRAMMAR, TextNotice, TextRequest, require
from clowder_aimage.model.text.prompt_check import LEAST_SHARE, MAX_LOST, find_lost
from clowder_aimage.model.text.prompt_mark import CALLS, NAME, TEXT, MarkedMessages
from clowder_aimage.model.text.template_file import DEFAULT, TOOL_USE
from clowder_aimage.model.text.template_variant import PROBE_LIMITS, TemplateVariant
from clowder_aimage.model.text.thought_format import ThoughtFormat, find_format, has_thinking
from clowder_aimage.model.text.tool_call_format import has_tools

# The tag of transformers, which some templates know
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
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
        self._added = added
        self._special = [token for token in special if token not in tokens.values()]
        self.source = "\n".join(sources.values())
        self._default = TemplateVariant(sources[DEFAULT], tokens)
        tools = sources.get(TOOL_USE)
        self._tools = self._default if tools is None else TemplateVariant(tools, tokens)
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

        def write(request: TextRequest, limits: TemplateLimits | None = None) -> str:
            values = self._build_values(request, preceding, variant)
            prompt = variant.render({**options, **values}, limits)
            return _cut_at_tag(prompt) if request.is_continued else prompt

        prompt = write(request)
        checked = self._check(request, prompt, write)
        warnings, ignored = (*notice.warnings, *checked.warnings), checked.ignored
        return prompt, TextNotice(warnings, (*notice.ignored, *ignored))

    def _build_values(
        self,
        request: TextRequest,
        preceding: Sequence[Mapping[str, Any]],
        variant: TemplateVariant,
    ) -> dict[str, Any]:
        """Return what follows from a request, by the names of transformers."""
        messages = [
            self._build_message(message, variant) for message in (*preceding, *request.messages)
        ]
        if request.is_continued:
            _append_tag(messages[-1])
        return {
            "messages": messages,
            "tools": [dict(tool) for tool in request.tools] or None,
            "documents": None,
            "add_generation_prompt": request.has_opening and not request.is_continued,
        }

    def _check(
        self, request: TextRequest, prompt: str, write: Callable[[TextRequest, TemplateLimits], str]
    ) -> TextNotice:
        """Return remarks about what a prompt lacks. Raises UsageError for the question."""
        names = [
            f"messages[{number}] ({message.get('role')})"
            for number, message in enumerate(request.messages)
        ]
        texts = [*map(self._list_texts, request.messages)]
        marks = _measure_marks(request, ["".join(parts) for parts in texts], write)
        for number, share in _find_lost(_list_asked(request), texts, prompt, marks):
            if share <= LEAST_SHARE:
                raise UsageError(
                    f"the model's chat template leaves out the text of {names[number]}, so that the"
                    " model cannot answer it",
                    field="messages",
                )
        warnings = _check_tools(request, prompt)
        for number, share in _find_lost(range(len(texts)), texts, prompt, marks):
            part = "the text" if share <= LEAST_SHARE else "a part of the text"
            warnings.append(f"the model's chat template leaves out {part} of {names[number]}")
        lost = [(number, field) for (number, field), share in marks.items() if share < 1]
        warnings += [
            f"the model's chat template leaves out the tool_calls of {names[number]}"
            for number, field in lost
            if field == CALLS
        ][:MAX_LOST]
        ignored = (f"messages[{number}].name" for number, field in lost if field == NAME)
        return TextNotice((*warnings,), (*ignored,))

    def _list_texts(self, message: Mapping[str, Any]) -> list[str]:
        """Return the texts of a message, without earlier thoughts, which templates leave out."""
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if message.get("role") == "assistant":
            return [self.format.cut_thoughts(text) for text in texts]
        return texts

    def _build_message(
        self, message: Mapping[str, Any], variant: TemplateVariant
    ) -> dict[str, Any]:
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


def _list_asked(request: TextRequest) -> list[int]:
    """Return the numbers of the messages without which there is nothing to answer."""
    roles = [message.get("role") for message in request.messages]
    users = [number for number, role in enumerate(roles) if role == "user"]
    return [*users[-1:], *([len(roles) - 1] if request.is_continued else [])]


def _measure_marks(
    request: TextRequest, texts: Sequence[str], write: Callable[[TextRequest, TemplateLimits], str]
) -> dict[tuple[int, str], float]:
    """Return the part of short texts, names and calls that the template writes, if it is seen."""
    marked = MarkedMessages(request.messages, texts)
    if marked.has_marks:
        with contextlib.suppress(UsageError, ChatTemplateError):
            return marked.measure(write(replace(request, messages=marked.messages), PROBE_LIMITS))
    return {}


def _find_lost(
    numbers: Sequence[int],
    texts: Sequence[Sequence[str]],
    prompt: str,
    marks: Mapping[tuple[int, str], float],
) -> list[tuple[int, float]]:
    """Return messages whose texts a prompt lacks, and the part that it has."""
    shares = {number: marks[number, TEXT] for number in numbers if (number, TEXT) in marks}
    others = (
        (number, text) for number in numbers if number not in shares for text in texts[number]
    )
    lost = {number: share for number, share in shares.items() if share < 1}
    return sorted((lost | find_lost(others, prompt)).items())[:MAX_LOST]


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
