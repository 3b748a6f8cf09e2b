"""A process that imports the libraries of models: ``python -m clowder_aimage.cli.doctor...``.

A library that was built for another processor ends its process. The results are lines of JSON, an
object each, so that those before such an end are known.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.console.remedy import format_advice
from clowder_aimage.errors import AImageError

if TYPE_CHECKING:
    from clowder_aimage.model.flow.mlx_library import MlxLibrary
    from clowder_aimage.model.torch.library import TorchLibrary


def describe_pictures() -> dict[str, Any]:
    """Return the library of image models, its device and its memory. Raises UsageError."""
    from clowder_aimage.model.library_choice import MLX, choose_library

    name = choose_library()
    library: MlxLibrary | TorchLibrary
    if name == MLX:
        from clowder_aimage.model.backend import choose_dtype
        from clowder_aimage.model.flow.mlx_library import MlxLibrary

        library = MlxLibrary(choose_dtype(None))
    else:
        from clowder_aimage.model.torch.library import TorchLibrary

        library = TorchLibrary.create(None)
    return {
        "library": f"{name} {metadata.version(name)}",
        "device": library.describe(),
        "memory": library.memory.total,
        "warning": library.warning,
    }


def describe_texts(runtime: str, package: str) -> dict[str, Any]:
    """Return the library of a runtime of language models. Raises UsageError."""
    from clowder_aimage.model.text.runtime import import_runtime

    import_runtime(runtime)
    return {"library": f"{runtime} {metadata.version(package)}"}


def _report(name: str, describe: Callable[[], dict[str, Any]]) -> None:
    value: dict[str, Any] = {"missing": False, "advice": None}
    try:
        value |= describe()
    except AImageError as error:
        value |= {"error": error.message, "advice": format_advice(error)}
        value["missing"] = error.remedy == "install_extra"
    except Exception as error:
        # Importing these libraries raises errors of many others.
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        value["error"] = f"cannot be used: {reason}"
    print_result({}, json.dumps({"name": name, **value}))


def main() -> None:
    """Print a line for each kind of models."""
    from clowder_aimage.model.ability import LLAMA, MLX_LM

    warnings.simplefilter("ignore")
    _report("pictures", describe_pictures)
    _report("texts", lambda: describe_texts(MLX_LM, "mlx-lm"))
    _report("gguf", lambda: describe_texts(LLAMA, "xllamacpp"))


if __name__ == "__main__":
    main()
