"""Bodies as clients send them: recorded, or as their sources and public threads show them.

The models are named ``words``, ``vectors`` and ``tiny``. The last item of an entry are the fields
that the worker ignores, as in its header.
"""

from __future__ import annotations

from typing import Any

CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GENERATE, OLLAMA_CHAT, OLLAMA_EMBED = "/api/generate", "/api/chat", "/api/embed"
IMAGES = "/v1/images/generations"
HELLO = {"role": "user", "content": "hello"}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Look at a place",
    "parameters": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"at": {"type": "integer", "format": "int32"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": LOOK}
# LangChain's Ollama of langchain-community 0.4.2
_NULLS = (
    "mirostat mirostat_eta mirostat_tau num_ctx num_gpu num_thread num_predict repeat_last_n "
    "repeat_penalty stop tfs_z top_k top_p"
)
_LANGCHAIN: dict[str, Any] = {
    "options": {**dict.fromkeys(_NULLS.split()), "temperature": 0.0},
    "model": "words",
    **dict.fromkeys(("images", "format", "system", "template", "keep_alive", "raw")),
}
# llama.cpp's web UI
_LLAMA = {
    "messages": [{"role": "system", "content": "be brief"}, HELLO],
    "model": "words",
    "stream": True,
    "return_progress": True,
    "reasoning_format": "auto",
    "temperature": 0.8,
    "max_tokens": -1,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0,
    "typ_p": 1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_penalty_last_n": -1,
    "samplers": ["penalties", "dry", "top_k", "temperature"],
    "timings_per_token": True,
}
_LLAMA_IGNORED = (
    "dry_multiplier dry_penalty_last_n dynatemp_exponent dynatemp_range reasoning_format "
    "repeat_last_n repeat_penalty return_progress samplers timings_per_token typ_p xtc_probability"
)
# n8n's and Flowise's nodes of LangChain for JavaScript
_N8N_OPTIONS = {
    "num_ctx": 2048,
    "num_predict": -1,
    "temperature": 0.7,
    "top_k": -1,
    "top_p": 1,
    "use_mmap": True,
    "use_mlock": False,
    "penalize_newline": True,
    "num_thread": 0,
}
_N8N_IGNORED = "num_ctx num_thread penalize_newline use_mlock use_mmap"
_PARTS = [{"type": "text", "text": "hello"}]

# The client, its path, its body, and the fields that are ignored, separated by spaces
BODIES: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("langchain ollama", GENERATE, {"prompt": "hello", **_LANGCHAIN}, ""),
    (
        "langchain ollama with stops",
        GENERATE,
        {"prompt": "hello", **_LANGCHAIN, "stop": ["Observation:"]},
        "",
    ),
    (
        "langchain ollama embeddings",
        "/api/embeddings",
        {"model": "vectors", "prompt": "query: hello", "options": {"stop": None}},
        "options",
    ),
    (
        "langchain-ollama",
        OLLAMA_CHAT,
        {"model": "words", "stream": True, "options": {}, "messages": [HELLO], "tools": []},
        "",
    ),
    (
        "langchain-ollama text",
        GENERATE,
        {"model": "words", "stream": True, "options": {}, "format": "", "prompt": "hello"},
        "",
    ),
    (
        "haystack",
        OLLAMA_CHAT,
        {"model": "words", "messages": [HELLO], "options": {}, "tools": [], "think": False},
        "",
    ),
    (
        "litellm ollama",
        GENERATE,
        {
            "model": "words",
            "prompt": "### User:\nhello\n\n",
            "options": {"stop": "x", "num_predict": 5},
            "stream": False,
            "images": [],
        },
        "",
    ),
    (
        "litellm ollama_chat",
        OLLAMA_CHAT,
        {"model": "words", "messages": [{**HELLO, "images": []}], "options": {}, "stream": False},
        "",
    ),
    ("llama.cpp's web UI", CHAT, _LLAMA, _LLAMA_IGNORED),
    (
        "llama.cpp's older web UI",
        CHAT,
        {"messages": [HELLO], "stream": True, "cache_prompt": True, "samplers": "edkypmxt"}
        | {"max_tokens": -1, "seed": -1, "model": "words"},
        "cache_prompt samplers",
    ),
    (
        "Spring AI OpenAI",
        CHAT,
        {
            "messages": [{"content": "hello", "role": "user"}],
            "model": "words",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "tools": [TOOL],
            "tool_choice": "auto",
        },
        "",
    ),
    (
        "Spring AI ollama",
        OLLAMA_CHAT,
        {
            "model": "words",
            "messages": [{"role": "user", "content": "hello"}],
            "stream": False,
            "keep_alive": "5m",
            "format": None,
            "tools": [],
            "options": {"seed": -1, "temperature": 0.7, "top_k": 40, "num_gpu": -1},
        },
        "options.num_gpu",
    ),
    (
        "Spring AI ollama embeddings",
        OLLAMA_EMBED,
        {"model": "vectors", "input": ["hello"], "options": {}, "truncate": True},
        "options truncate",
    ),
    (
        "Microsoft.Extensions.AI OpenAI",
        CHAT,
        {
            "messages": [{"role": "user", "content": _PARTS}],
            "model": "words",
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "tool_choice": "auto",
        },
        "",
    ),
    (
        "Microsoft.Extensions.AI.Ollama",
        OLLAMA_CHAT,
        {
            "format": None,
            "messages": [{"role": "user", "content": "hello", "images": None, "tool_calls": None}],
            "model": "words",
            "options": None,
            "stream": False,
            "tools": None,
        },
        "",
    ),
    (
        "OllamaSharp",
        OLLAMA_CHAT,
        {
            "model": "words",
            "messages": [{"role": "user", "content": "hello", "images": None, "tool_name": None}],
            "stream": True,
            "options": {"num_ctx": None, "seed": None, "stop": None, "temperature": None},
            "keep_alive": None,
            "template": None,
            "format": None,
            "tools": None,
            "think": None,
            "CustomHeaders": {},
        },
        "CustomHeaders",
    ),
    (
        "OllamaSharp text",
        GENERATE,
        {
            "model": "words",
            "prompt": "hello",
            "suffix": "",
            "images": None,
            "system": "",
            "template": "",
            "context": [1, 2, 3],
            "raw": False,
            "options": {"stop": []},
        },
        "context",
    ),
    (
        "Semantic Kernel",
        CHAT,
        {
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "max_completion_tokens": 256,
            "stop": [],
            "logit_bias": {},
            "messages": [HELLO],
            "model": "words",
        },
        "",
    ),
    (
        "VisualChatGPTStudio",
        CHAT,
        {
            "model": "words",
            "messages": [HELLO],
            "temperature": 0.0,
            "max_tokens": 2048.0,
            "top_p": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop": "",
            "stream": True,
        },
        "",
    ),
    (
        "VisualChatGPTStudio text",
        COMPLETE,
        {
            "model": "words",
            "prompt": "hello",
            "suffix": None,
            "max_tokens": 64,
            "n": 1.0,
            "stream": False,
            "logprobs": None,
            "echo": False,
            "stop": "",
            "best_of": 1,
            "logit_bias": None,
            "user": "",
        },
        "",
    ),
    (
        "LiteLLM to OpenAI",
        CHAT,
        {
            "model": "words",
            "messages": [HELLO],
            "stream": True,
            "stream_options": {"include_usage": True},
            "metadata": {"trace": "a"},
            "user": "ann",
        },
        "",
    ),
    (
        "n8n OpenAI",
        CHAT,
        {
            "model": "words",
            "temperature": 0.7,
            "top_p": 1,
            "n": 1,
            "max_tokens": -1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [HELLO],
            "tools": [{"type": "function", "function": {**LOOK, "strict": False}}],
            "tool_choice": "auto",
        },
        "tools[0].function.strict",
    ),
    (
        "n8n and Flowise ollama",
        OLLAMA_CHAT,
        {
            "model": "words",
            "messages": [HELLO],
            "keep_alive": "5m",
            "options": _N8N_OPTIONS,
            "tools": [],
            "stream": True,
        },
        " ".join(f"options.{name}" for name in _N8N_IGNORED.split()),
    ),
    (
        "LangChain for JavaScript, an answer sent back",
        CHAT,
        {
            "model": "words",
            "messages": [
                HELLO,
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "index": 0,
                            "function": {"name": "look", "arguments": '{"at": 1}'},
                        }
                    ],
                },
                {"role": "tool", "content": "hello", "tool_call_id": "call_1"},
            ],
            "tools": [TOOL],
        },
        "messages[1].tool_calls[0].index",
    ),
    (
        "Open WebUI ollama",
        OLLAMA_CHAT,
        {
            "model": "words",
            "messages": [HELLO],
            "options": {"temperature": 0.8, "seed": None, "stop": None, "num_ctx": 4096},
            "format": None,
            "keep_alive": None,
            "think": None,
            "stream": True,
            "metadata": {"chat_id": "a"},
        },
        "metadata options.num_ctx",
    ),
    (
        "Open WebUI OpenAI",
        CHAT,
        {
            "stream": True,
            "model": "words",
            "messages": [HELLO],
            "stream_options": {"include_usage": True},
            "seed": None,
            "stop": None,
            "features": {"web_search": False},
            "logit_bias": None,
        },
        "features",
    ),
    (
        "OpenAI embeddings",
        EMBED,
        {
            "model": "vectors",
            "input": ["hello"],
            "encoding_format": "base64",
            "dimensions": None,
            "user": None,
        },
        "",
    ),
    (
        "a web UI of pictures",
        IMAGES,
        {
            "model": "tiny",
            "prompt": "a fox",
            "negative_prompt": "",
            "steps": 1,
            "width": 32,
            "height": 32,
            "seed": -1,
            "cfg_scale": 7.0,
            "sampler_name": "Euler a",
            "batch_size": 1,
        },
        "batch_size cfg_scale sampler_name",
    ),
    (
        "Open WebUI pictures",
        IMAGES,
        {"model": "tiny", "prompt": "a fox", "n": 1, "size": "32x32", "response_format": "b64_json"}
        | {"steps": 1.0, "seed": "42", "style": None},
        "",
    ),
    (
        "LibreChat pictures",
        IMAGES,
        {"model": "tiny", "prompt": "a fox", "size": "32x32", "quality": "low", "style": "vivid"},
        "style",
    ),
    (
        "ollama pictures",
        GENERATE,
        {
            "model": "tiny",
            "prompt": "a fox",
            "width": 32,
            "height": 32,
            "steps": 1,
            "options": {"seed": -1, "num_ctx": None},
            "images": None,
            "stop": [],
            "stream": False,
        },
        "",
    ),
)
