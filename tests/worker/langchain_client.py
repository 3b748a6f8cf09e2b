"""Run LangChain in a separate process: ``python langchain_client.py``, with langchain installed.

Each line of standard input is a call: ``kind`` (openai or ollama), ``do``, and the arguments of the
model; each line of standard output is its result. LangChain requires another release of OpenAI's
SDK than the rest of the suite.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

MESSAGES = [SystemMessage("be brief"), HumanMessage("hello")]


@tool
def look(at: int) -> str:
    """Look at something."""
    return str(at)


def answer(kind: str, do: str, arguments: dict[str, Any]) -> Any:
    """Return the result of a call."""
    if do == "embed":
        maker: Any = OpenAIEmbeddings if kind == "openai" else OllamaEmbeddings
        return maker(**arguments).embed_documents(["a red ball", "a blue cube"])
    chat: Any = (ChatOpenAI if kind == "openai" else ChatOllama)(**arguments)
    if do == "tools":
        return [dict(call) for call in chat.bind_tools([look]).invoke(MESSAGES).tool_calls]
    if do == "stream":
        return [chunk.content for chunk in chat.stream(MESSAGES)]
    made = chat.invoke(MESSAGES)
    return {"content": made.content, "usage": made.usage_metadata}


def main() -> None:
    """Serve calls until standard input ends."""
    target = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            said: dict[str, Any] = {"made": answer(call["kind"], call["do"], call["arguments"])}
        except Exception as error:
            said = {"kind": type(error).__name__, "message": str(error)}
        json.dump(said, target)
        target.write("\n")
        target.flush()


if __name__ == "__main__":
    main()
