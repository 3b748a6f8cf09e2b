"""Names of an adapter's tensors: the layer of a tensor, and its role in the change.

A name is a stem, the name of a layer in one of many dialects (``target.py``), and a suffix.
Sources of the suffixes: peft ("Checkpoint format"), diffusers' ``loaders/``, kohya-ss
``networks/``, LyCORIS, ComfyUI's ``comfy/lora.py`` and ``comfy/weight_adapter``.
"""

from __future__ import annotations

import re

DOWN, UP, UP_BIAS, ALPHA = "down", "up", "up_bias", "alpha"
TABLE_DOWN, TABLE_UP = "embedding_down", "embedding_up"
MAGNITUDE, DORA_SCALE = "magnitude", "dora_scale"
DIFF, DIFF_BIAS, SET, SET_BIAS = "diff", "diff_b", "set_weight", "set_bias"
RESHAPE, DORA_FLAG, RSLORA_FLAG = "reshape_weight", "use_dora_flag", "use_rslora_flag"
HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
KRON = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
# Roles with the layer's rows in their order, or with a factor of these rows.
ROWS = (
    *(UP, UP_BIAS, DIFF, DIFF_BIAS, SET, SET_BIAS, MAGNITUDE, DORA_SCALE),
    *(HADA[0], HADA[2], KRON[0], KRON[1]),
)

# Suffixes after a stem and a dot; peft puts the name of the adapter before the last word.
_LORA = {
    "lora_A": DOWN,
    "lora_down": DOWN,
    "lora.down": DOWN,
    "lora_linear_layer.down": DOWN,
    "lora_B": UP,
    "lora_up": UP,
    "lora.up": UP,
    "lora_linear_layer.up": UP,
    "lora_embedding_A": TABLE_DOWN,
    "lora_embedding_B": TABLE_UP,
    "lora_magnitude_vector": MAGNITUDE,
    **{word: word for word in (*HADA, *KRON)},
}
_PLAIN = {
    **{word: word for word in (ALPHA, DORA_SCALE, DIFF, DIFF_BIAS, SET, RESHAPE)},
    **{word: word for word in (DORA_FLAG, RSLORA_FLAG)},
    "w_norm": DIFF,
    "b_norm": DIFF_BIAS,
}
_ADAPTER_NAME = r"(?:\.(?!(?:weight|bias)$)[^.]+)?"
_END = re.compile(
    rf"(?:(?P<stem>.+)[._])?(?:(?P<lora>{'|'.join(map(re.escape, _LORA))}){_ADAPTER_NAME}"
    r"(?:\.(?P<leaf>weight|bias))?"
    rf"|(?<![^.])(?P<plain>{'|'.join(_PLAIN)}))"
)
_SAVED = re.compile(rf"(?P<stem>.+)\.modules_to_save{_ADAPTER_NAME}\.(?P<leaf>weight|bias)")
# Embeddings of words beside an adapter (OneTrainer, ComfyUI): ``bundle_emb.WORD.clip_l``
EMBEDDING = re.compile(r"bundle_emb\.(?P<word>.+)\.[^.]+")

# Unsupported kinds, recognised by a word of the name.
_UNSUPPORTED = {
    "OFT or BOFT": ("oft_blocks", "oft_diag", "oft_R", "boft_R", "boft_s", "boft_blocks"),
    "GLoRA": ("a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight"),
    "(IA)^3": ("on_input", "ia3_l"),
    "LoRA in Tucker form, for convolutions": ("lora_mid",),
    "LoHa in Tucker form, for convolutions": ("hada_t1", "hada_t2"),
    "LoKr in Tucker form, for convolutions": ("lokr_t1", "lokr_t2"),
    "AdaLoRA": ("lora_E", "ranknum"),
    "VeRA": ("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B"),
    "FourierFT": ("fourierft_spectrum",),
    "HRA": ("hra_u",),
    "MiSS or Bone": ("miss_block", "bone_block"),
    "Control-LoRA": ("lora_controlnet",),
}
_KINDS = {word: kind for kind, words in _UNSUPPORTED.items() for word in words}
_UNSUPPORTED_NAME = re.compile(
    rf"(?:^|.*[._])(?P<word>{'|'.join(map(re.escape, _KINDS))})(?:\.[^.]+)?(?:\.weight)?"
)


def split_name(name: str) -> tuple[str, str] | None:
    """Return the stem and the role in a tensor's name, or None if no adapter has such a name.

    The stem is empty for a flag of all layers.
    """
    if match := _SAVED.fullmatch(name):
        return match["stem"], SET if match["leaf"] == "weight" else SET_BIAS
    match = _END.fullmatch(name)
    if match is None:
        return None
    stem = match["stem"] or ""
    if match["plain"]:
        return stem, _PLAIN[match["plain"]]
    role = _LORA[match["lora"]]
    if match["leaf"] == "bias":
        return (stem, UP_BIAS) if role == UP else None
    return stem, role


def find_unsupported_kind(name: str) -> str | None:
    """Return the kind of an unsupported adapter by the name of a tensor, or None."""
    match = _UNSUPPORTED_NAME.fullmatch(name)
    return _KINDS[match["word"]] if match else None
