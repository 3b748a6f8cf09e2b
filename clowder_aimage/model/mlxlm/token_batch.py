"""The next tokens of all open texts, computed together.

A step computes a token of each text that has taken its last one, so that the weights are read once
for all. Texts join and leave between two steps, and each has its own cache and sampler. A network
is tried first: one that needs more than the caches of the texts computes them one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clowder_aimage.model.backend import mx
from clowder_aimage.model.mlxlm.joined_cache import is_plain, join
from clowder_aimage.model.mlxlm.library import import_library_module
from clowder_aimage.model.mlxlm.prompt_cache import Cache
from clowder_aimage.model.mlxlm.token_sampler import TokenSampler

# A difference of logits that rounding explains, as a part of the largest
_ROUNDING = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 5e-2}
# Tokens of the texts of a trial: of different lengths
_TRIAL = (3, 1)
# A token (1,) and the logits (1, vocabulary) that it was drawn from
Drawn = tuple[mx.array, mx.array]


@dataclass(slots=True, eq=False)
class OpenText:
    """A text of the batch.

    fed: tokens that were added to the cache. left: tokens that may still be computed. coming: the
    token that is computed in the background; ready: the one before it, until it is taken.
    """

    cache: Cache
    sampler: TokenSampler
    left: int
    fed: int = 0
    coming: Drawn | None = None
    ready: Drawn | None = None
    error: Exception | None = None


class TokenBatch:
    """The open texts of a network, used on one thread."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._texts: list[OpenText] = []
        self._is_joinable: bool | None = None

    def join(self, token: int, cache: Cache, sampler: TokenSampler, count: int) -> OpenText:
        """Begin a text of at most ``count`` tokens after the last ``token`` of its prompt."""
        text = OpenText(cache, sampler, count)
        if count > 0:
            logits = self._network(mx.array([[token]]), cache=cache)[:, -1, :]
            _draw(text, logits, None)
            _compute([text])
        self._texts.append(text)
        return text

    def leave(self, text: OpenText) -> None:
        """End a text."""
        self._texts.remove(text)

    def take(self, text: OpenText) -> Drawn:
        """Return the next token of a text, and begin the ones after it."""
        if text.ready is None and text.error is None:
            self._advance()
        if text.error is not None:
            raise text.error
        drawn, text.ready = text.ready, None
        assert drawn is not None  # noqa: S101 - at most ``count`` tokens are taken
        return drawn

    def _advance(self) -> None:
        """Make the coming tokens ready, and begin the next ones."""
        texts = [text for text in self._texts if text.ready is None and text.error is None]
        for text in texts:
            text.ready, text.coming = text.coming, None
        going = [text for text in texts if text.left > 0]
        steps = [going] if self._can_join(going) else [[text] for text in going]
        for step in steps:
            try:
                self._step(step)
            except Exception as error:
                # Some layers of their caches have the token, and others do not
                for text in step:
                    text.error = error

    def _can_join(self, texts: Sequence[OpenText]) -> bool:
        if len(texts) < 2:
            return False
        if self._is_joinable is None:
            self._is_joinable = _try_joining(self._network)
        return self._is_joinable and all(is_plain(text.cache) for text in texts)

    def _step(self, texts: Sequence[OpenText]) -> None:
        tokens = [text.ready[0] for text in texts if text.ready is not None]
        if len(texts) == 1:
            inputs, cache = tokens[0][None], texts[0].cache
        else:
            inputs, cache = mx.concatenate(tokens)[:, None], join([text.cache for text in texts])
        logits = self._network(inputs, cache=cache)[:, -1, :]
        for row, text in enumerate(texts):
            _draw(text, logits[row : row + 1], tokens[row])
        _compute(texts)


def _draw(text: OpenText, logits: mx.array, previous: mx.array | None) -> None:
    text.coming = text.sampler.draw(logits, previous), logits
    text.fed += 1
    text.left -= 1


def _compute(texts: Sequence[OpenText]) -> None:
    """Begin to compute the coming tokens in the background."""
    coming = [array for text in texts for array in text.coming or ()]
    mx.async_eval(*coming)  # type: ignore[no-untyped-call]


def _try_joining(network: Any) -> bool:
    """Return True if a network computes texts together as it computes them one by one."""
    library = import_library_module("models.cache")
    together, alone = ([library.make_prompt_cache(network) for _ in _TRIAL] for _ in range(2))
    last = mx.array([[0]])
    try:
        for cache, length in zip((*together, *alone), _TRIAL * 2, strict=True):
            network(mx.array([[0] * length]), cache=cache)
            if not is_plain(cache):
                return False
        expected = mx.concatenate([network(last, cache=cache)[:, -1] for cache in alone])
        found = network(mx.concatenate([last] * len(_TRIAL)), cache=join(together))[:, -1]
        largest = mx.abs(expected).max().astype(mx.float32)
        difference = mx.abs(found - expected).max().astype(mx.float32)
        limit = _ROUNDING.get(expected.dtype, 0.0)
        return bool(np.array(difference <= limit * largest))
    # The networks do not expect such caches, and may fail in any way
    except Exception:
        return False
