"""The way from the states of a network to an embedding, as the files of a model state it.

Format: sentence-transformers 6.2, ``modules.json``, ``sentence_bert_config.json``,
``config_sentence_transformers.json``, and the configurations of its modules Pooling and Dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from clowder_aimage.document.strict_json import read_json
from clowder_aimage.errors import FormatError, ModelError, UsageError
from clowder_aimage.formats.transformers import POOLING
from clowder_aimage.tensor.config_fields import ConfigFields, parse_object

MODULES = "modules.json"
CLS, MAX, MEAN, ROOT = "cls", "max", "mean", "mean_sqrt_len_tokens"
WEIGHTED, LAST = "weightedmean", "lasttoken"
# The older names of the modes, in the order in which their vectors are joined
_OLD_MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_max_tokens": MAX,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": ROOT,
    "pooling_mode_weightedmean_tokens": WEIGHTED,
    "pooling_mode_lasttoken": LAST,
}
_OLD = "pooling_mode_"
_NORMALIZE, _DROPOUT = "Normalize", "Dropout"
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
_MAX_MODULES = 16
_MAX_WIDTH = 1 << 16
# Tokens; a larger limit in tokenizer_config.json means that there is none
_MAX_LENGTH = 1 << 24
Read = Callable[[str], bytes | None]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer after the pooling, whose files are in a folder.

    is_unit: its input is brought to unit length first.
    """

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: str
    is_residual: bool
    is_unit: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """The way from a text to its embedding; all embeddings are of unit length in the end.

    modes: of the pooling, whose vectors are joined. max_length: of a text in tokens; None if it is
    that of the network. cut_side: of longer texts. is_lower: texts are in lower case. prompts:
    texts by name that come before a text, and the name of the usual one. skips_prompt: the pooling
    leaves its tokens out. dimensions: the first numbers that remain; None for all. has_pooling: the
    files state a pooling.
    """

    modes: tuple[str, ...] = (MEAN,)
    dense: tuple[DenseLayer, ...] = ()
    max_length: int | None = None
    cut_side: str = "right"
    is_lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    usual_prompt: str | None = None
    skips_prompt: bool = False
    dimensions: int | None = None
    has_pooling: bool = False

    def find_prompt(self, name: str | None) -> str:
        """Return the text before each text; the usual one for None. Raises UsageError."""
        if name is None:
            return self.prompts.get(self.usual_prompt or "", "")
        if name in self.prompts:
            return self.prompts[name]
        names = ", ".join(sorted(self.prompts)) or "none"
        raise UsageError(
            f"the model has no prompt {name!r:.100}; its prompts: {names[:1000]}",
            field="prompt_name",
        )


def read_recipe(read: Read) -> EmbeddingRecipe:
    """Return the recipe in the files of a model; ``read`` returns the bytes of a file, or None.

    Raises ModelError: a file is malformed, or states a module that is not supported.
    """
    modules = _read_modules(read)
    pooling = next((path for name, path in modules if name == "Pooling"), None)
    name = POOLING if pooling is None else f"{pooling}/config.json"
    stated = _read_fields(read, name)
    if modules and stated is None:
        raise ModelError(f"{name} is missing, which {MODULES} requires")
    fields = stated or ConfigFields(name, {})
    recipe = EmbeddingRecipe(
        _read_modes(fields),
        tuple(
            replace(_read_dense(read, path), is_unit=(_NORMALIZE in _list_before(modules, index)))
            for index, (name, path) in enumerate(modules)
            if name == "Dense"
        ),
        skips_prompt=not fields.get_boolean("include_prompt", True),
        has_pooling=stated is not None,
    )
    return _add_prompts(read, _add_limits(read, recipe))


def _add_limits(read: Read, recipe: EmbeddingRecipe) -> EmbeddingRecipe:
    """Add the treatment of texts: their length, the side at which they are cut, and their case."""
    sentence = _read_sentence_config(read)
    sentence.check_value("module_output_name", "token_embeddings")
    tokenizer = _read_fields(read, "tokenizer_config.json") or ConfigFields("", {})
    limit = sentence.get_raw("max_seq_length")
    if limit is not None:
        limit = sentence.get_integer("max_seq_length")
    else:
        # Without a limit it is an enormous number, perhaps a float
        stated = tokenizer.get_raw("model_max_length")
        limit = stated if type(stated) is int and 0 < stated < _MAX_LENGTH else None
    side = "left" if tokenizer.get_raw("truncation_side") == "left" else "right"
    is_lower = sentence.get_boolean("do_lower_case", False)
    return replace(recipe, max_length=limit, cut_side=side, is_lower=is_lower)


def _add_prompts(read: Read, recipe: EmbeddingRecipe) -> EmbeddingRecipe:
    name = "config_sentence_transformers.json"
    fields = _read_fields(read, name) or ConfigFields(name, {})
    usual, size = fields.get_raw("default_prompt_name"), fields.get_raw("truncate_dim")
    return replace(
        recipe,
        prompts=_read_prompts(fields),
        usual_prompt=None if usual is None else fields.get_text("default_prompt_name"),
        dimensions=None if size is None else fields.get_integer("truncate_dim"),
    )


def _read_modules(read: Read) -> list[tuple[str, str]]:
    """Return the class and the folder of each module; none without ``modules.json``."""
    if (data := read(MODULES)) is None:
        return []
    try:
        listed = read_json(data, MODULES)
    except FormatError as error:
        raise ModelError(error.message) from error
    if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_MODULES:
        raise ModelError(f"{MODULES} must be a list of 1 to {_MAX_MODULES} modules")
    modules = [
        _parse_module(ConfigFields(MODULES, item)) for item in listed if isinstance(item, dict)
    ]
    names = [name for name, _ in modules]
    if len(modules) < len(listed) or names[:2] != ["Transformer", "Pooling"] or modules[0][1]:
        raise ModelError(f"{MODULES} must begin with a model at the top level, and its pooling")
    for name in names[2:]:
        if name not in ("Dense", _NORMALIZE, _DROPOUT):
            raise ModelError(f"{MODULES}: the module {name:.80} is not supported")
    return modules


def _list_before(modules: Sequence[tuple[str, str]], index: int) -> Sequence[str]:
    """Return the classes of the modules between a module and the layer or pooling before it."""
    names = [name for name, _ in modules[:index]]
    last = max(place for place, name in enumerate(names) if name in ("Pooling", "Dense"))
    return names[last:]


def _parse_module(fields: ConfigFields) -> tuple[str, str]:
    folder = fields.get_text("path", "").strip("/")
    return fields.get_text("type").rpartition(".")[2], folder


def _read_fields(read: Read, name: str) -> ConfigFields | None:
    data = read(name)
    return None if data is None else ConfigFields(name, parse_object(name, data))


def _read_sentence_config(read: Read) -> ConfigFields:
    """Return the configuration of the module Transformer, whose file has one of several names."""
    for kind in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta"):
        if (fields := _read_fields(read, f"sentence_{kind}_config.json")) is not None:
            return fields
    return ConfigFields("", {})


def _read_modes(fields: ConfigFields) -> tuple[str, ...]:
    stated = fields.get_raw("pooling_mode")
    modes = [stated] if isinstance(stated, str) else stated
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if fields.get_boolean(key, False)]
        unknown = [key for key in fields.values if key.startswith(_OLD) and key not in _OLD_MODES]
        for key in unknown:
            fields.check_value(key, False)
    known = _OLD_MODES.values()
    if not isinstance(modes, list) or any(mode not in known for mode in modes):
        raise fields.refuse("pooling_mode", f"expected {', '.join(known)}")
    return tuple(modes) or (MEAN,)


def _read_dense(read: Read, folder: str) -> DenseLayer:
    fields = _read_fields(read, f"{folder}/config.json")
    if fields is None:
        raise ModelError(f"{folder}/config.json is missing")
    path = fields.get_text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = path.rpartition(".")[2]
    if activation not in _ACTIVATIONS or not path.startswith("torch.nn."):
        raise fields.refuse(
            "activation_function", f"expected {', '.join(_ACTIVATIONS)} of torch.nn"
        )
    fields.check_value("module_input_name", "sentence_embedding")
    fields.check_value("module_output_name", "sentence_embedding")
    return DenseLayer(
        folder,
        fields.get_integer("in_features", maximum=_MAX_WIDTH),
        fields.get_integer("out_features", maximum=_MAX_WIDTH),
        fields.get_boolean("bias", True),
        activation,
        fields.get_boolean("use_residual", False),
    )


def _read_prompts(fields: ConfigFields) -> dict[str, str]:
    prompts = fields.get_raw("prompts", {})
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise fields.refuse("prompts", "must be texts by name")
    return prompts
