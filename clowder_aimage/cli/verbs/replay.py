"""The verb ``replay``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.named_picture import create_input_source
from clowder_aimage.cli.console.option import connection_options, verb
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.cli.worker.picture_replay import (
    ReplayOptions,
    replay_options,
    replay_picture,
)
from clowder_aimage.errors import VerificationError, needs

if TYPE_CHECKING:
    from clowder_aimage.model.picture import StoredPicture


@examples("aimage replay circles.png")
@verb
@click.argument("picture")
@replay_options
@connection_options
def replay(picture: str, **values: Any) -> int:
    """Generate PICTURE again from the metadata in it, and compare the two.

    PICTURE is a PNG, JPEG or WebP file, or oci://HOST/REPO:TAG[#TITLE]. Its input pictures are read
    from the store, else --image, --mask and --control name them as for 'aimage run'; their digests
    must be those in PICTURE.

    The AImage and its adapters are pulled by their digests if the store lacks them. --lora names
    other adapters, with the strengths of those in the picture unless it has its own. The exit code
    is 5 if the pictures differ by more than the tolerance, for JPEG and WebP by more than these
    formats lose. Another library or device rounds differently: pictures may differ a little.
    """
    comparison = replay_picture(picture, _read(picture), ReplayOptions(**values))
    print_result(comparison.value, comparison.text)
    return 0 if comparison.is_equal else VerificationError.exit_code


def _read(picture: str) -> StoredPicture:
    """Return a picture of a file or of an artifact, with its metadata."""
    with needs("running a model", "mlx"):
        from clowder_aimage.model.picture import build_metadata_error, read_picture
    from clowder_aimage.model.picture_file import read_file

    data, stated = b"", dict[str, Any]()
    if picture.lower().startswith("oci://"):
        data, stated = create_input_source().read_made(picture)
    else:
        data = read_file(Path(picture))
    read = read_picture(data, picture)
    if not (stated or read.metadata):
        raise build_metadata_error(picture)
    file_metadata = {name: read.metadata[name] for name in ("quality",) if name in read.metadata}
    return replace(read, metadata={**stated, **file_metadata} if stated else read.metadata)
