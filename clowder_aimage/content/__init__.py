"""The protocols of stores of content, and the copy between two of them."""

from clowder_aimage.content.copy import copy
from clowder_aimage.content.copy_event import CopyEvent, OnEvent
from clowder_aimage.content.copy_plan import CopyPlan, plan_copy
from clowder_aimage.content.memory import MemoryStore, Overlay
from clowder_aimage.content.rate import Rate
from clowder_aimage.content.store import (
    Body,
    ContentStore,
    Ingest,
    IngestBusyError,
    Lease,
    Source,
    Target,
    bytes_body,
    file_body,
)
from clowder_aimage.content.verified_reader import VerifyingReader, read_all

__all__ = [
    "Body",
    "ContentStore",
    "CopyEvent",
    "CopyPlan",
    "Ingest",
    "IngestBusyError",
    "Lease",
    "MemoryStore",
    "OnEvent",
    "Overlay",
    "Rate",
    "Source",
    "Target",
    "VerifyingReader",
    "bytes_body",
    "copy",
    "file_body",
    "plan_copy",
    "read_all",
]
