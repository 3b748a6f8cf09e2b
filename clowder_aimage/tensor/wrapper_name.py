"""Words that wrappers of networks put into the names of tensors, and that say nothing of a layer.

Sources: PyTorch (``torch.compile``, FSDP, activation checkpoints, DistributedDataParallel), and
Lightning's strategies, DeepSpeed's among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Anywhere in a name; dots may have become underscores
_INNER = re.compile(
    r"(?:(?<=[._])|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module"
    r"|_fpw_module)[._]"
)
# At the beginning only: parts of networks have this name too
_OUTER = "module."


def strip_wrappers(name: str) -> str:
    """Return the name of a tensor without the words of wrappers that no network uses itself."""
    return _INNER.sub("", name)


def strip_all_wrappers(name: str) -> str:
    """Return the name of a tensor of a network that begins no name with the word module."""
    plain = strip_wrappers(name)
    return strip_all_wrappers(plain.removeprefix(_OUTER)) if plain.startswith(_OUTER) else plain


def strip_common_wrappers(names: Collection[str]) -> dict[str, str]:
    """Return the names of all tensors of a network, by their names with the words of wrappers.

    Names that would become equal stay as they are.
    """
    plain = {name: strip_wrappers(name) for name in names}
    while plain and all(name.startswith(_OUTER) for name in plain.values()):
        plain = {name: value.removeprefix(_OUTER) for name, value in plain.items()}
    return plain if len({*plain.values()}) == len(plain) else {name: name for name in names}
