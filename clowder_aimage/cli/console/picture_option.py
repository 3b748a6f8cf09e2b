"""Options for pictures that a picture begins with, and the parameters that they state."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from clowder_aimage.cli.console.named_picture import named_pictures, picture_label
from clowder_aimage.cli.console.option import PictureOption, options, parsed
from clowder_aimage.cli.console.output import note_once
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.errors import UsageError
from clowder_aimage.model.pipeline import ALPHA, FITS, MAX_CONTROL, MAX_FEATHER, MAX_UPSCALE
from clowder_aimage.pictures.input_file import InputFile, own_size, reduction

_FILES = ("image", "control")  # the first has the size of the result


def _expand(text: str) -> tuple[int, ...]:
    found = text.split(",")
    if len(found) != 4 or not all(re.fullmatch("[0-9]{1,5}", one, re.ASCII) for one in found):
        raise ValueError(
            f"expected LEFT,TOP,RIGHT,BOTTOM in pixels, such as 0,0,256,0, not {text!r}"
        )
    return tuple(map(int, found))


_option = partial(click.option, cls=PictureOption)
picture_options = options(
    _option(
        "--image",
        metavar="SOURCE",
        help="Begin with this picture: a file, '-' (stdin), a data: or https: URL, or "
        "oci://HOST/REPO:TAG[#TITLE].",
    ),
    _option(
        "--strength",
        type=float,
        help="Part of the steps that are done, up to 1."
        " [default: 0.6; 1 with --mask, --expand; 0.2 with --upscale]",
    ),
    _option("--fine", is_flag=True, help="Do all steps, from the noise level of --strength."),
    _option(
        "--fit",
        type=click.Choice(FITS),
        help="Fit the picture to another size. [default: crop]",
    ),
    _option(
        "--mask",
        metavar="SOURCE",
        help="Paint only what is white in this picture; 'alpha': what is transparent in --image.",
    ),
    _option("--paste", is_flag=True, help="Keep the pixels that are not painted."),
    _option(
        "--feather",
        type=click.IntRange(0, MAX_FEATHER),
        metavar="PIXELS",
        help="Mix pasted and painted pixels over this width. [default: 0]",
    ),
    _option("--crop", is_flag=True, help="Generate only the surroundings of the mask."),
    _option(
        "--expand",
        metavar="LEFT,TOP,RIGHT,BOTTOM",
        callback=parsed(_expand),
        help="Paint these pixels around the picture.",
    ),
    _option(
        "--upscale",
        type=click.FloatRange(1, MAX_UPSCALE),
        metavar="FACTOR",
        help="Enlarge the picture, then improve it in tiles.",
    ),
    _option(
        "--control",
        metavar="SOURCE",
        help="Guide a ControlNet by this picture: edges, depth, a pose; sources as of --image.",
    ),
    _option(
        "--controlnet",
        type=stored_reference,
        metavar="REF",
        help="The ControlNet that --control guides. [default: the model's own]",
    ),
    _option(
        "--control-strength",
        type=click.FloatRange(0, MAX_CONTROL),
        metavar="FLOAT",
        help="How much --control guides. [default: 0.75]",
    ),
)


def picture_parameters(values: Mapping[str, Any], *, has_size: bool) -> dict[str, Any]:
    """Return the parameters that the options state: digests in place of files.

    Without a size, it is the ``own_size`` of the image, else of the control picture. If it is
    enlarged, the size is that of the tiles: the model's. Raises as ``NamedPictures.read``.
    """
    files, parameters = named_pictures(), dict[str, Any]()
    if values["controlnet"] is not None:
        parameters["controlnet"] = str(values["controlnet"])
    found = {
        name: files.read(values[name], f"--{name}") for name in _FILES if values[name] is not None
    }
    parameters |= {name: str(one.descriptor.digest) for name, one in found.items()}
    if not found:
        return parameters
    if "image" in found and values["mask"] is not None:
        is_refused = values["expand"] or values["upscale"]  # with a mask, by check_parameters
        parameters["mask"] = (
            ALPHA if is_refused else files.read_mask(values["mask"], values["image"])
        )
    _check_control(values, found)
    if values["expand"] and has_size:
        raise UsageError("--expand determines the size", hint="omit --size, --width, --height")
    if not has_size and not values["upscale"]:
        parameters |= _own_size(values, *next(iter(found.items())))
    return parameters


def _check_control(values: Mapping[str, Any], found: Mapping[str, InputFile]) -> None:
    """Reject a control picture that cannot be cropped with its image. Raises UsageError."""
    image, control = found.get("image"), found.get("control")
    if not (values["crop"] and image and control):
        return
    if (image.width, image.height) != (control.width, control.height):
        raise UsageError(
            f"--control: {picture_label(values['control'])} has {control.width} x {control.height} "
            f"pixels, the image has {image.width} x {image.height}",
            hint="--crop needs a control picture of the image's size",
        )


def _own_size(values: Mapping[str, Any], name: str, found: InputFile) -> dict[str, Any]:
    """Return the size of a picture that is made from another; say if it is reduced."""
    is_whole = values["expand"] or values["crop"]  # which keep its size
    if not is_whole and (reduced := reduction(found)):
        note_once(f"--{name}: {picture_label(values[name])} {reduced}; --size sets another size")
    # Stretched by less than 16 pixels, as diffusers
    return {**own_size(found, values["expand"] or ()), "fit": values["fit"] or "stretch"}


def to_request(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to a worker for pictures: data URLs in place of digests."""
    known, found = named_pictures().data, dict[str, Any]()
    for name in ("image", "mask", "control"):
        if (data := known.get(parameters[name] or "")) is not None:
            found[name] = f"data:;base64,{base64.b64encode(data).decode()}"
    if "mask" in found:
        found["painted"] = "white"
    if parameters["expand"]:  # the worker computes the size
        found |= {"expand": ",".join(map(str, parameters["expand"])), "width": None, "height": None}
    return found
