"""Protocols of content stores, and the copy between two of them."""

from clowder_aimage.content.copy import CopyPlan, copy, plan_copy
from clowder_aimage.content.copy_option import OnEvent, Rate
from clowder_aimage.content.store import (
    ContentStore,
    IngestBusyError,
    Lease,
    Overlay,
    Source,
    build_bytes_body,
    build_file_body,
)
from clowder_aimage.content.verified_reader import VerifyingReader, read_all

__all__ = [
    "ContentStore",
    "CopyPlan",
    "IngestBusyError",
    "Lease",
    "OnEvent",
    "Overlay",
    "Rate",
    "Source",
    "VerifyingReader",
    "build_bytes_body",
    "build_file_body",
    "copy",
    "plan_copy",
    "read_all",
]
