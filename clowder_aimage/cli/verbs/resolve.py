"""The verb ``resolve``."""

from __future__ import annotations

from clowder_aimage.cli.console.example import NAME, examples
from clowder_aimage.cli.console.option import (
    connection_options,
    get_settings,
    reference_argument,
    verb,
)
from clowder_aimage.cli.console.output import print_result
from clowder_aimage.oci import Reference
from clowder_aimage.oci.descriptor import to_plain


@examples(f"aimage resolve {NAME}")
@verb
@reference_argument
@connection_options
def resolve(reference: Reference) -> None:
    """Print the digest of the manifest that REF names in its registry.

    The manifest itself is fetched only if the registry does not state its digest.
    """
    from clowder_aimage.registry import Repository

    with Repository(reference, get_settings().build_client_options()) as repository:
        descriptor = repository.describe(reference)
    print_result({"reference": str(reference), **to_plain(descriptor)}, str(descriptor.digest))
