"""litellm as another program has it: ``python litellm_client.py``, with a Python that has litellm.

It wants another release of OpenAI's SDK than the rest of the suite, so it lives in a virtual
environment of its own, and is reached through two pipes. Each line of standard input is a call of
``litellm.image_generation`` or ``litellm.aimage_generation``, each line of standard output what
came of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import litellm


def answer(function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a call returns, or what it raises: the classes by name, and what OpenAI's SDK has."""
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
    """Answer until standard input ends. What litellm itself prints goes to standard error."""
    target = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        json.dump(answer(call["function"], call["arguments"]), target)
        target.write("\n")
        target.flush()


if __name__ == "__main__":
    main()
