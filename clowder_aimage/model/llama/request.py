"""A request as llama.cpp expects it, with the defaults of the model.

Source: ggml-org/llama.cpp, tools/server/README.md, "POST /completion"; ollama, docs/modelfile.md,
"Valid Parameters and Values".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.model.text.language_model import (
    MAX_STOP,
    MAX_STOPS,
    DrawnTokens,
    Sampling,
    TextRequest,
    Token,
)

# Of a token without a probability, as in OpenAI's API
_LEAST_LOGPROB = -9999.0
# llama.cpp draws a seed for the last value
_SEEDS = (1 << 32) - 1
# llama.cpp's and ollama's, by the field of Sampling
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}


class ModelParams:
    """Defaults of a model: the layer ``params.json`` as ollama writes it.

    Raises:
        FormatError: A parameter is invalid.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params
        stated = {field: params[name] for field, name in _NAMES.items() if name in params}
        try:
            self._sampling = _build_fields(Sampling(**stated))
        except (UsageError, TypeError) as error:
            raise FormatError(f"params.json: {error}") from None
        stops = params.get("stop", [])
        self.stop = tuple(stops) if isinstance(stops, list) else (stops,)
        if len(self.stop) > MAX_STOPS or not all(
            isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in self.stop
        ):
            raise FormatError(f"params.json: stop has up to {MAX_STOPS} texts")

    @property
    def context(self) -> int | None:
        return self._count("num_ctx")

    def build_body(self, request: TextRequest, prompt: str) -> dict[str, Any]:
        """Return llama.cpp's request, without grammar and marks."""
        most, drawn = request.max_tokens or self._count("num_predict"), request.begun
        body: dict[str, Any] = {
            "prompt": [prompt, *drawn.numbers] if drawn.count else prompt,
            "stream": True,
            "return_progress": True,
            # States the numbers of tokens
            "verbose": True,
            "n_predict": -1 if most is None else most - drawn.count,
        }
        if request.alternatives is not None:
            body["logprobs"] = max(1, request.alternatives)
        body |= self._sampling | _build_fields(request.sampling)
        # With the same seed the continuation would be drawn as the beginning was
        if "seed" in body:
            body["seed"] = (body["seed"] + drawn.count) % _SEEDS
        return body

    def _count(self, name: str) -> int | None:
        """Return a positive number; ollama writes -1 and -2 for none."""
        value = self._params.get(name)
        return value if type(value) is int and value > 0 else None


def split_drawn_tokens(
    answers: Sequence[Mapping[str, Any]], count: int
) -> tuple[DrawnTokens, DrawnTokens]:
    """Return the tokens of answers, and those after the last text; ``count`` were before.

    The latter are hidden: one may be the token that ends the text. A text takes the place of tokens
    that are parts of one character: only the last is stated.
    """
    numbers, texts = list[int | str](), list[str]()
    # The count of tokens up to the last text, and the length of ``numbers`` there
    start, end, length = count, count, 0
    for answer in answers:
        text, stated = answer["choices"][0]["text"], answer["__verbose"]
        new = int(stated["tokens_predicted"]) - count
        if answer["choices"][0]["finish_reason"] is None and new > 0:
            numbers.append(int(stated["tokens"][0]) if new == 1 else text)
            texts.append(text)
            count += new
            if text:
                end, length = count, len(numbers)
    shown = DrawnTokens(tuple(numbers[:length]), end - start, "".join(texts))
    return shown, DrawnTokens(tuple(numbers[length:]), count - end)


def parse_tokens(choice: Mapping[str, Any], alternatives: int | None) -> tuple[Token, ...]:
    """Return the tokens of an answer with log probabilities, no tokens for one without."""
    tokens = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(_parse_token(token, alternatives or 0) for token in tokens)


def _parse_token(value: Mapping[str, Any], alternatives: int) -> Token:
    top = value.get("top_logprobs", ())[:alternatives]
    logprob = value["logprob"]
    return Token(
        value["token"],
        tuple(value["bytes"]),
        _LEAST_LOGPROB if logprob is None else float(logprob),
        tuple(_parse_token(token, 0) for token in top),
    )


def _build_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields that are not None, by llama.cpp's names."""
    values = {name: getattr(sampling, field) for field, name in _NAMES.items()}
    if values["seed"] is not None:
        values["seed"] %= _SEEDS
    return {name: value for name, value in values.items() if value is not None}
