"""Prompts that a language model enhances before a picture is generated in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import options, settings
from clowder_aimage.cli.console.output import remark
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.cli.text.local_text import LocalLanguageModel
from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.oci import Reference

if TYPE_CHECKING:
    from clowder_aimage.dialect import AImage

ENHANCING = ("enhance", "enhancer", "instruction")  # options that a worker serves too
_ROOM = 1.3  # bytes in memory for each byte of weights

enhance_options = options(
    click.option(
        "--enhance",
        is_flag=True,
        help="Let a language model write a longer prompt, or invent one if PROMPT is empty. "
        "--enhance=REF names the model.",
    ),
    click.option(
        "--enhancer",
        type=stored_reference,
        metavar="REF",
        help="The language model of --enhance, which it implies. [env: AIMAGE_ENHANCER]",
    ),
    click.option(
        "--enhance-instruction",
        "instruction",
        type=click.Path(),
        metavar="FILE",
        help="A text that replaces the built-in instruction to the language model.",
    ),
)


def is_enhanced(values: Mapping[str, Any]) -> bool:
    """Return whether prompts are enhanced. Raises UsageError: an instruction for nothing."""
    wanted = bool(values["enhance"] or values["enhancer"])
    if values["instruction"] is not None and not wanted:
        raise UsageError("--enhance-instruction requires --enhance")
    return wanted


def to_worker(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to a worker. Raises as ``_instruction``."""
    if not is_enhanced(values):
        return {}
    sent: dict[str, Any] = {"enhance": str(values["enhancer"]) if values["enhancer"] else True}
    instruction = _instruction(values["instruction"])
    return sent if instruction is None else sent | {"enhance_instruction": instruction}


@dataclass(slots=True)
class LocalEnhancer:
    """A language model in this process that writes prompts.

    values: the options, which may change between prompts. picture_model: the AImage that the
    prompts are for. is_last: no prompts follow. The language model is unloaded before the pictures
    are generated, unless other prompts follow and there is memory for both.
    """

    values: Mapping[str, Any]
    picture_model: Reference
    dtype: str | None = None
    memory: int | None = None
    is_last: bool = True
    _model: LocalLanguageModel | None = None

    def prompts(self, prompt: str, seeds: Sequence[int]) -> list[dict[str, Any]] | None:
        """Return the parameters of pictures that change, for each seed; None to change none.

        Raises as ``LocalLanguageModel``, and ModelError.
        """
        if not is_enhanced(self.values):
            return None
        from clowder_aimage.model.text.enhancement import enhanced_prompt, enhancement_request

        reference, instruction = self._reference(), _instruction(self.values["instruction"])
        if self._model is None or self._model.reference != reference:
            self._model = None  # the memory is free before the load
            self._model = LocalLanguageModel(reference, self.dtype, self.memory)
        changed = []
        for seed in seeds:
            request = enhancement_request(prompt, seed, instruction)
            with contextlib.closing(self._model.answer(request)) as events:
                text = enhanced_prompt(events)
            remark(f"prompt: {text}")
            names = {"original_prompt": prompt, "enhancer": self._model.name}
            changed.append({"prompt": text, **names})
        if self.is_last or not self._has_room():
            self._model.let_go()
        return changed

    def _reference(self) -> Reference:
        """Return the language model of the option, the environment or the configuration."""
        if self.values["enhancer"]:
            chosen: Reference = self.values["enhancer"]
            return chosen
        from clowder_aimage.schema import read_configuration
        from clowder_aimage.user_directory import config_file

        name = os.environ.get("AIMAGE_ENHANCER", "").strip()
        name = name or read_configuration(
            config_file(), lambda it: str(it.get("run", {}).get("enhancer", ""))
        )
        if not name:
            raise UsageError("no language model is named for --enhance", remedy="name_enhancer")
        return Reference.parse(name)

    def _has_room(self) -> bool:
        """Return whether the language model can stay while pictures are generated."""
        from clowder_aimage.engine.machine import available
        from clowder_aimage.layout.stored_aimage import read_aimage

        try:
            weights = _weights(read_aimage(settings().layout, self.picture_model).aimage)
        except NotFoundError:
            return False
        free = available()
        return free is not None and free >= _ROOM * weights


def _weights(aimage: AImage) -> int:
    return sum(layer.descriptor.size for layer in aimage.layers if layer.is_tensor)


def _instruction(name: str | None) -> str | None:
    """Return the text of a file. Raises UsageError, NotFoundError."""
    if name is None:
        return None
    from clowder_aimage.model.text.enhancement import MAX_INSTRUCTION

    try:
        with Path(name).open("rb") as file:
            text = file.read(MAX_INSTRUCTION + 1)
        if len(text) > MAX_INSTRUCTION:
            raise UsageError(f"--enhance-instruction: {name} exceeds {MAX_INSTRUCTION} bytes")
        if not (found := text.decode().strip()):
            raise UsageError(f"--enhance-instruction: {name} is empty")
        return found
    except FileNotFoundError:
        raise NotFoundError(f"--enhance-instruction: {name} not found") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not valid UTF-8 text"
        raise UsageError(f"--enhance-instruction: cannot read {name}: {reason}") from None
