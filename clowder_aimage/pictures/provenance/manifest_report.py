"""The report about the manifest of a picture file: who signed it, and if it belongs to the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from clowder_aimage.errors import FormatError, build_extra_error
from clowder_aimage.model.bounded_process import OUTPUT, RefusedError, run_bounded
from clowder_aimage.oci import read_json
from clowder_aimage.pictures.input_file import MAX_BYTES
from clowder_aimage.pictures.provenance.manifest_process import encode_request

_MODULE = "clowder_aimage.pictures.provenance.manifest_process"
# Limits of the process
_SECONDS, _MEMORY = 1.0, 96 << 20
# A fault of no part of the file: the caller's roots do not vouch for the signer
_UNTRUSTED = ("signingCredential.untrusted", "timeStamp.untrusted")


@dataclass(frozen=True, slots=True)
class ManifestReport:
    """The findings of C2PA's library.

    faults: its codes of what is wrong, without that of a signer who is not trusted. is_trusted: a
    root vouches for the signer; None if none was given. actions and inputs: as their fields in
    ``manifest_process``. generation: the assertion of this project, or None.
    """

    faults: tuple[str, ...]
    is_trusted: bool | None
    signer: str
    organization: str
    algorithm: str
    time: str
    agent: str
    actions: tuple[dict[str, str], ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()
    generation: Any = field(default=None, repr=False)

    @property
    def is_valid(self) -> bool:
        """Return True if the signature is valid, and the file is as it was signed."""
        return not self.faults


def has_library() -> bool:
    """Return True if C2PA's library is installed."""
    return find_spec("c2pa") is not None


def read_manifest(data: bytes, kind: str, roots: str = "") -> ManifestReport:
    """Read the manifest of a file of a kind (png, jpeg, webp). Blocks.

    ``roots``: certificates in PEM that signers are compared with.

    Raises:
        UsageError: C2PA's library is not installed.
        FormatError: The manifest is damaged, or reading it exceeds a limit.
        ModelError: The process cannot be started.
    """
    if not has_library():
        raise build_extra_error("checking the signature of a picture", "c2pa")
    if len(data) > MAX_BYTES:
        raise FormatError(f"the file has more than {MAX_BYTES >> 20} MiB")
    request = encode_request(data, kind, roots)
    try:
        output = run_bounded(_MODULE, request, seconds=_SECONDS, memory=_MEMORY)
    except RefusedError as error:
        raise FormatError(f"the manifest cannot be read: {error}") from None
    found = read_json(output, "the report about the manifest", OUTPUT)
    faults = [code for code in found.pop("faults") if code not in _UNTRUSTED]
    if found["state"] == "Invalid" and not faults:
        faults = ["general.error"]
    state, actions, inputs = found.pop("state"), found.pop("actions"), found.pop("inputs")
    is_trusted = state == "Trusted" if roots else None
    return ManifestReport(
        tuple(faults), is_trusted, **found, actions=tuple(actions), inputs=tuple(inputs)
    )
