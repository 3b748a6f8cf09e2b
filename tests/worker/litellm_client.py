"""Run litellm in a separate process: ``python litellm_client.py``, with litellm installed.

litellm requires another release of OpenAI's SDK than the rest of the suite, so it is installed in
a separate virtual environment and driven through two pipes. Each line of standard input is a call
of ``litellm.image_generation`` or ``litellm.aimage_generation``; each line of standard output is
its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import litellm


def answer(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call, or the class names, status and message of its exception."""
    try:
        made = getattr(litellm, function)(**arguments)
        if asyncio.iscoroutine(made):
            made = asyncio.run(made)
        return {"made": made.model_dump()}
    except Exception as error:
        return {
            "kinds": [f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__],
            "status": getattr(error, "status_code", None),
            "message": str(error),
        }


def main() -> None:
    """Serve calls until standard input ends. Output of litellm itself goes to standard error."""
    target = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        json.dump(answer(call["function"], call["arguments"]), target)
        target.write("\n")
        target.flush()


if __name__ == "__main__":
    main()
