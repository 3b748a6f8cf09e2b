"""The process that tries a JSON Schema: ``python -m clowder_aimage.model.llama.grammar_trial``.

The schema is read from standard input. The answer is the processor time in seconds that its grammar
takes whenever llama.cpp begins a text with it, and, on the next lines, the grammar.
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import xllamacpp

from clowder_aimage.content.atomic_file import write_file
from clowder_aimage.model.bounded_process import RefusedError, answer, read_log
from clowder_aimage.model.llama.byte_model import CONTEXT, build_byte_model
from clowder_aimage.model.llama.params import make_params
from clowder_aimage.model.llama.server import LlamaServer
from clowder_aimage.model.llama.temporary_directory import create_temporary_directory

# A text that must begin with a certain word does so only if the grammar is in use
_WORD = "@#@#"
# Of JSON. Without the grammar the text of this seed goes on with a control character
_STARTS, _SEED = (*'{["-tfn', *string.digits), 1
# Tokens of a text
_LENGTH = 32
# llama.cpp goes on without the grammar then
_GIVEN_UP = "; stopping"


def _try(server: LlamaServer, log_size: int, schema: bytes) -> bytes:
    """Return the answer for a schema. Raises RefusedError."""
    try:
        grammar: str = xllamacpp.json_schema_to_grammar(schema.decode())
    except (RuntimeError, TypeError, ValueError, RecursionError) as error:
        raise RefusedError(str(error)) from None
    head, start, body_rule = grammar.partition("start: ")
    begun = time.process_time()
    text = _write(server, f'{head}{start}"{_WORD}" {body_rule}')
    seconds = time.process_time() - begun
    reason, is_given_up, _ = read_log(log_size).partition(_GIVEN_UP)
    if is_given_up:
        raise RefusedError(f"its grammar is too large: {reason.rpartition(': ')[2]}")
    # LLGuidance rejects it, or no text ends, as if it requires itself: llama.cpp ignores it then
    if not text.startswith(_WORD) or text[len(_WORD) :][:1] not in _STARTS:
        raise RefusedError("it is invalid, or has keywords that are not supported")
    return f"{seconds:.6f}\n{grammar}".encode()


def _write(server: LlamaServer, grammar: str) -> str:
    """Return the beginning of a random text that a grammar allows."""
    body = {"prompt": ".", "n_predict": _LENGTH, "seed": _SEED, "stream": True, "grammar": grammar}
    with closing(server.stream(body)) as batches:
        return "".join(answer["choices"][0]["text"] for batch in batches for answer in batch)


def _prepare() -> Callable[[bytes], bytes]:
    with create_temporary_directory() as directory:
        path = Path(directory, "bytes.gguf")
        write_file(path, build_byte_model(), durable=False)
        params = make_params(path, [], weights=0, context=CONTEXT, parallel=1, pooling=None)
        params.n_gpu_layers = 0
        server = LlamaServer(params)
    return partial(_try, server, len(read_log()))


def main() -> None:
    """Run the process."""
    answer(_prepare)


if __name__ == "__main__":
    main()
