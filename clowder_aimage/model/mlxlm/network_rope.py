"""Rotary positions of networks of mlx-lm, as config.json states them.

Networks read some of the settings, and ignore others. So what they made of them is compared: a
promised network gets the stated frequencies, and another one that ignored the settings is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from clowder_aimage.errors import ModelError
from clowder_aimage.model.mlxlm.network_config import divide_heads, find_kind, get_text_config
from clowder_aimage.model.mlxlm.rotary import Rotary, ScaledRope
from clowder_aimage.model.rope_config import RopeConfig
from clowder_aimage.model.rope_setting import ALL, FULL, find_rope_kind, list_rope_settings

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")
_NAME = "rope_parameters of config.json"


class NetworkRope:
    """The rotary positions that a translated configuration states.

    context: the requested tokens. Beyond the original context of longrope the positions of all
    texts are other ones, so it is exceeded on request only.
    """

    def __init__(self, config: Mapping[str, Any], context: int | None) -> None:
        self._text, self._is_promised = get_text_config(config), find_kind(config) is not None
        self._settings, self._context = list_rope_settings(self._text), context or 0

    def apply(self, network: Any) -> int | None:
        """Give a promised network the stated positions; check those of another one.

        Return the most tokens of a text, or None if the positions do not limit them.

        Raises:
            ModelError: A setting is unknown, invalid, or ignored by the network.
        """
        # A base for each layer is a setting of few networks, which read it
        if not self._is_promised and isinstance(self._text.get("rope_theta"), list):
            return None
        parents = dict(network.named_modules())
        found = {path: Rotary.read(module) for path, module in parents.items()}
        modules = {path: rotary for path, rotary in found.items() if rotary is not None}
        if not self._is_promised:
            self._check(list(modules.values()))
            modules = {path: rotary for path, rotary in modules.items() if not rotary.is_plain}
        limits = [self._fit(parents, path, rotary) for path, rotary in modules.items()]
        return min((limit for limit in limits if limit is not None), default=None)

    def _fit(self, parents: Mapping[str, Any], path: str, rotary: Rotary) -> int | None:
        """Replace the module at a path if its positions are other ones; return their limit."""
        settings = self._settings[self._find_layer(path)]
        if not (self._is_promised or find_rope_kind(settings)):
            return None
        rope = self._parse(settings, rotary)
        is_long = self._context > rope.original_length
        frequencies = rope.compute_frequencies(is_long=is_long)
        if not rotary.is_close(frequencies, rope.attention_factor):
            scaled = ScaledRope(frequencies, rope.attention_factor, traditional=rotary.traditional)
            parent, _, name = path.rpartition(".")
            setattr(parents[parent], name, scaled)
        return rope.original_length if rope.kind == "longrope" and not is_long else None

    def _check(self, modules: Collection[Rotary]) -> None:
        """Refuse settings that no module of a network has."""
        sizes = {2 * len(rotary.frequencies) for rotary in modules}
        types = self._text.get("layer_types") or self._settings
        used = [settings for layer, settings in self._settings.items() if layer in types]
        for settings in (used or self._settings.values()) if modules else ():
            kind, head = find_rope_kind(settings), self._find_head()
            share = settings.get("partial_rotary_factor") if kind else None
            is_read = share in (None, 1) or head is None or int(head * share) in sizes
            if kind == "default":
                ropes = [self._parse(settings, rotary) for rotary in modules]
                is_read &= any(
                    rotary.is_close(rope.compute_frequencies(), 1.0)
                    for rope, rotary in zip(ropes, modules, strict=True)
                )
            elif kind:
                is_read &= not all(rotary.is_plain for rotary in modules)
            if not is_read:
                raise ModelError(
                    f"config.json: the rope_parameters {json.dumps(settings):.200} are not "
                    "supported: the network of mlx-lm ignores them"
                )

    def _parse(self, settings: Mapping[str, Any], rotary: Rotary) -> RopeConfig:
        """Return the settings of a layer; a network that is not promised chooses the channels."""
        length, dims = self._text.get("max_position_embeddings"), 2 * len(rotary.frequencies)
        if not self._is_promised:
            settings, head = {**settings, "partial_rotary_factor": None}, dims
        else:
            head = self._text.get("qk_rope_head_dim") or self._find_head() or dims
        return RopeConfig.parse(_NAME, settings, head, length if type(length) is int else 2048)

    def _find_head(self) -> int | None:
        """Return the channels of a head, if the configuration says so."""
        return self._text.get("head_dim") or divide_heads(self._text)

    def _find_layer(self, path: str) -> str:
        """Return the type of a layer."""
        if ALL in self._settings:
            return ALL
        match, types = _LAYER.search(path), self._text.get("layer_types") or ()
        layer = int(match[1]) if match else len(types)
        kind = types[layer] if layer < len(types) else FULL
        if kind not in self._settings:
            raise ModelError(f"{_NAME}: settings of {kind!r:.60} are missing")
        return str(kind)
