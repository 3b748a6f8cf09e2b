"""The prompt of a request for an answer, and the stream that its text passes through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clowder_aimage.model.text.chat_template import ChatTemplate
from clowder_aimage.model.text.content_form import join_parts
from clowder_aimage.model.text.forced_call import CallStream, open_call
from clowder_aimage.model.text.language_model import TextNotice, TextRequest
from clowder_aimage.model.text.stream import TextStream
from clowder_aimage.model.text.thought_format import PLAIN, ThoughtFormat
from clowder_aimage.model.text.tool_call_format import call_format

# Characters at the end of a prompt that may begin an answer
_OPENING = 64


def begin_chat(
    template: ChatTemplate,
    request: TextRequest,
    stop: Sequence[str] = (),
    *,
    preceding: Sequence[Mapping[str, Any]] = (),
    is_stripped: bool = False,
) -> tuple[str, TextStream, TextNotice]:
    """Return the prompt of a request, the stream for its text, and remarks.

    Args:
        template: The chat template of the model.
        request: Its messages follow the ``preceding`` ones of the model itself.
        stop: Strings that end the text, in addition to those of the request.
        preceding: Messages of the model itself.
        is_stripped: The tokenizer puts a space before a text.

    Raises as ``ChatTemplate.compose``.
    """
    if request.has_grammar and request.thinking is None and template.has_switch:
        # The grammar has no room for thoughts
        request = replace(request, thinking=False)
    prompt, notice = template.compose(request, preceding)
    form, is_continued = template.format, request.is_continued
    if request.has_grammar:
        prompt, form = form.close_thoughts(prompt), PLAIN
    if request.must_call:
        opening = open_call(call_format(template.source))
        return prompt + opening, CallStream(request.tools), notice
    if is_continued:
        opened = form.find_open(join_parts(request.messages[-1]["content"]))
    else:
        opened = _find_opened(form, prompt, request)
    stream = TextStream(
        (*request.stop, *stop),
        calls=call_format(template.source) if request.tools else None,
        tools=request.tools,
        format_=form,
        opened=opened,
        in_header=form.ends_in_header(prompt),
        is_begun=is_continued and not opened,
        is_stripped=(is_stripped or bool(opened)) and not is_continued,
    )
    return prompt, stream, notice


def _find_opened(form: ThoughtFormat, prompt: str, request: TextRequest) -> str:
    """Return the mark of thoughts, or of an answer, that the end of a prompt has begun."""
    if end := form.find_end(prompt):
        return end
    opened = form.find_open(prompt[-_OPENING:])
    # A message may be about these marks
    contents = (join_parts(message.get("content") or "") for message in request.messages)
    return "" if any(opened in text for text in contents) else opened
