"""The pictures of a prompt: options become a task of a worker, and its pictures are written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.lora_option import with_tags
from clowder_aimage.cli.console.output import (
    format_count,
    note,
    print_result,
    remark,
    wants_json,
    wants_value,
)
from clowder_aimage.cli.console.picture_file import PictureOutput
from clowder_aimage.cli.console.picture_option import read_picture_parameters
from clowder_aimage.cli.console.picture_view import draw_picture, open_picture
from clowder_aimage.cli.console.pushed_picture import push_made
from clowder_aimage.cli.console.seed_option import plan_seed_runs
from clowder_aimage.cli.text.enhance_option import read_enhancement
from clowder_aimage.cli.worker.worker import PictureTask, Worker
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.generation.request import (
    COUNTS,
    ENHANCED,
    GenerateRequest,
    map_parameter_locations,
)

if TYPE_CHECKING:
    from clowder_aimage.generation.encoding import Format
    from clowder_aimage.pictures.generated_picture import GeneratedPicture

_OPTIONS = tuple(
    name
    for name in map_parameter_locations()
    if name not in ("prompt", "references", *COUNTS, *ENHANCED)
)
_OUTPUT = ("seeds", "sheet", "n", "output", "show", "inline")
SETTABLE = (*_OPTIONS, "trigger", "size", *_OUTPUT)  # between prompts


@dataclass(frozen=True, slots=True)
class PictureOrder:
    """The options of pictures. They may change between prompts."""

    values: dict[str, Any]
    worker: Worker
    # For pictures in the terminal.
    protocol: str

    def make(self, prompt: str) -> tuple[str, ...]:
        """Generate, write and print the pictures of a prompt; return their paths."""
        return self.draw(order_drafts(self.values, prompt), time.monotonic())

    def draw(self, drafts: tuple[GenerateRequest, ...], start: float) -> tuple[str, ...]:
        """Generate, write and print the pictures of drafts; return their paths."""
        output, written = PictureOutput(self.values["output"]), list[dict[str, Any]]()
        pictures, metadata = list["GeneratedPicture"](), dict[str, Any]()
        prompt, count = drafts[0].prompt, sum(draft.output.n for draft in drafts)
        for picture in self._generate_pictures(drafts, output.kind):
            text = prompt or str(picture.facts.get("prompt", ""))
            path = output.write(picture.data, text, picture.seed, len(written), count)
            metadata = metadata or {**picture.facts}
            if path is not None:
                written.append({"path": str(path), "seed": picture.seed})
                open_picture(path, self.values["show"])
            if self.values["sheet"] or self.values["push"]:
                pictures.append(picture)
        paths = [str(entry["path"]) for entry in written]
        if self.values["sheet"]:
            metadata["sheet"] = _write_sheet(output, prompt, pictures)
            paths.append(metadata["sheet"])
        self._report(metadata | {"pictures": written}, paths, pictures)
        remark(f"{format_count(count, 'picture')} in {time.monotonic() - start:.1f} s")
        return tuple(paths)

    def _generate_pictures(
        self, drafts: tuple[GenerateRequest, ...], kind: Format
    ) -> Iterator[GeneratedPicture]:
        """Yield the pictures of drafts; print a random seed and the worker's label once."""
        is_announced = False

        def announce(label: str) -> None:
            nonlocal is_announced
            if not is_announced:
                if self.values["seed"] is None and not self.values["seeds"]:
                    note(f"seed {drafts[0].sampling.seed}")
                remark(label)
            is_announced = True

        enhancement = read_enhancement(self.values)
        adds_words = bool(self.values["trigger"])
        task = PictureTask(drafts, kind, adds_words, enhancement)
        # Closing the generator cancels the request of a worker.
        with contextlib.closing(self.worker.generate_pictures(task, announce)) as pictures:
            yield from pictures

    def _report(
        self, value: dict[str, Any], paths: list[str], pictures: list[GeneratedPicture]
    ) -> None:
        """Draw, push and print pictures that were written."""
        is_stdout = PictureOutput(self.values["output"]).is_stdout
        if not is_stdout and self.values["inline"] is not False:
            for path in paths:
                draw_picture(Path(path), self.protocol, is_wanted=bool(self.values["inline"]))
        if self.values["push"]:
            pushed = push_made(pictures, self.values["push"])
            value, paths = value | {"pushed": pushed}, [*paths, pushed["reference"]]
            # Stdout has the picture.
            if is_stdout:
                note(pushed["reference"])
        if not is_stdout:
            print_result(value, paths)


def _write_sheet(output: PictureOutput, prompt: str, pictures: list[GeneratedPicture]) -> str:
    """Write a sheet of pictures; return its path."""
    from clowder_aimage.model.picture import render_contact_sheet
    from clowder_aimage.pictures.provenance.marking import read_mark

    mark = read_mark(pictures[0].data, "the picture")
    sheet = render_contact_sheet([(picture.seed, picture.data) for picture in pictures], mark)
    return str(output.write_sheet(sheet, prompt))


def order_drafts(values: Mapping[str, Any], prompt: str) -> tuple[GenerateRequest, ...]:
    """Return a draft for each run of seeds of a prompt. Raises UsageError, StoreError."""
    runs = plan_seed_runs(values["seed"], values["seeds"] or (), values["n"] or 1)
    _check_output(values, sum(count for _, count in runs))
    text, loras = with_tags(prompt, values["loras"], values["lora_dir"])
    stated = {name: values[name] for name in _OPTIONS} | _resolve_size(values)
    has_size = stated["width"] is not None or stated["height"] is not None
    stated |= read_picture_parameters(values, has_size=has_size)
    seed, count = runs[0]
    draft = GenerateRequest.draft(text, **stated | {"loras": loras, "seed": seed, "n": count})
    return (draft, *(draft.change(seed=seed, n=count) for seed, count in runs[1:]))


def _check_output(values: Mapping[str, Any], count: int) -> None:
    """Reject an output that cannot be written. Raises UsageError, StoreError."""
    output = PictureOutput(values["output"])
    if output.is_stdout and (wants_value() or values["show"]):
        option = "--open" if not wants_value() else "--json" if wants_json() else "--format"
        raise UsageError(f"{option} cannot be combined with -o -")
    output.check(count)
    if values["sheet"]:
        if output.is_stdout:
            raise UsageError("--sheet cannot be combined with -o -")
        with needs("making a sheet", "mlx"):
            import PIL  # noqa: F401 (before pictures are generated)


def _resolve_size(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sides of --size. Raises UsageError: they are given twice."""
    if values["size"] is None:
        return {}
    if values["width"] is not None or values["height"] is not None:
        raise UsageError("--size cannot be combined with --width or --height")
    return dict(zip(("width", "height"), values["size"], strict=True))
