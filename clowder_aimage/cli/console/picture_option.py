"""Options for pictures that a picture begins with, and the files that they name."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import needs, options, parsed, settings
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.errors import UsageError
from clowder_aimage.model.pipeline import ALPHA, FITS, MAX_CONTROL, MAX_FEATHER, MAX_UPSCALE
from clowder_aimage.pictures.input_file import InputFile, own_size

if TYPE_CHECKING:
    from clowder_aimage.pictures.input_source import InputSource

_KEY = "clowder_aimage.pictures"  # in the meta of the command's context
_LONGEST = 200  # characters of a name in an error


def _expand(text: str) -> tuple[int, ...]:
    found = text.split(",")
    if len(found) != 4 or not all(re.fullmatch("[0-9]{1,5}", one, re.ASCII) for one in found):
        raise ValueError(
            f"expected LEFT,TOP,RIGHT,BOTTOM in pixels, such as 0,0,256,0, not {text!r}"
        )
    return tuple(map(int, found))


picture_options = options(
    click.option(
        "--image",
        metavar="SOURCE",
        help="Begin with this picture: a file, '-' (stdin), a data: or https: URL, or "
        "oci://HOST/REPO:TAG[#TITLE].",
    ),
    click.option(
        "--strength",
        type=float,
        help="Part of the steps that are done, up to 1."
        " [default: 0.6; 1 with --mask, --expand; 0.2 with --upscale]",
    ),
    click.option("--fine", is_flag=True, help="Do all steps, from the noise level of --strength."),
    click.option(
        "--fit",
        type=click.Choice(FITS),
        help="Fit the picture to another size. [default: crop]",
    ),
    click.option(
        "--mask",
        metavar="SOURCE",
        help="Paint only what is white in this picture; 'alpha': what is transparent in --image.",
    ),
    click.option("--paste", is_flag=True, help="Keep the pixels that are not painted."),
    click.option(
        "--feather",
        type=click.IntRange(0, MAX_FEATHER),
        metavar="PIXELS",
        help="Mix pasted and painted pixels over this width. [default: 0]",
    ),
    click.option(
        "--expand",
        metavar="LEFT,TOP,RIGHT,BOTTOM",
        callback=parsed(_expand),
        help="Paint these pixels around the picture.",
    ),
    click.option(
        "--upscale",
        type=click.FloatRange(1, MAX_UPSCALE),
        metavar="FACTOR",
        help="Enlarge the picture, then improve it in tiles.",
    ),
    click.option("--crop", is_flag=True, help="Generate only the surroundings of the mask."),
    click.option(
        "--control",
        metavar="SOURCE",
        help="Guide a ControlNet by this picture: edges, depth, a pose; sources as of --image.",
    ),
    click.option(
        "--controlnet",
        type=stored_reference,
        metavar="REF",
        help="The ControlNet that --control guides. [default: the model's own]",
    ),
    click.option(
        "--control-strength",
        type=click.FloatRange(0, MAX_CONTROL),
        help="How much --control guides. [default: 0.75]",
    ),
)


@dataclass(slots=True)
class InputPictures:
    """The picture files of a command by their digests, and by the names that were given."""

    data: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, InputFile] = field(default_factory=dict)
    fitting: set[tuple[str, str]] = field(default_factory=set)  # images and masks

    def read(self, name: str, option: str) -> InputFile:
        """Return the facts of a file, which is read once. Raises UsageError, NotFoundError."""
        if name not in self.files:
            with needs("reading a picture", "mlx"):
                from clowder_aimage.pictures.picture_input import inspect
            data = input_source().read(name, option)
            found = inspect(data, _label(name))
            self.files[name] = found
            self.data[str(found.descriptor.digest)] = data
        return self.files[name]

    def check_mask(self, image: str, mask: str) -> None:
        """Reject a mask that does not fit an image, before either is kept. Raises UsageError."""
        from clowder_aimage.pictures.picture_input import check_mask

        if (image, mask) not in self.fitting:
            check_mask(self.data[image], None if mask == ALPHA else self.data[mask])
            self.fitting.add((image, mask))

    def keep(self, *digests: str | None) -> None:
        """Put files into the store, leased until the command ends."""
        from clowder_aimage.pictures.picture_input import keep

        wanted = [self.data[one] for one in digests if one in self.data]
        if wanted:
            layout = settings().layout
            lease = click.get_current_context().with_resource(layout.lease())
            for data in wanted:
                keep(layout, lease, data, "the picture")


def input_source() -> InputSource:
    """Return the reader of pictures for the user of this machine."""
    from clowder_aimage.pictures.input_source import InputSource

    stdin = sys.stdin.buffer if sys.stdin else None
    store, connect = settings().layout, settings().connection
    return InputSource(store, connect, hosts=None, has_files=True, stdin=stdin)


def _label(name: str) -> str:
    """Return the name of a picture in errors."""
    if name == "-":
        return "the picture on stdin"
    return name if len(name) < _LONGEST else f"{name[:40]}..."


def input_pictures() -> InputPictures:
    """Return the picture files of the command that runs."""
    meta = click.get_current_context().meta
    found: InputPictures = meta.setdefault(_KEY, InputPictures())
    return found


def picture_parameters(values: Mapping[str, Any], *, has_size: bool) -> dict[str, Any]:
    """Return the parameters that the options state: digests in place of files.

    Without a size, it is the picture's, rounded down to multiples of 16, or up if it is expanded.
    If it is enlarged, the size is that of the tiles: the model's. Raises as ``read``.
    """
    image, mask, control = values["image"], values["mask"], values["control"]
    if (image, mask, control).count("-") > 1:
        raise UsageError("stdin has one picture, for --image, --mask or --control")
    files, parameters = input_pictures(), dict[str, Any]()
    if values["controlnet"] is not None:
        parameters["controlnet"] = str(values["controlnet"])
    if control is not None:
        found = files.read(control, "--control")
        parameters["control"] = str(found.descriptor.digest)
    if image is not None:
        found = files.read(image, "--image")
        parameters["image"] = str(found.descriptor.digest)
    if image is None and control is None:
        return parameters
    if image is not None and mask is not None:
        parameters["mask"] = _mask(values, parameters["image"])
    if values["expand"] and has_size:
        raise UsageError("--expand determines the size", hint="omit --size, --width, --height")
    if not has_size and not values["upscale"]:
        parameters |= own_size(found, values["expand"] or ())
        parameters["fit"] = values["fit"] or "stretch"  # by less than 16 pixels, as diffusers
    return parameters


def _mask(values: Mapping[str, Any], image: str) -> str:
    """Return the mask of an image: a digest, or ALPHA. Raises as ``read`` and ``check_mask``."""
    name, files = values["mask"], input_pictures()
    found = name if name == ALPHA else str(files.read(name, "--mask").descriptor.digest)
    if not (values["expand"] or values["upscale"]):  # refused with a mask, later
        files.check_mask(image, found)
    return found


def to_request(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to a worker that replace digests: data URLs."""
    known, found = input_pictures().data, dict[str, Any]()
    for name in ("image", "mask"):
        if (data := known.get(parameters[name] or "")) is not None:
            found[name] = f"data:;base64,{base64.b64encode(data).decode()}"
    return {**found, "painted": "white"} if "mask" in found else found
