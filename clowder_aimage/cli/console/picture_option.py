"""Options for pictures that a picture begins with, and the parameters that they state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.named_picture import format_picture_label, get_named_pictures
from clowder_aimage.cli.console.option import complete_name, complete_path, in_section
from clowder_aimage.cli.console.output import note_once
from clowder_aimage.cli.console.parameter_option import parameter_options
from clowder_aimage.cli.console.stored_name import resolve_reference
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import ALPHA, MAX_REFERENCES, Control, ImageInput
from clowder_aimage.pictures import input_kind
from clowder_aimage.pictures.input_file import InputFile, describe_reduction

if TYPE_CHECKING:
    from clowder_aimage.dialect import AImage
    from clowder_aimage.generation.request import GenerateRequest


picture_options = in_section(
    "Options for a picture to begin with",
    click.option(
        "--image",
        metavar="SOURCE",
        shell_complete=complete_path,
        multiple=True,
        help="Begin with this picture; or edit it, and up to 3 others, if the model does: a file, "
        "'-' (stdin), a data: or https: URL, or oci://HOST/REPO:TAG[#TITLE].",
    ),
    click.option(
        "--mask",
        metavar="SOURCE",
        shell_complete=complete_path,
        help="Repaint only where this picture is white; 'alpha' repaints where --image is "
        "transparent.",
    ),
    parameter_options(ImageInput, without=("image", "mask", "references")),
    click.option(
        "--control",
        metavar="SOURCE",
        shell_complete=complete_path,
        help="Guide a ControlNet by this picture, such as edges, depth or a pose; SOURCE is "
        "as for --image.",
    ),
    click.option(
        "--controlnet",
        type=resolve_reference,
        metavar="REF",
        shell_complete=complete_name,
        help="The ControlNet to use with --control. [default: the model's own]",
    ),
    parameter_options(Control, without=("control", "controlnet")),
)


def read_picture_parameters(values: Mapping[str, Any], *, has_size: bool) -> dict[str, Any]:
    """Return the parameters that the options state: digests in place of files.

    Several images are references; ``for_model`` decides about one. Raises as
    ``NamedPictures.read``.
    """
    files = get_named_pictures()
    parameters = dict[str, Any]()
    if values["controlnet"] is not None:
        parameters["controlnet"] = str(values["controlnet"])
    names = values["image"]
    if len(names) > MAX_REFERENCES:
        raise UsageError(f"--image is given {len(names)} times: at most {MAX_REFERENCES} pictures")
    for name in input_kind.OF_IMAGES if names[1:] else ():
        if values[name]:
            raise UsageError(f"--{name} applies to one --image: several are edited")
    images = [files.read(name, "--image") for name in names]
    digests = tuple(str(image.descriptor.digest) for image in images)
    parameters["references"] = digests if len(digests) > 1 else ()
    parameters["image"] = digests[0] if len(digests) == 1 else None
    if values["control"] is not None:
        control = files.read(values["control"], "--control")
        parameters["control"] = str(control.descriptor.digest)
        _check_control(values, images, control)
    if images and values["mask"] is not None:
        # The check of the request refuses these with any mask.
        is_refused = values["expand"] or values["upscale"]
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
            f"--control: {format_picture_label(values['control'])} has {control.width} x "
            f"{control.height} pixels, the image has {images[0].width} x {images[0].height}",
            hint="--crop needs a control picture of the image's size",
        )


def complete_request(draft: GenerateRequest, model: AImage) -> GenerateRequest:
    """Return the request of a draft for a model, with the size of the first picture if none is set.

    Raises UsageError.
    """
    draft = input_kind.assign_role(draft, model)
    image_input = draft.input
    main_image = next(iter(image_input.images), draft.control.image)
    if main_image is None:
        return draft.apply_defaults(model)
    _warn_about_pictures(draft)
    name, picture = get_named_pictures().find(main_image)
    # With these options, the picture keeps its size.
    keeps_size = draft.has_size or image_input.expand or image_input.crop or image_input.upscale
    if not keeps_size and (
        reduced := describe_reduction(picture, input_kind.get_max_area(image_input.references))
    ):
        option = "--image" if image_input.images else "--control"
        note_once(f"{option}: {format_picture_label(name)} {reduced}; --size sets another size")
    return input_kind.own_sized(draft, picture).apply_defaults(model)


def _warn_about_pictures(draft: GenerateRequest) -> None:
    named = [(digest, "--image") for digest in draft.input.images]
    named += [(draft.control.image, "--control")] if draft.control.image else []
    for digest, option in named:
        name, picture = get_named_pictures().find(digest)
        is_masked = option == "--image" and not draft.input.references
        hint = "--mask alpha paints them" if is_masked else ""
        mask = draft.input.mask if is_masked else None
        for sentence in picture.list_warnings(mask, hint=hint):
            note_once(f"warning: {option}: {format_picture_label(name)} {sentence}")
