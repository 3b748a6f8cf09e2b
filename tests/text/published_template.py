"""Chat templates of published models, and the conversations that they are tried on.

``python -m tests.text.published_template DIRECTORY`` writes both files in ``tests/vectors/`` anew,
from a directory of templates, with transformers.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import lzma
import sys
from functools import cache
from pathlib import Path
from typing import Any

from clowder_aimage.model.text.chat_template import ChatTemplate

VECTORS = Path(__file__).parents[1] / "vectors"
_TEMPLATES, _DIGESTS = VECTORS / "chat-templates.json.xz", VECTORS / "chat-template-digests.json"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FAILURE = "error"
NOW = datetime.datetime(2026, 11, 28, 16, 0)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Return the "weather" of a city & its <area>.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city."},
                "days": {"type": "integer", "default": 1},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be brief & exact: <short> answers."}
USER = {"role": "user", "content": "How's the weather in Köln?\nAnd in 東京?"}
ANSWER = {"role": "assistant", "content": "It is 7 °C."}
THOUGHT = {"role": "assistant", "content": "Rain.", "reasoning_content": "The user asks again."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}},
        }
    ],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "abcdef123",
    "name": "get_weather",
    "content": '{"sky": "grey"}',
}
THANKS = {"role": "user", "content": "  Thanks — and tomorrow? "}
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([USER], []),
    ([SYSTEM, USER], []),
    ([SYSTEM, USER, ANSWER, THANKS], []),
    ([SYSTEM, USER], [TOOL]),
    ([USER, CALL, RESULT], [TOOL]),
    ([USER, THOUGHT, THANKS], []),
)
# The last message is continued
CONTINUED = [USER, {"role": "assistant", "content": "Well, "}]


@cache
def read_templates() -> dict[str, str]:
    """Return the texts by the names of their files."""
    templates: dict[str, str] = json.loads(lzma.decompress(_TEMPLATES.read_bytes()))["templates"]
    return templates


@cache
def make_published(name: str) -> ChatTemplate:
    """Return a compiled template."""
    return ChatTemplate({"default": read_templates()[name]}, TOKENS)


def read_digests() -> dict[str, list[str]]:
    """Return the digests of the prompts of each template: of each conversation, and CONTINUED."""
    digests: dict[str, list[str]] = json.loads(_DIGESTS.read_text("utf-8"))["prompts"]
    return digests


def digest(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def _write(directory: Path) -> None:
    from transformers import __version__
    from transformers.utils import chat_template_utils

    class Clock:
        now = staticmethod(lambda: NOW)

    chat_template_utils.datetime = Clock
    prompts: dict[str, list[str]] = {}
    templates = {path.stem: path.read_text("utf-8") for path in sorted(directory.glob("*.jinja"))}
    for name, text in templates.items():
        prompts[name] = []
        for messages, tools in (*CONVERSATIONS, (CONTINUED, [])):
            is_continued = messages is CONTINUED
            try:
                (prompt,), _ = chat_template_utils.render_jinja_template(
                    [messages],
                    tools=tools or None,
                    chat_template=text,
                    add_generation_prompt=not is_continued,
                    continue_final_message=is_continued,
                    **TOKENS,
                )
            except Exception:
                prompt = None
            prompts[name].append(FAILURE if prompt is None else digest(prompt))
    about = {
        "source": "llama-cpp-python 0.3.36, vendor/llama.cpp/models/templates",
        "licence": "MIT",
    }
    document = json.dumps({**about, "templates": templates}, indent=0, ensure_ascii=False)
    _TEMPLATES.write_bytes(lzma.compress(document.encode(), preset=9 | lzma.PRESET_EXTREME))
    expected = {"source": f"transformers {__version__}, render_jinja_template", "prompts": prompts}
    _DIGESTS.write_text(json.dumps(expected, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
