"""The verb ``embed``."""

from __future__ import annotations

import sys
from operator import mul
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import (
    WHERE,
    connection_options,
    in_section,
    remote_option,
    verb,
)
from clowder_aimage.cli.console.output import clean_line, format_table, note, print_result
from clowder_aimage.cli.worker.choice import choose_worker, find_named_worker
from clowder_aimage.cli.worker.local import LocalWorker
from clowder_aimage.cli.worker.local_model import LocalOptions
from clowder_aimage.cli.worker.model_argument import ModelArgument, model_argument
from clowder_aimage.cli.worker.model_kind import check_embedder
from clowder_aimage.errors import UsageError
from clowder_aimage.model.text.language_model import MAX_PROMPT_NAME, EmbeddingRequest
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clowder_aimage.config.name_index import NamedModel
    from clowder_aimage.model.text.language_model import Embeddings

# Bytes of stdin.
_MAX_STDIN = 64 << 20
# Texts whose cosines are a table that can be read.
_MAX_TABLE = 64
# Characters of a text in the table.
_SHOWN = 24
# Options that a worker serves too.
_SERVED = ("prompt", "local")


@examples(
    "aimage embed minilm 'a red ball' 'a scarlet sphere' 'tax law'",
    "aimage embed minilm 'a red ball' --json",
    "aimage embed e5 - --prompt query --json < questions.txt",
)
@verb
@model_argument
@click.argument("texts", metavar="[TEXT...]", nargs=-1)
@click.option("--prompt", metavar="NAME", help="A prompt of the model, before each TEXT.")
@in_section(
    WHERE,
    click.option("--local", is_flag=True, help="Compute in this process, not in a worker."),
    remote_option,
)
@connection_options
def embed(
    model: ModelArgument, texts: tuple[str, ...], prompt: str | None, local: bool, remote: bool
) -> None:
    """Compute embeddings of texts with the model REF.

    One TEXT prints its vector, several print the cosines between them. With --json the vectors are
    printed, with their dimensions and the number of tokens. '-' reads a TEXT from each line of
    stdin.

    The model is chosen and fetched as for 'aimage run', and so is the worker.
    """
    if local and remote:
        raise UsageError("--local cannot be combined with --remote")
    if prompt is not None and len(prompt) > MAX_PROMPT_NAME:
        raise UsageError(f"--prompt exceeds {MAX_PROMPT_NAME} characters")
    request = EmbeddingRequest(_read_texts(texts), prompt)
    client = find_named_worker(_SERVED, is_local=local, is_remote=remote)
    reference = model.obtain(client, is_local=local, check=_check_named)
    check_embedder(reference, client, local=local)
    worker = choose_worker(reference, client, (), _SERVED, is_local=local)
    result = (worker or LocalWorker(reference, LocalOptions())).embed(request)
    for warning in result.list_warnings():
        note(f"warning: {warning}")
    _print(reference, request.texts, result)


def _check_named(model: NamedModel) -> None:
    """Reject an image model before a download. Raises UsageError."""
    if model.kind == "image":
        raise UsageError(
            f"{model.name} computes no embeddings", hint=f"aimage run {model.name} PROMPT"
        )


def _read_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of the arguments, or the lines of stdin. Raises UsageError."""
    is_typed = not texts and sys.stdin is not None and sys.stdin.isatty()
    if is_typed:
        raise UsageError("the text is missing", hint="aimage embed REF TEXT...")
    if tuple(texts) not in ((), ("-",)):
        place, listed = "text", tuple(texts)
    else:
        place, listed = "line", _read_lines()
    if not listed:
        raise UsageError("stdin has no text", hint="aimage embed REF TEXT...")
    for number, text in enumerate(listed, 1):
        if not text.strip():
            raise UsageError(f"{place} {number} is empty")
    return listed


def _read_lines() -> tuple[str, ...]:
    data = sys.stdin.buffer.read(_MAX_STDIN + 1) if sys.stdin is not None else b""
    if len(data) > _MAX_STDIN:
        raise UsageError(f"the texts on stdin exceed {_MAX_STDIN} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError("stdin is not valid UTF-8 text") from None
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n") if text)


def _print(reference: Reference, texts: Sequence[str], result: Embeddings) -> None:
    """Print the vector of a text, or the cosines of several; with ``--json`` all vectors."""
    value = {
        "reference": str(reference),
        "dimensions": len(result.vectors[0]),
        "tokens": result.tokens,
        **({"cut": result.cut} if result.cut else {}),
        "vectors": [list(vector) for vector in result.vectors],
    }
    print_result(value, _format(texts, result.vectors))


def _format(texts: Sequence[str], vectors: Sequence[Sequence[float]]) -> list[str]:
    if len(texts) == 1:
        return [" ".join(f"{number:.7g}" for number in vectors[0])]
    if len(texts) > _MAX_TABLE:
        return [f"{len(texts)} vectors of {len(vectors[0])} numbers; --json prints them"]
    rows = [("", "TEXT", *(str(number) for number in range(1, len(texts) + 1)))]
    for number, (text, vector) in enumerate(zip(texts, vectors, strict=True), 1):
        products = (sum(map(mul, vector, other)) for other in vectors)
        cosines = (f"{product:.4f}" for product in products)
        rows.append((str(number), _shorten(text), *cosines))
    return format_table(rows)


def _shorten(text: str) -> str:
    line = clean_line(" ".join(text.split()))
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
