"""Options for pictures that a picture begins with, and the parameters that they state."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.named_picture import named_pictures, picture_label
from clowder_aimage.cli.console.option import PictureOption, options
from clowder_aimage.cli.console.output import note_once
from clowder_aimage.cli.console.parameter_option import parameter_options
from clowder_aimage.cli.console.stored_name import stored_reference
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import ALPHA, MAX_REFERENCES, Control, ImageInput
from clowder_aimage.pictures.input_file import InputFile, own_size, reduction
from clowder_aimage.pictures.picture_role import OF_IMAGES, assign_role, most_area

if TYPE_CHECKING:
    from clowder_aimage.dialect import AImage


_option = partial(click.option, cls=PictureOption)
picture_options = options(
    _option(
        "--image",
        metavar="SOURCE",
        multiple=True,
        help="Begin with this picture; or edit it, and up to 3 others, if the model does: a file, "
        "'-' (stdin), a data: or https: URL, or oci://HOST/REPO:TAG[#TITLE].",
    ),
    _option(
        "--mask",
        metavar="SOURCE",
        help="Paint only what is white in this picture; 'alpha': what is transparent in --image.",
    ),
    parameter_options(ImageInput, without=("image", "mask", "references"), section=PictureOption),
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
    parameter_options(Control, without=("control", "controlnet"), section=PictureOption),
)


def picture_parameters(values: Mapping[str, Any], *, has_size: bool) -> dict[str, Any]:
    """Return the parameters that the options state: digests in place of files.

    Several images are references; ``for_model`` decides about one. Raises as
    ``NamedPictures.read``.
    """
    files = named_pictures()
    parameters = dict[str, Any]()
    if values["controlnet"] is not None:
        parameters["controlnet"] = str(values["controlnet"])
    names = values["image"]
    if len(names) > MAX_REFERENCES:
        raise UsageError(f"--image is given {len(names)} times: at most {MAX_REFERENCES} pictures")
    for name in OF_IMAGES if names[1:] else ():
        if values[name]:
            raise UsageError(f"--{name} applies to one --image: several are edited")
    images = [files.read(name, "--image") for name in names]
    digests = tuple(str(one.descriptor.digest) for one in images)
    parameters["references"] = digests if len(digests) > 1 else ()
    parameters["image"] = digests[0] if len(digests) == 1 else None
    if values["control"] is not None:
        control = files.read(values["control"], "--control")
        parameters["control"] = str(control.descriptor.digest)
        _check_control(values, images, control)
    if images and values["mask"] is not None:
        is_refused = values["expand"] or values["upscale"]  # with a mask, by the request
        parameters["mask"] = ALPHA if is_refused else files.read_mask(values["mask"], names[0])
    if values["expand"] and images and has_size:
        raise UsageError("--expand determines the size", hint="omit --size, --width, --height")
    return parameters


def _check_control(
    values: Mapping[str, Any], images: Sequence[InputFile], control: InputFile
) -> None:
    """Reject a control picture that cannot be cropped with its image. Raises UsageError."""
    if not (values["crop"] and images):
        return
    if (images[0].width, images[0].height) != (control.width, control.height):
        raise UsageError(
            f"--control: {picture_label(values['control'])} has {control.width} x {control.height} "
            f"pixels, the image has {images[0].width} x {images[0].height}",
            hint="--crop needs a control picture of the image's size",
        )


def for_model(model: AImage, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of pictures for a model: their roles, and the size if none is given.

    It is the ``own_size`` of the first image, else of the control picture; if that is enlarged, the
    size is that of the tiles: the model's. Raises as ``assign_role``.
    """
    found = assign_role(model, parameters)
    images = [found["image"], *found["references"]]
    first = next(filter(None, (*images, found["control"])), None)
    has_size = found["width"] is not None or found["height"] is not None
    if first is None or has_size or found["upscale"]:
        return found
    name, picture = named_pictures().find(first)
    most, is_whole = (
        most_area(found["references"]),
        found["expand"] or found["crop"],
    )  # which keep its size
    if not is_whole and (reduced := reduction(picture, most)):
        option = "--image" if first in images else "--control"
        note_once(f"{option}: {picture_label(name)} {reduced}; --size sets another size")
    # Stretched by less than 16 pixels, as diffusers
    fit = found["fit"] if found["references"] else found["fit"] or "stretch"
    return found | own_size(picture, found["expand"] or (), most) | {"fit": fit}


def to_request(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to a worker for pictures: data URLs in place of digests."""
    fields: dict[str, Any] = {
        name: _data_url(digest)
        for name in ("image", "mask", "control")
        if (digest := parameters[name]) not in (None, ALPHA)
    }
    if images := parameters["references"]:
        fields["images"] = list(map(_data_url, images))
    return fields | ({"painted": "white"} if "mask" in fields else {})


def _data_url(digest: str) -> str:
    return f"data:;base64,{base64.b64encode(named_pictures().data[digest]).decode()}"
