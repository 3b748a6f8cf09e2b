"""Questions to a language model: one, or a conversation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.output import is_verbose, note, print_result, wants_value
from clowder_aimage.cli.text.answer_output import AnswerOutput
from clowder_aimage.cli.text.option import build_text_request

if TYPE_CHECKING:
    from clowder_aimage.cli.worker.worker import Worker
    from clowder_aimage.oci import Reference


@dataclass(slots=True)
class TextOrder:
    """The options of answers, and the conversation. Both may change between questions."""

    reference: Reference
    values: dict[str, Any]
    worker: Worker
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Print the answer to a question, and remember both.

        An answer that is interrupted is remembered as far as it came; after an error the question
        is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        request, output = build_text_request(self.values, messages), AnswerOutput()
        try:
            with contextlib.closing(self.worker.answer(request)) as events:
                output.show(events)
        finally:
            if output.text:
                self.messages = [*messages, {"role": "assistant", "content": output.text}]
        self._report(output)

    def clear(self) -> None:
        """Forget the conversation."""
        self.messages.clear()
        note("the conversation is forgotten")

    def _report(self, output: AnswerOutput) -> None:
        if wants_value():
            print_result({"reference": str(self.reference), **output.to_json()}, "")
        output.warn_of_cut()
        if is_verbose():
            note("\n".join(output.format_statistics()))
