"""Run clients of agent frameworks in a separate process: ``python framework_client.py``.

langchain-community, llama-index-llms-ollama, llama-index-llms-openai-like and ollama-haystack are
installed. Each line of standard input names a ``kind`` of client, what to ``do``, the ``url`` of
the worker and a ``model``; each line of standard output is the result.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}


def look(at: int) -> str:
    """Look at a place."""
    return str(at)


def use_langchain(do: str, url: str, model: str) -> Any:
    """Return the answer of LangChain's first client of ollama."""
    from langchain_community.llms import Ollama

    client = Ollama(base_url=url, model=model, temperature=0)
    if do == "stream":
        return list(client.stream("hello"))
    if do == "json":
        return client.bind(format="json", num_predict=20).invoke("hello")
    return client.invoke("hello", stop=[" is"] if do == "stop" else None)


def use_llama_index(do: str, llm: Any) -> Any:
    """Return the answer of a client of LlamaIndex."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    messages = [ChatMessage(role="user", content="hello")]
    if do == "stream":
        return [part.delta for part in llm.stream_chat(messages)]
    if do in ("tools", "required"):
        tools = [FunctionTool.from_defaults(look)]
        answer = llm.chat_with_tools(tools, "hello", tool_required=do == "required")
        return [
            [call.tool_name, call.tool_kwargs] for call in llm.get_tool_calls_from_response(answer)
        ]
    return llm.chat(messages).message.content


def use_llama_index_ollama(do: str, url: str, model: str) -> Any:
    """Return the answer of LlamaIndex's client of ollama."""
    from llama_index.llms.ollama import Ollama

    extra = {"num_predict": 20} if do == "json" else {}
    llm = Ollama(
        model=model,
        base_url=url,
        request_timeout=60,
        json_mode=do == "json",
        additional_kwargs=extra,
    )
    return use_llama_index(do, llm)


def use_llama_index_openai(do: str, url: str, model: str) -> Any:
    """Return the answer of LlamaIndex's client of servers like OpenAI's."""
    from llama_index.llms.openai_like import OpenAILike

    extra = {"response_format": {"type": "json_object"}, "max_tokens": 20} if do == "json" else {}
    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key="none",
        max_retries=0,
        context_window=512,
        is_chat_model=True,
        is_function_calling_model=True,
        additional_kwargs=extra,
    )
    return use_llama_index(do, llm)


def use_haystack(do: str, url: str, model: str) -> Any:
    """Return the answer of Haystack's client of ollama."""
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack_integrations.components.generators.ollama import OllamaChatGenerator

    parts = list[str]()
    tool = Tool(name="look", description="Look.", parameters=SCHEMA, function=look)
    options: dict[str, dict[str, Any]] = {
        "stream": {"streaming_callback": lambda part: parts.append(part.content)},
        "tools": {"tools": [tool]},
        "json": {"response_format": "json", "generation_kwargs": {"num_predict": 20}},
    }
    client = OllamaChatGenerator(model=model, url=url, **options.get(do, {}))
    reply = client.run([ChatMessage.from_user("hello")])["replies"][0]
    if do == "tools":
        return [[call.tool_name, call.arguments] for call in reply.tool_calls]
    return parts if do == "stream" else reply.text


CLIENTS: dict[str, Callable[[str, str, str], Any]] = {
    "langchain": use_langchain,
    "llama-index ollama": use_llama_index_ollama,
    "llama-index openai": use_llama_index_openai,
    "haystack": use_haystack,
}


def main() -> None:
    """Serve calls until standard input ends."""
    warnings.simplefilter("ignore")
    target = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            made = CLIENTS[call["kind"]](call["do"], call["url"], call["model"])
            said: dict[str, Any] = {"made": made}
        except Exception as error:
            said = {"kind": type(error).__name__, "message": str(error)}
        json.dump(said, target)
        target.write("\n")
        target.flush()


if __name__ == "__main__":
    main()
