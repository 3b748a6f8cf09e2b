"""The settings of a gateway: from options, AIMAGE_GATEWAY_..., then the configuration."""

from __future__ import annotations

from pydantic import Field

from clowder_aimage.engine.admission import FOR_EVER
from clowder_aimage.engine.endpoint import DEFAULT_HOST
from clowder_aimage.engine.settings import CallerSettings, Limit, Origins, Seconds, Size


class GatewaySettings(CallerSettings):
    """The settings of a gateway; ``nats`` are the servers of its fleet, with commas."""

    SECTION = "gateway"
    PREFIX = "AIMAGE_GATEWAY_"
    ADDRESS = DEFAULT_HOST

    allow_origins: Origins = ()
    nats: str | None = None
    # The stream of files has 2 GiB by default
    caller_bytes: Size = 512 << 20
    queue: int = Field(default=1000, ge=0)
    max_wait: Seconds = 30.0
    deadline: Limit = FOR_EVER
