"""The texts of requests as captions, with a cache of recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from clowder_aimage.errors import ModelError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.flow.conditioning import Caption, Conditioning
from clowder_aimage.model.flow.family import FlowFamily, list_texts
from clowder_aimage.model.flow.memory_budget import Stage
from clowder_aimage.model.flow.networks import FlowNetworks
from clowder_aimage.model.flow.state import PipelineState, recall


@dataclass(frozen=True, slots=True, eq=False)
class PromptEncoder:
    """The text encoder of a model, and the part of the transformer that refines its features."""

    family: FlowFamily
    networks: FlowNetworks
    state: PipelineState

    def tokenize(self, prompt: str) -> list[int]:
        """Return the checked tokens of a prompt.

        Raises:
            UsageError: The prompt is too long for the model.
            ModelError: The tokenizer does not match the text encoder.
        """
        tokens = self.networks.tokens(prompt).ids
        self.family.check_length(len(tokens))
        if max(tokens) >= self.family.text_encoder.vocab_size:
            raise ModelError("the tokenizer returned tokens that the text encoder does not have")
        return tokens

    def list_cuts(self, request: GenerateRequest) -> list[str]:
        """Return a sentence for each text of a request that is cut off. Raises as ``tokenize``."""
        names, texts = ("the prompt", "the negative prompt"), list_texts(self.family, request)
        pairs = zip(names, texts, strict=False)
        cuts = (self.networks.tokens(text).describe_cut(name) for name, text in pairs)
        return [cut for cut in cuts if cut]

    def encode(self, prompt: str) -> Any:
        """Return the text features of a prompt, (tokens, channels). Raises as ``ids``."""
        ids, length = self.tokenize(prompt), self.family.TEXT_LENGTH
        encoder, library = self.networks.text_encoder.get(), self.networks.library
        if length is None:
            return encoder(library.to_array(np.array(ids)))
        # The transformer attends to the padding too, so that its length is a part of the model
        padding = [self.networks.tokenizer.padding] * (length - len(ids))
        return encoder(library.to_array(np.array(ids + padding)), len(ids))

    def build_conditioning(
        self, request: GenerateRequest, encode: Stage, denoise: Stage
    ) -> Conditioning:
        """Return the request's texts, encoded and refined, in two stages of the request.

        The text encoder is loaded for new texts only. Raises as ``encode`` does.
        """
        texts, captions = list_texts(self.family, request), self.state.captions
        keys = {text: self.state.build_caption_key(text, self.family.CAPTIONING) for text in texts}
        by_text = {text: captions[key] for text, key in keys.items() if key in captions}
        if new := [text for text in dict.fromkeys(texts) if text not in by_text]:
            by_text |= self._encode_all(new, encode, denoise)
        recent = [recall(captions, keys[text], lambda key: by_text[key[0]]) for text in texts]
        negative = recent[1] if recent[1:] else None
        guidance = (
            self.family.compute_guidance_weight(request),
            request.guidance.end,
            request.guidance.normalization,
        )
        return Conditioning(recent[0], negative, *guidance)

    def _encode_all(self, texts: list[str], encode: Stage, denoise: Stage) -> dict[str, Caption]:
        budget, library = self.networks.budget, self.networks.library
        budget.use(encode)
        features = {text: self.encode(text) for text in texts}
        # A lazy array refers to the weights: without this, the text encoder stays in memory
        library.evaluate(*features.values())
        budget.finish(self.networks.text_encoder)
        budget.use(denoise)
        return {text: self._refine(features[text]) for text in texts}

    def _refine(self, features: Any) -> Caption:
        caption: Caption = self.networks.transformer.get().build_caption(features)
        self.networks.library.evaluate(caption.tokens, *caption.rope)
        return caption
