"""generation_config.json: the defaults of a model for sampling. Source: transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.model.text.language_model import Sampling

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Settings that change texts and are not computed here: unless they are 1, and unless they are empty
_FACTORS = ("num_beams", "typical_p", "guidance_scale")
_OTHERS = (
    *("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "top_h", "penalty_alpha"),
    *("min_length", "min_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("force_words_ids", "constraints", "stop_strings", "sequence_bias", "forced_bos_token_id"),
    *("forced_eos_token_id", "dola_layers", "exponential_decay_length_penalty", "token_healing"),
    "watermarking_config",
)


def parse_defaults(generation: Mapping[str, Any]) -> Sampling:
    """Return the options of a model. Raises ModelError: one is invalid."""
    stated = {name: generation[name] for name in _NAMES if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        stated["temperature"] = 0.0
    usual = {"temperature": 1.0, "top_p": 1.0}
    try:
        return Sampling(**(usual | stated))
    except (UsageError, TypeError) as error:
        raise ModelError(f"generation_config.json: {error}") from None


def list_warnings(generation: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about settings that change nothing here, if there are some."""
    ignored = [name for name in _FACTORS if generation.get(name) not in (None, 1)]
    ignored += [name for name in _OTHERS if generation.get(name)]
    if ignored:
        yield f"settings of generation_config.json are not used: {', '.join(ignored)}"
